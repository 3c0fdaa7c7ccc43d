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

from plimsoll.artifacts.traffic import Transfer
from plimsoll.distributed.gradient_compression.encoders import encoder_of
from plimsoll.distributed.gradient_compression.method import Method

Form = Literal["mean", "shard"]
"""Whether every rank gets the whole mean, as DDP's ranks do, or its own shard of it, as FSDP2's do."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What is compressed; everything else is sent as it is."""


def dense_bytes(elements: int, dtype: torch.dtype, ranks: int, form: Form) -> int:
    """Sent by one rank for a gradient that is not compressed."""
    transfer = Transfer.ALL_REDUCE if form == "mean" else Transfer.REDUCE_SCATTER
    return int(transfer.wire_bytes(elements * dtype.itemsize, ranks))


def compressed_bytes(method: Method, shape: Sequence[int], dtype: torch.dtype, ranks: int, form: Form) -> int:
    """Sent by one rank for a gradient that is compressed; sharded, ``shape`` is ``(ranks, elements of a padded shard)``."""
    elements = math.prod(shape)
    chunk = -(-elements // ranks)
    if method.kind == "powersgd":
        rows, columns, rank = factors_of(shape, method.rank)
        return int(Transfer.ALL_REDUCE.wire_bytes((rows + columns) * rank * torch.float32.itemsize, ranks))
    if method.kind == "randomk":
        sent = method.elements_sent(chunk) * ranks if form == "shard" else method.elements_sent(elements)
        return dense_bytes(sent, dtype, ranks, form)
    encoder = encoder_of(method)
    if form == "mean" and method.kind != "int8":
        return int(Transfer.ALL_GATHER.wire_bytes(encoder.payload_bytes(elements, dtype), ranks))
    part_bytes = encoder.payload_bytes(chunk, dtype)
    passes = 1 if form == "shard" else 2  # the all-gather of averaged chunks sends as much as the all-to-all before it
    return passes * int(Transfer.ALL_TO_ALL.wire_bytes(ranks * part_bytes, ranks))


def factors_of(shape: Sequence[int], rank: int) -> tuple[int, int, int]:
    """Rows and columns of the matrix that a parameter is taken for, and how many columns its factors have.

    Example:
        >>> factors_of((64, 3, 3, 3), 4)
        (64, 27, 4)
    """
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return rows, columns, min(rows, columns, rank)
