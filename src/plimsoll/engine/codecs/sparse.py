"""Codecs that store a bitmap, and the elements marked in it in full. `TopK` keeps the largest elements, `Zeros` the nonzero
ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.engine.codecs import layout
from plimsoll.engine.codecs.layout import (
    CHUNK,
    FLOATS,
    BitPacker,
    Elements,
    chunks,
    empty_decoded,
    has_patterns,
    packed_bits_bytes,
    patterns_of,
)
from plimsoll.engine.codecs.protocol import Codec, Payload, number

_SPARSE_CHUNK = CHUNK // 4
"""The number of elements per chunk here. It is smaller than ``CHUNK``: selecting by a mask needs up to 16 bytes per element."""
_DIGIT = 16
"""The number of bits of a magnitude that are counted in one pass of the radix select."""


def _sparse_bytes(count: int, kept: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of the bitmap and the kept elements together."""
    return packed_bits_bytes(count) + kept * dtype.itemsize


def _sparse_workspace_bytes(count: int, dtype: torch.dtype) -> int:
    """Return the most bytes of temporary memory that encoding or decoding needs. This includes a copy of a chunk for tensors
    with gaps.
    """
    most = min(count, _SPARSE_CHUNK)
    return BitPacker.scratch_bytes(most) + most * (dtype.itemsize + 17) + min(count, CHUNK) * dtype.itemsize + 256


