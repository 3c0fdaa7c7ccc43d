"""Compare plans that recompute everything with torch's checkpointing, on models whose code reads values of tensors.

`branching` and `routing` hold small blocks, one function or class each, `architectures` models in plain torch, and
`transformers_models` models of transformers. `compare` trains a model three times. A new kind of block is one function, and
one name in the tuple at the end of its file.
"""
