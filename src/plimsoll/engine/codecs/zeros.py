"""A tensor that is mostly zeros in, a bitmap and the other values out.

Activations behind ReLU. Exact by bit pattern: -0.0 and NaN are values like any other; dropout, which multiplies by zero,
makes -0.0 of half of what it drops. How many values there are has to be waited for, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.engine.codecs.layout import Elements, chunks
from plimsoll.engine.codecs.patterns import has_patterns, patterns_of
from plimsoll.engine.codecs.protocol import Codec, Payload
from plimsoll.engine.codecs.sparse import SPARSE_CHUNK, gather, scatter, sparse_bytes, sparse_workspace_bytes


@dataclass(frozen=True, slots=True)
class Zeros(Codec):
    """A bit for each element, and in full what is not zero."""

    is_lossless: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "zeros"

    def accepts(self, dtype: torch.dtype) -> bool:
        return has_patterns(dtype) and dtype is not torch.bool

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int | None:
        return None

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        return sparse_workspace_bytes(count, dtype)

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        elements = Elements(tensor)
        ends = chunks(elements.count, SPARSE_CHUNK)
        kept = sum(int(torch.count_nonzero(patterns_of(elements.run(start, stop)))) for start, stop in ends)
        if most_bytes is not None and sparse_bytes(elements.count, kept, elements.dtype) > most_bytes:
            return None
        return gather(elements, kept, lambda patterns, bits: bits.copy_(patterns))

    def decode(self, payload: Payload) -> torch.Tensor:
        return scatter(payload)
