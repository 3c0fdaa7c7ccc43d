"""Elements in, whole-number codes with a scale per block out, and back: the codec behind int8 and int4.

Symmetric: ``x = code * scale``; zero stays zero. Affine: ``x = code * scale + low``, which wastes no codes where a block lies
on one side of zero. Either in the basis of `rotation`, where outliers do not stretch the scale of their block, or as it is.
Rounding to nearest is off by at most half a scale, stochastic rounding by less than one. Where the scale comes from: `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from plimsoll.engine.codecs.blocks import (
    SCALE_DTYPE,
    Span,
    affine_scales,
    are_representable,
    block_count,
    blocks_of,
    largest_of,
    spans,
    symmetric_scales,
)
from plimsoll.engine.codecs.kernels import are_usable
from plimsoll.engine.codecs.layout import CHUNK, Elements, empty_decoded
from plimsoll.engine.codecs.packing import pack_nibbles, packed_nibbles_bytes, unpack_nibbles
from plimsoll.engine.codecs.protocol import Payload
from plimsoll.engine.codecs.rotation import GAIN, hadamard, rotate
from plimsoll.engine.codecs.rounding import StochasticRounding


@dataclass(frozen=True, slots=True)
class Grid:
    """How codes of ``bits`` (8 or 4) are laid over blocks of ``block`` elements."""

    bits: int
    block: int
    is_affine: bool
    is_rotated: bool
    is_stochastic: bool

    @property
    def last_code(self) -> int:
        """The largest code of a symmetric grid; the smallest is its negative."""
        return (1 << (self.bits - 1)) - 1

    @property
    def bias(self) -> int:
        """What is added to a code to store it: bytes are signed, halves of bytes are not."""
        if self.bits == 8:
            return -128 if self.is_affine else 0
        return 0 if self.is_affine else 1 << (self.bits - 1)

    def largest(self, dtype: torch.dtype) -> float:
        """The largest magnitude that a block of ``dtype`` may have in the basis that it is quantised in."""
        if not self.is_rotated:
            return largest_of(dtype)
        # Rotating back may bring as much again; float16 is clamped then.
        return largest_of(torch.float32) / (2 * GAIN)

    def codes_bytes(self, count: int) -> int:
        return count if self.bits == 8 else packed_nibbles_bytes(count)

    def payload_bytes(self, count: int) -> int:
        scales = 2 if self.is_affine else 1
        return self.codes_bytes(count) + scales * SCALE_DTYPE.itemsize * block_count(count, self.block)

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        most = min(count, CHUNK)
        per_block = 40 * (block_count(most, self.block) + 1)
        noise = StochasticRounding.scratch_bytes(most) if self.is_stochastic else 0
        floats = 8 if self.is_rotated else 4
        return most * (floats + dtype.itemsize) + 2 * (most + 1) + per_block + noise + 256


class _Scratch:
    """Memory that every span of one call uses again."""

    __slots__ = ("codes", "matrix", "moved", "rotated", "values")

    def __init__(self, grid: Grid, count: int, device: torch.device) -> None:
        most = min(count, CHUNK)
        even = most + most % 2
        self.values = torch.empty(most, dtype=torch.float32, device=device)
        self.rotated = torch.empty(most if grid.is_rotated else 0, dtype=torch.float32, device=device)
        self.matrix = torch.from_numpy(hadamard()).to(device) if grid.is_rotated else None
        self.codes = torch.empty(even if grid.bits == 4 else 0, dtype=torch.int8, device=device)
        self.moved = torch.empty(even // 2 if grid.bits == 4 else 0, dtype=torch.int16, device=device)


def quantize(tensor: torch.Tensor, grid: Grid, seed: int) -> Payload | None:
    """The tensor as codes, scales and, of an affine grid, lows; None where a scale is NaN."""
    elements = Elements(tensor)
    count, device = elements.count, elements.device
    blocks = block_count(count, grid.block)
    codes = torch.empty(grid.codes_bytes(count), dtype=torch.int8 if grid.bits == 8 else torch.uint8, device=device)
    scales = torch.empty(blocks, 1, dtype=SCALE_DTYPE, device=device)
    lows = torch.empty(blocks if grid.is_affine else 0, 1, dtype=SCALE_DTYPE, device=device)
    payload = elements.payload(*((codes, scales, lows) if grid.is_affine else (codes, scales)))
    if elements.flat is not None and are_usable(device):
        from plimsoll.engine.codecs.kernels import quantize as kernels

        kernels.encode(elements.flat, codes, scales, lows, grid, seed)
        return payload
    scratch = _Scratch(grid, count, device)
    round_: Callable[[torch.Tensor], torch.Tensor] = torch.round_
    if grid.is_stochastic:
        round_ = StochasticRounding(seed, min(count, CHUNK), device).round_
    for span in spans(count, grid.block):
        rows = blocks_of(elements, span, scratch.values)
        if scratch.matrix is not None:
            rows = rotate(rows, scratch.matrix, out=scratch.rotated)
        here = slice(span.first_block, span.last_block)
        if grid.is_affine:
            scales[here], lows[here] = affine_scales(rows, 2**grid.bits, grid.largest(elements.dtype))
        else:
            scales[here] = symmetric_scales(rows, grid.last_code, grid.largest(elements.dtype))
        if not are_representable(scales[here]):
            return None
        values = scratch.values[: span.stop - span.start].view(rows.shape)
        step = scales[here].float()
        if grid.is_affine:
            torch.sub(rows, _zero_points(grid, step, lows[here]), out=values)
            values.mul_(step.reciprocal())
            round_(values).clamp_(grid.bias, grid.bias + 2**grid.bits - 1)
        else:
            round_(torch.mul(rows, step.reciprocal(), out=values))
            if grid.bias:
                values.add_(grid.bias)
        _store(values.view(-1), span, codes, scratch)
    return payload


def dequantize(payload: Payload, grid: Grid) -> torch.Tensor:
    """The tensor of a payload that ``quantize`` made with this grid."""
    tensor, flat = empty_decoded(payload)
    codes, scales = payload.parts[:2]
    if are_usable(flat.device):
        from plimsoll.engine.codecs.kernels import quantize as kernels

        kernels.decode(codes, scales, payload.parts[-1], flat, grid)
        return tensor
    scratch = _Scratch(grid, flat.numel(), flat.device)
    is_float32 = flat.dtype is torch.float32
    for span in spans(flat.numel(), grid.block):
        here = slice(span.first_block, span.last_block)
        out = flat[span.start : span.stop]
        rows = (out if is_float32 and not grid.is_rotated else scratch.values[: out.numel()]).view(-1, span.width)
        rows.copy_(_load(codes, span, scratch).view(rows.shape))
        step = scales[here].float()
        if grid.is_affine:
            rows.mul_(step).add_(_zero_points(grid, step, payload.parts[2][here]))
        else:
            if grid.bias:
                rows.sub_(grid.bias)
            rows.mul_(step)
        if scratch.matrix is not None:
            rows = rotate(rows, scratch.matrix, out=out if is_float32 else scratch.rotated)
            if flat.dtype is torch.float16:
                rows.clamp_(torch.finfo(flat.dtype).min, torch.finfo(flat.dtype).max)
        if not is_float32:
            out.copy_(rows.view(-1))
    return tensor


def _zero_points(grid: Grid, step: torch.Tensor, lows: torch.Tensor) -> torch.Tensor:
    """The value of the stored code 0 of affine blocks."""
    return lows.float().sub_(step, alpha=grid.bias)


def _store(values: torch.Tensor, span: Span, codes: torch.Tensor, scratch: _Scratch) -> None:
    if not scratch.codes.numel():
        codes[span.start : span.stop].copy_(values)
        return
    count = values.numel()
    unpacked = scratch.codes[: count + count % 2]
    unpacked[count:].zero_()
    unpacked[:count].copy_(values)
    pack_nibbles(unpacked, scratch.moved, codes[span.start // 2 : packed_nibbles_bytes(span.stop)])


def _load(codes: torch.Tensor, span: Span, scratch: _Scratch) -> torch.Tensor:
    if not scratch.codes.numel():
        return codes[span.start : span.stop]
    count = span.stop - span.start
    packed = codes[span.start // 2 : packed_nibbles_bytes(span.stop)]
    return unpack_nibbles(packed, scratch.moved, scratch.codes[: count + count % 2])[:count]
