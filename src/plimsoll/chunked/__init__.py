"""A linear head and its cross-entropy computed chunk by chunk: all logits are never alive together, gradients are exact.

Example:
    >>> from plimsoll.chunked import chunk_loss, linear_cross_entropy
"""

from plimsoll.chunked.handle import ChunkHandle, chunk_loss
from plimsoll.chunked.loss import linear_cross_entropy

__all__ = ["ChunkHandle", "chunk_loss", "linear_cross_entropy"]
