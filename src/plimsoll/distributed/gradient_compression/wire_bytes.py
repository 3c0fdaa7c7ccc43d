"""How many bytes one rank sends for a gradient, compressed and not: what decides whether a parameter is compressed.

All-reduce passes every byte twice around the ring, reduce-scatter and all-gather once. Sending and receiving are symmetric, so
these are the bytes that each rank's link carries in each direction; what a library does on other topologies may differ. The
same figures are counted while training.

Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from plimsoll.distributed.gradient_compression.encoders import encoder_of
from plimsoll.distributed.gradient_compression.method import Method


def all_reduce_bytes(message_bytes: int, ranks: int) -> int:
    """Sent by one rank to reduce a message that all have.

    Example:
        >>> all_reduce_bytes(1000, 4)
        1500
    """
    return 2 * message_bytes * (ranks - 1) // ranks


def reduce_scatter_bytes(message_bytes: int, ranks: int) -> int:
    """Sent by one rank to reduce a message of which each rank gets a part; an all-to-all sends as much."""
    return message_bytes * (ranks - 1) // ranks


def all_gather_bytes(part_bytes: int, ranks: int) -> int:
    """Sent by one rank to give its part to all others, and to pass theirs on."""
    return part_bytes * (ranks - 1)


Form = Literal["mean", "shard"]
"""Whether every rank gets the whole mean, as DDP's ranks do, or its own shard of it, as FSDP2's do."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What is compressed; everything else is sent as it is."""


def dense_bytes(elements: int, dtype: torch.dtype, ranks: int, form: Form) -> int:
    """Sent by one rank for a gradient that is not compressed."""
    message_bytes = elements * dtype.itemsize
    return all_reduce_bytes(message_bytes, ranks) if form == "mean" else reduce_scatter_bytes(message_bytes, ranks)


def compressed_bytes(method: Method, shape: Sequence[int], dtype: torch.dtype, ranks: int, form: Form) -> int:
    """Sent by one rank for a gradient that is compressed; sharded, ``shape`` is ``(ranks, elements of a padded shard)``."""
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
