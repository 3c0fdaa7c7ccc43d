"""Flat elements in, codes and scales of int8 and int4 out, and back, as one kernel each. What `codecs.quantize` does.

A program works on whole blocks, 4096 elements or one block. Rotation is a small matrix product in full float32
precision; stochastic rounding draws from Philox by element, so that it does not depend on the launch. NaN, infinity and
values out of range make the scale of their block NaN: nothing waits for the device.

Not yet run on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from plimsoll.engine.codecs.kernels.rounding import to_bfloat16, to_whole
from plimsoll.engine.codecs.rounding import mix_seed

if TYPE_CHECKING:
    from plimsoll.engine.codecs.quantize import Grid

_TILE = 4096
_UP = tl.constexpr(1 + 2**-8 + 2**-15)
_DOWN = tl.constexpr(2**-8 + 2**-15)
_LEAST_SCALE = tl.constexpr(2.0**-126)
_GROUP = tl.constexpr(32)
_TO_UNIT = tl.constexpr(32**-0.5)


def encode(
    flat: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    lows: torch.Tensor,
    grid: Grid,
    seed: int,
) -> None:
    """Write the codes, scales and lows of contiguous ``flat``."""
    if not flat.numel():
        return
    _encode[_programs(flat.numel(), grid.block)](
        flat,
        codes,
        scales,
        lows,
        flat.numel(),
        mix_seed(seed),
        grid.largest(flat.dtype),
        is_stochastic=grid.is_stochastic,
        **_constants(grid),
    )


def decode(codes: torch.Tensor, scales: torch.Tensor, lows: torch.Tensor, flat: torch.Tensor, grid: Grid) -> None:
    """Write what the codes stand for to contiguous ``flat``."""
    if not flat.numel():
        return
    most = float(torch.finfo(flat.dtype).max)
    _decode[_programs(flat.numel(), grid.block)](codes, scales, lows, flat, flat.numel(), most, **_constants(grid))


def _programs(count: int, block: int) -> tuple[int]:
    return (triton.cdiv(count, max(_TILE, block)),)


def _constants(grid: Grid) -> dict[str, Any]:
    return {
        "code_bits": grid.bits,
        "block": grid.block,
        "rows": max(_TILE // grid.block, 1),
        "is_affine": grid.is_affine,
        "is_rotated": grid.is_rotated,
        "bias": grid.bias,
        "steps": 2**grid.bits - 1 if grid.is_affine else grid.last_code,
    }


@triton.jit  # type: ignore[untyped-decorator]  # triton ships no types
def _rotate(values, offsets, count, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whole groups in the other basis, the rest of the last group as it is."""
    row = tl.arange(0, _GROUP)[:, None]
    column = tl.arange(0, _GROUP)[None, :]
    parity = row & column
    parity = parity ^ (parity >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    matrix = (1 - 2 * parity).to(tl.float32) * _TO_UNIT
    groups = tl.reshape(values, (rows * block // _GROUP, _GROUP))
    rotated = tl.reshape(tl.dot(groups, matrix, input_precision="ieee"), (rows, block))
    is_whole = offsets < count - count % _GROUP
    return tl.where(is_whole, rotated, values)


@triton.jit  # type: ignore[untyped-decorator]
def _encode(  # type: ignore[no-untyped-def]
    flat,
    codes,
    scales,
    lows,
    count,
    seed,
    largest,
    code_bits: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    is_affine: tl.constexpr,
    is_rotated: tl.constexpr,
    bias: tl.constexpr,
    steps: tl.constexpr,
    is_stochastic: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    offsets = blocks[:, None] * block + tl.arange(0, block)[None, :]
    is_element = offsets < count
    is_block = blocks * block < count
    values = tl.load(flat + offsets, mask=is_element, other=0.0).to(tl.float32)
    if is_rotated:
        values = _rotate(values, offsets, count, rows, block)
    is_bad = tl.max((is_element & ~(tl.abs(values) <= largest)).to(tl.int32), 1) > 0
    if is_affine:
        most = tl.max(tl.where(is_element, values, -float("inf")), 1)
        least = tl.min(tl.where(is_element, values, float("inf")), 1)
        low = to_bfloat16(least - tl.abs(least) * _DOWN)
        tl.store(lows + blocks, low, mask=is_block)
        reach = most - low.to(tl.float32)
    else:
        reach = tl.max(tl.abs(values), 1)
    step = tl.maximum(reach * (_UP / steps), _LEAST_SCALE)
    scale = tl.where(is_bad, float("nan"), to_bfloat16(step).to(tl.float32)).to(tl.bfloat16)
    tl.store(scales + blocks, scale, mask=is_block)
    step = scale.to(tl.float32)
    if is_affine:
        values = values - (low.to(tl.float32) - bias * step)[:, None]
    values = values * (1.0 / step)[:, None]
    if is_stochastic:
        values = tl.floor(values + tl.rand(seed, offsets))
    else:
        values = to_whole(values)
    if is_affine:
        values = tl.minimum(tl.maximum(values, bias), bias + steps)
    else:
        values = values + bias
    whole = tl.where(is_element & ~is_bad[:, None], values, 0).to(tl.int32)
    if code_bits == 8:
        tl.store(codes + offsets, whole.to(tl.int8), mask=is_element)
    else:
        pairs = tl.reshape(whole, (rows, block // 2, 2)) << (4 * tl.arange(0, 2))[None, None, :]
        places = blocks[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
        tl.store(codes + places, tl.sum(pairs, 2).to(tl.uint8), mask=places * 2 < count)


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    codes,
    scales,
    lows,
    flat,
    count,
    most,
    code_bits: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    is_affine: tl.constexpr,
    is_rotated: tl.constexpr,
    bias: tl.constexpr,
    steps: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    offsets = blocks[:, None] * block + tl.arange(0, block)[None, :]
    is_element = offsets < count
    is_block = blocks * block < count
    if code_bits == 8:
        whole = tl.load(codes + offsets, mask=is_element, other=0).to(tl.float32)
    else:
        places = blocks[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
        packed = tl.load(codes + places, mask=places * 2 < count, other=0).to(tl.int32)
        pairs = (packed[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :]) & 15
        whole = tl.reshape(pairs, (rows, block)).to(tl.float32)
    step = tl.load(scales + blocks, mask=is_block, other=0.0).to(tl.float32)
    if is_affine:
        low = tl.load(lows + blocks, mask=is_block, other=0.0).to(tl.float32)
        values = whole * step[:, None] + (low - bias * step)[:, None]
    else:
        values = (whole - bias) * step[:, None]
    if is_rotated:
        values = _rotate(tl.where(is_element, values, 0.0), offsets, count, rows, block)
        # A comparison with NaN is false: NaN stays.
        values = tl.where(values > most, most, tl.where(values < -most, -most, values))
    tl.store(flat + offsets, values.to(flat.dtype.element_ty), mask=is_element)
