"""Meters of memory and time: exact allocator events on the CPU, the allocator's own counters on a GPU."""
