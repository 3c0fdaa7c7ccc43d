"""Execute a plan on a model: saved-tensor hooks, recomputation of dropped tensors, checks before tensors are dropped (guards),
and a fallback that keeps everything.
"""
