"""Keeps optimizer state in host memory or on disk between steps, and runs the optimizer's step in chunks of parameters."""
