"""Meters of memory and time. On the CPU they read exact allocator events, on a GPU the allocator's own counters."""
