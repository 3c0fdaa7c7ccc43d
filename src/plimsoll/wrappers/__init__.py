"""Torch's own wrappers of a model in, the model inside and what the wrapper itself holds out."""
