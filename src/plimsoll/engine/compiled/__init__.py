"""Apply a plan inside code that torch.compile compiles."""
