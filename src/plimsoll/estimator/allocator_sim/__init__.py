"""Simulates PyTorch's caching allocator: memory that is reserved for a sequence of allocations."""
