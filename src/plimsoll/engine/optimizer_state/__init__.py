"""Keeps optimizer state on a link between steps, and runs the optimizer's step in chunks of parameters."""