def _gather(
    elements: Elements,
    kept: int,
    mark: Callable[[torch.Tensor, torch.Tensor], object],
    counts: Sequence[int] | None = None,
) -> Payload:
    """Return a payload with ``kept`` elements in full. Their bit patterns are exact.

    Args:
        elements: all elements of the tensor.
        kept: the number of marked elements.
        counts: the number of marked elements in each chunk; ``None`` if unknown, so that the host waits for the device in each
            chunk.
        mark: a function that gets patterns and a tensor of bools. It writes to the bools which patterns are kept.
    """
    packed = torch.empty(packed_bits_bytes(elements.count), dtype=torch.uint8, device=elements.device)
    values = torch.empty(kept, dtype=elements.dtype, device=elements.device)
    packer = BitPacker(min(_SPARSE_CHUNK, elements.count), elements.device)
    end = 0
    for index, (start, stop) in enumerate(chunks(elements.count, _SPARSE_CHUNK)):
        patterns = patterns_of(elements.run(start, stop))
        bits = packer.bits(stop - start)
        mark(patterns, bits)
        found = _select(patterns, bits, None if counts is None else counts[index])
        begin, end = end, end + found.numel()
        patterns_of(values[begin:end]).copy_(found)
        packer.pack(stop - start, out=packed[start // 8 : packed_bits_bytes(stop)])
    return elements.payload(packed, values)


def _select(patterns: torch.Tensor, bits: torch.Tensor, count: int | None) -> torch.Tensor:
    """Return the ``count`` patterns whose bits are set.

    If the count is unknown, the patterns are selected by a mask, and the host waits for the device.
    """
    if count is None or not layout.host_waits(patterns.device):
        return torch.masked_select(patterns, bits)
    found = patterns.new_empty(count + 1)  # unselected elements are written to the last place
    places = torch.cumsum(bits, 0).sub_(1)
    found.scatter_(0, places.masked_fill_(bits.logical_not(), count), patterns)
    return found[:count]


def _scatter(payload: Payload) -> torch.Tensor:
    """Decode a payload that `_gather` made, and return the tensor."""
    tensor, flat = empty_decoded(payload)
    packed, values = payload.parts
    packer = BitPacker(min(_SPARSE_CHUNK, flat.numel()), flat.device)
    end, before = 0, torch.zeros(1, dtype=torch.int64, device=flat.device)
    for start, stop in chunks(flat.numel(), _SPARSE_CHUNK):
        bits = packer.unpack(packed[start // 8 : packed_bits_bytes(stop)], stop - start)
        out = patterns_of(flat[start:stop]).zero_()
        if not layout.host_waits(flat.device):
            begin, end = end, end + int(torch.count_nonzero(bits))
            out.masked_scatter_(bits, patterns_of(values[begin:end]))
        elif values.numel():
            places = torch.cumsum(bits, 0).add_(before)
            before = places[-1:].clone()
            out.copy_(patterns_of(values)[places.sub_(1).clamp_(min=0)]).mul_(bits)
    return tensor


@dataclass(frozen=True, slots=True)
class Zeros(Codec):
    """A codec that stores a bit for each element, and all nonzero elements in full. It is for activations behind ReLU.

    The codec is exact by bit pattern: -0.0 and NaN are kept like any other value. Dropout multiplies by zero, so that half of
    the elements that it drops are -0.0. In ``encode``, the host waits for the device once, to know the number of values.
    """

    family: ClassVar[str] = "zeros"
    is_lossless: ClassVar[bool] = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return has_patterns(dtype) and dtype is not torch.bool

    def is_capturable(self, dtype: torch.dtype) -> bool:
        return False

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int | None:
        return None

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        return _sparse_workspace_bytes(count, dtype)

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        elements = Elements(tensor)
        ends = chunks(elements.count, _SPARSE_CHUNK)
        found = [torch.count_nonzero(patterns_of(elements.run(start, stop))) for start, stop in ends]
        counts = torch.stack(found).tolist() if found else []  # waits for the device once
        kept = sum(counts)
        if most_bytes is not None and _sparse_bytes(elements.count, kept, elements.dtype) > most_bytes:
            return None
        return _gather(elements, kept, lambda patterns, bits: bits.copy_(patterns), counts)

    def decode(self, payload: Payload) -> torch.Tensor:
        return _scatter(payload)


@dataclass(frozen=True, slots=True)
class TopK(Codec):
    """A codec that stores the elements with the largest magnitudes in full: a ``share`` of the tensor. The others decode to
    zero.

    The smallest magnitude that is kept is found by counting bit patterns (a radix select: exact, and without a copy of the
    tensor). Among equal magnitudes, the first are kept. In ``encode``, the host waits for the device.
    """

    share: float = number(0.1, least=1e-6, most=1.0)

    family: ClassVar[str] = "topk"
    dtypes: ClassVar = FLOATS
    is_lossless: ClassVar[bool] = False

    def is_capturable(self, dtype: torch.dtype) -> bool:
        return False

    def kept(self, count: int) -> int:
        """Return the number of elements that are kept out of ``count``."""
        return int(min(count, math.ceil(self.share * count)))

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int:
        return _sparse_bytes(count, self.kept(count), dtype)

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        counting = min(count, _SPARSE_CHUNK) * (16 + 2 * dtype.itemsize) + 5 * 8 * (1 << _DIGIT)
        return counting + _sparse_workspace_bytes(0, dtype) + min(count, CHUNK) * dtype.itemsize

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

        return _gather(elements, kept, mark)

    def decode(self, payload: Payload) -> torch.Tensor:
        return _scatter(payload)


def _magnitudes(patterns: torch.Tensor) -> torch.Tensor:
    """Return integers that have the same order as the magnitudes of the floats with these patterns."""
    return patterns & torch.iinfo(patterns.dtype).max


def _threshold(elements: Elements, kept: int) -> tuple[int, int] | None:
    """Return the pattern of the smallest kept magnitude, and how many elements with exactly this magnitude are kept.

    Return None if an element is NaN or infinite.
    """
    infinity = int(patterns_of(torch.tensor(torch.inf, dtype=elements.dtype)))
    prefix, missing = 0, kept
    for shift in range(8 * elements.dtype.itemsize - _DIGIT, -1, -_DIGIT):
        counts = torch.zeros(2**_DIGIT, dtype=torch.int64, device=elements.device)
        for start, stop in chunks(elements.count, _SPARSE_CHUNK):
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
