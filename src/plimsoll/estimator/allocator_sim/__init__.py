"""Simulates PyTorch's caching allocator: the memory that it reserves for a sequence of allocations."""
