"""A parameter, a method and a number of ranks in, bytes that one rank sends for it, compressed and not, out.

The same figures decide which parameters are compressed and are counted while training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from plimsoll.distributed.gradient_compression.encoders import encoder_of
from plimsoll.distributed.gradient_compression.method import Method
from plimsoll.distributed.gradient_compression.traffic import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes

Form = Literal["mean", "shard"]
"""Whether every rank gets the whole mean, as DDP's ranks do, or its own shard of it, as FSDP2's do."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What is compressed; everything else is sent as it is."""


def dense_bytes(elements: int, dtype: torch.dtype, ranks: int, form: Form) -> int:
    """Sent by one rank for a gradient that is not compressed."""
    message_bytes = elements * dtype.itemsize
    return all_reduce_bytes(message_bytes, ranks) if form == "mean" else reduce_scatter_bytes(message_bytes, ranks)


def compressed_bytes(method: Method, shape: Sequence[int], dtype: torch.dtype, ranks: int, form: Form) -> int:
    """Sent by one rank for a gradient that is compressed.

    Args:
        method: not ``none``.
        shape: of the parameter; sharded, of the ``(ranks, elements)`` that its shards are padded to.
        dtype: of the gradient.
        ranks: that take part.
        form: what comes out.
    """
    elements = math.prod(shape)
    chunk = -(-elements // ranks)
    if method.kind == "powersgd":
        rows, columns, rank = factors_of(shape, method.rank)
        return all_reduce_bytes((rows + columns) * rank * torch.float32.itemsize, ranks)
    if method.kind == "randomk":
        if form == "shard":
            return reduce_scatter_bytes(ranks * method.elements_sent(chunk) * dtype.itemsize, ranks)
        return all_reduce_bytes(method.elements_sent(elements) * dtype.itemsize, ranks)
    encoder = encoder_of(method)
    if form == "shard":
        return reduce_scatter_bytes(ranks * encoder.payload_bytes(chunk, dtype), ranks)
    if method.kind == "int8":
        part_bytes = encoder.payload_bytes(chunk, dtype)
        return reduce_scatter_bytes(ranks * part_bytes, ranks) + all_gather_bytes(part_bytes, ranks)
    return all_gather_bytes(encoder.payload_bytes(elements, dtype), ranks)


def factors_of(shape: Sequence[int], rank: int) -> tuple[int, int, int]:
    """Rows and columns of the matrix that a parameter is taken for, and how many columns its factors have.

    Example:
        >>> factors_of((64, 3, 3, 3), 4)
        (64, 27, 4)
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return rows, columns, min(rows, columns, rank)
