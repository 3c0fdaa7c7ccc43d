"""Computes a linear head (hidden states to logits) and its cross-entropy chunk by chunk, so that the full logits tensor never
exists.

The gradients equal the plain loss's gradients up to the order of summation. ``chunk_loss`` changes a causal language model of
transformers and returns a handle that undoes the change. ``linear_cross_entropy`` is the loss function itself, for models that
compute their own loss.

Example:
    >>> import torch
    >>> from plimsoll.chunked import linear_cross_entropy
    >>> hidden = torch.randn(8, 16, requires_grad=True)
    >>> head = torch.randn(100, 16, requires_grad=True)
    >>> labels = torch.arange(8)
    >>> loss = linear_cross_entropy(hidden, head, labels, chunk_rows=2)
    >>> bool(torch.isclose(loss, torch.nn.functional.cross_entropy(hidden @ head.T, labels)))
    True

    For a causal language model of transformers, ``chunk_loss`` replaces the loss without changing the model's code:

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from plimsoll.chunked import chunk_loss
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    >>> ids = torch.randint(0, 128, (1, 16))
    >>> with chunk_loss(model):
    ...     model(input_ids=ids, labels=ids).loss.backward()

The implementation is in `plimsoll.engine.chunked_loss`.
"""

from plimsoll.engine.chunked_loss.handle import ChunkHandle, chunk_loss
from plimsoll.engine.chunked_loss.loss import linear_cross_entropy

__all__ = ["ChunkHandle", "chunk_loss", "linear_cross_entropy"]
