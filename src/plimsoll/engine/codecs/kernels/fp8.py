"""Flat elements in, float8 (e4m3) and scales out, and back, as one kernel each. What `codecs.fp8` does.

The conversion is done on the bits, so that devices without float8 of their own (before compute capability 8.9) have it too.

Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll.engine.codecs.blocks import largest_of
from plimsoll.engine.codecs.kernels.rounding import to_bfloat16, to_whole

_TILE = 4096
_UP = tl.constexpr((1 + 2**-8 + 2**-15) / 448)
_LEAST_SCALE = tl.constexpr(2.0**-126)
_LEAST_NORMAL = tl.constexpr(2.0**-6)
_SUBNORMAL_STEP = tl.constexpr(2.0**-9)
_BIAS = tl.constexpr(127 - 7)
"""Between the exponents of float32 and e4m3."""


def encode(flat: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Write the codes (as bytes) and scales of contiguous ``flat``."""
    if flat.numel():
        rows = max(_TILE // block, 1)
        programs = (triton.cdiv(flat.numel(), rows * block),)
        _encode[programs](flat, codes, scales, flat.numel(), largest_of(flat.dtype), block=block, rows=rows)


def decode(codes: torch.Tensor, scales: torch.Tensor, flat: torch.Tensor, block: int) -> None:
    """Write what the codes (as bytes) stand for to contiguous ``flat``."""
    if flat.numel():
        rows = max(_TILE // block, 1)
        programs = (triton.cdiv(flat.numel(), rows * block),)
        _decode[programs](codes, scales, flat, flat.numel(), block=block, rows=rows)


@triton.jit  # type: ignore[untyped-decorator]  # triton ships no types
def _encode(flat, codes, scales, count, largest, block: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    offsets = blocks[:, None] * block + tl.arange(0, block)[None, :]
    is_element = offsets < count
    values = tl.load(flat + offsets, mask=is_element, other=0.0).to(tl.float32)
    is_bad = tl.max((is_element & ~(tl.abs(values) <= largest)).to(tl.int32), 1) > 0
    step = tl.maximum(tl.max(tl.abs(values), 1) * _UP, _LEAST_SCALE)
    scale = tl.where(is_bad, float("nan"), to_bfloat16(step).to(tl.float32)).to(tl.bfloat16)
    tl.store(scales + blocks, scale, mask=blocks * block < count)
    values = tl.where(is_bad[:, None], 0.0, values * (1.0 / scale.to(tl.float32))[:, None])
    magnitude = tl.abs(values)
    bits = magnitude.to(tl.int32, bitcast=True)
    # To the nearest of 3 bits behind the leading one, halves to even ones; what carries raises the exponent.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (_BIAS << 3)
    subnormal = to_whole(magnitude * (1.0 / _SUBNORMAL_STEP)).to(tl.int32)
    code = tl.where(magnitude < _LEAST_NORMAL, subnormal, normal)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    tl.store(codes + offsets, (code | sign).to(tl.uint8), mask=is_element)


@triton.jit  # type: ignore[untyped-decorator]
def _decode(codes, scales, flat, count, block: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    offsets = blocks[:, None] * block + tl.arange(0, block)[None, :]
    is_element = offsets < count
    code = tl.load(codes + offsets, mask=is_element, other=0).to(tl.int32)
    scale = tl.load(scales + blocks, mask=blocks * block < count, other=0.0).to(tl.float32)
    normal = (((code & 0x7F) << 20) + (_BIAS << 23)).to(tl.float32, bitcast=True)
    magnitude = tl.where((code & 0x78) == 0, (code & 7).to(tl.float32) * _SUBNORMAL_STEP, normal)
    values = tl.where(code >= 0x80, -magnitude, magnitude) * scale[:, None]
    tl.store(flat + offsets, values.to(flat.dtype.element_ty), mask=is_element)
