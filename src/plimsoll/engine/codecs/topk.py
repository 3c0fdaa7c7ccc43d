"""A float tensor in, its largest magnitudes in full out; the others come back as zero.

The smallest magnitude that is kept is found by counting bit patterns (a radix select: exact, and without a copy of the
tensor); of equal ones the first are kept. Where the kept ones were is a bitmap. Waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.engine.codecs.blocks import FLOATS
from plimsoll.engine.codecs.layout import CHUNK, Elements, chunks
from plimsoll.engine.codecs.options import number, spell
from plimsoll.engine.codecs.patterns import patterns_of
from plimsoll.engine.codecs.protocol import Codec, Payload
from plimsoll.engine.codecs.sparse import SPARSE_CHUNK, gather, scatter, sparse_bytes, sparse_workspace_bytes

_DIGIT = 16
"""Bits that one pass counts by."""


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """The largest ``share`` of the whole tensor."""

    share: float = number(0.1, least=1e-6, most=1.0)

    is_lossless: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return spell("topk", self)

    def kept(self, count: int) -> int:
        """How many of ``count`` are kept."""
        return int(min(count, math.ceil(self.share * count)))

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int:
        return sparse_bytes(count, self.kept(count), dtype)

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        counting = min(count, SPARSE_CHUNK) * (16 + 2 * dtype.itemsize) + 5 * 8 * (1 << _DIGIT)
        return counting + sparse_workspace_bytes(0, dtype) + min(count, CHUNK) * dtype.itemsize

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        elements = Elements(tensor)
        if most_bytes is not None and self.payload_bytes(elements.count, elements.dtype) > most_bytes:
            return None
        kept = self.kept(elements.count)
        found = _threshold(elements, kept)
        if found is None:
            return None
        threshold, equal = found

        def mark(patterns: torch.Tensor, bits: torch.Tensor) -> None:
            nonlocal equal
            magnitudes = _magnitudes(patterns)
            torch.gt(magnitudes, threshold, out=bits)
            if equal:
                ties = torch.nonzero(magnitudes == threshold).flatten()[:equal]
                equal -= ties.numel()
                bits[ties] = True

        return gather(elements, kept, mark)

    def decode(self, payload: Payload) -> torch.Tensor:
        return scatter(payload)


def _magnitudes(patterns: torch.Tensor) -> torch.Tensor:
    """Integers that are ordered as the magnitudes of the floats of these patterns."""
    return patterns & torch.iinfo(patterns.dtype).max


def _threshold(elements: Elements, kept: int) -> tuple[int, int] | None:
    """The pattern of the smallest magnitude kept, and how many of those that equal it are; None with NaN or infinity."""
    infinity = int(patterns_of(torch.tensor(torch.inf, dtype=elements.dtype)))
    prefix, missing = 0, kept
    for shift in range(8 * elements.dtype.itemsize - _DIGIT, -1, -_DIGIT):
        counts = torch.zeros(2**_DIGIT, dtype=torch.int64, device=elements.device)
        for start, stop in chunks(elements.count, SPARSE_CHUNK):
            magnitudes = _magnitudes(patterns_of(elements.run(start, stop)))
            if int(magnitudes.max()) >= infinity:
                return None
            digits = magnitudes >> shift
            if shift + _DIGIT < 8 * elements.dtype.itemsize:
                digits = digits[digits >> _DIGIT == prefix] & (2**_DIGIT - 1)
            counts.add_(torch.bincount(digits, minlength=2**_DIGIT))
        from_top = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, max(missing, 1)))
        digit = 2**_DIGIT - 1 - place
        missing -= int(from_top[place - 1]) if place else 0
        prefix = prefix << _DIGIT | max(digit, 0)
    return prefix, missing
