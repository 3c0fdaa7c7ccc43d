"""Elements in, blocks with a scale of their own out: what int8, int4 and fp8 share.

A block is ``width`` neighbours in memory. Its scale is a bfloat16, rounded up, so that nothing of the block lies beyond the
last code; an affine block also has the value of its code 0 in bfloat16, rounded down. The scale is NaN where the block has
NaN, infinity, or values so close to the end of the dtype's range that decoding might leave it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from plimsoll.engine.codecs.layout import CHUNK, Elements

SCALE_DTYPE = torch.bfloat16
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 4096
_UP = 1 + 2**-8 + 2**-15
"""Rounding to bfloat16 takes at most 2**-8: afterwards at least 2**-16 of this is left."""
_LEAST_SCALE = 2.0**-126
"""The smallest float32 whose inverse is finite and that is not flushed to zero."""
_HEADROOM = 1 - 2**-6
"""Of the dtype's largest number: decoding overshoots by less than this leaves."""


@dataclass(frozen=True, slots=True)
class Span:
    """Some whole blocks of ``width``, or the short one at the end, which is a block of its own."""

    start: int
    stop: int
    first_block: int
    last_block: int
    width: int


def spans(count: int, width: int) -> Iterator[Span]:
    """The elements of ``count`` in order, ``CHUNK`` at most at a time."""
    whole = count - count % width
    for start in range(0, whole, CHUNK):
        stop = min(start + CHUNK, whole)
        yield Span(start, stop, start // width, stop // width, width)
    if whole < count:
        yield Span(whole, count, whole // width, whole // width + 1, count - whole)


def largest_of(dtype: torch.dtype) -> float:
    """The largest magnitude that certainly decodes to a number of ``dtype``."""
    limits = torch.finfo(dtype)
    return min(limits.max * _HEADROOM, torch.finfo(torch.float32).max / 4)  # the reach of a block is up to twice that


def block_count(count: int, width: int) -> int:
    """Blocks of ``count`` elements."""
    return -(-count // width)


def blocks_of(elements: Elements, span: Span, scratch: torch.Tensor) -> torch.Tensor:
    """The blocks of a span as rows of float32: a view where the elements are float32, else converted into ``scratch``."""
    run = elements.run(span.start, span.stop)
    if elements.dtype is not torch.float32:
        run = scratch[: run.numel()].copy_(run)
    return run.view(-1, span.width)


def symmetric_scales(rows: torch.Tensor, last_code: float, largest: float) -> torch.Tensor:
    """The scale of each row, whose codes go from ``-last_code`` to ``last_code``."""
    farthest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
    return _scales(farthest, farthest, last_code, largest)


def affine_scales(rows: torch.Tensor, codes: int, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of each row and the value of its lowest code, for ``codes`` codes."""
    most, least = rows.amax(1, keepdim=True), rows.amin(1, keepdim=True)
    farthest = torch.maximum(most, -least)
    lows = (least - least.abs().mul_(_UP - 1)).to(SCALE_DTYPE)
    return _scales(most.sub_(lows), farthest, codes - 1, largest), lows


def _scales(reach: torch.Tensor, farthest: torch.Tensor, steps: float, largest: float) -> torch.Tensor:
    """``reach / steps`` rounded up; NaN where ``farthest`` is above ``largest``."""
    scales = reach.mul(_UP / steps).clamp_(min=_LEAST_SCALE)  # NaN stays NaN
    return scales.masked_fill_(farthest > largest, torch.nan).to(SCALE_DTYPE)


def are_representable(scales: torch.Tensor) -> bool:
    """Whether no scale is NaN. On CUDA the answer is True unseen: decode gives NaN for such blocks."""
    return scales.device.type != "cpu" or not math.isnan(scales.amax().item())
