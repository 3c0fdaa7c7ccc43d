"""Allocations and releases in, the memory that PyTorch's caching allocator reserves for them out. No torch in here."""
