"""The codecs' hot loops as Triton kernels. Each kernel reads memory once and writes it once, while the same code in torch needs
one pass over memory per op.

Codecs use them for CUDA tensors if Triton is installed; nothing else imports this module. One Triton program works on whole
blocks: on 4096 elements, or on one block if a block is larger. Rotation is a fast Walsh-Hadamard transform in float32.
Stochastic rounding draws from Philox by element, so that it does not depend on the launch. NaN, infinity and values out of
range make the scale of their block NaN, so that the host never waits for the device.

A kernel infers its variant from its arguments: symmetric blocks pass None for lows, rounding to nearest passes None for seed,
and 4-bit codes are stored two in a uint8. Triton compiles one kernel per combination, as it does for constants.

Not yet run on a GPU: so far they have been tested under Triton's interpreter, against the same codecs written in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from plimsoll.engine.codecs.blocks import GAIN, largest_of, mix_seed

_TILE = tl.constexpr(4096)
"""The number of elements for one Triton program that works on blocks."""
_WARPS = 8
"""The number of warps for one Triton program that works on blocks, so that a thread has 16 elements.

With 4 warps, decoding rotated int4 took 255 registers and spilled (ptxas for sm_90). With 8 warps it takes 101.
"""
_BYTES = 512
"""The number of packed bytes for one Triton program that works on bits."""
_UP = tl.constexpr(1 + 2**-8 + 2**-15)
_DOWN = tl.constexpr(2**-8 + 2**-15)
_LEAST_SCALE = tl.constexpr(2.0**-126)
_LARGEST = tl.constexpr(largest_of(torch.float32))
"""The largest magnitude that can be encoded, for float32 and for bfloat16."""
_LARGEST_HALF = tl.constexpr(largest_of(torch.float16))
_LARGEST_ROTATED = tl.constexpr(largest_of(torch.float32) / (2 * GAIN))
"""The largest magnitude in a rotated basis.

It is smaller, because rotating back may enlarge values by the same factor again.
"""
_GROUP = tl.constexpr(32)
_STAGES = tl.constexpr(5)
"""The number of stages of the Walsh-Hadamard transform of one group of 32 elements."""
_TO_UNIT = tl.constexpr(32**-0.5)
_TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""A number for rounding. Add it to a small float32 and subtract it again: the nearest whole number results, halves to even."""
_LARGEST_FLOAT8 = tl.constexpr(448)
_LEAST_NORMAL_FLOAT8 = tl.constexpr(2.0**-6)
_SUBNORMAL_STEP_FLOAT8 = tl.constexpr(2.0**-9)
_BIAS_FLOAT8 = tl.constexpr(127 - 7)
"""The difference between the exponent biases of float32 and e4m3."""


def encode_integers(
    flat: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    lows: torch.Tensor | None,
    *,
    block: int,
    is_rotated: bool,
    seed: int | None,
) -> None:
    """Encode the contiguous tensor ``flat`` as whole numbers. Write them to ``codes`` (int8, or two in each uint8), and each
    block's scale and least value to ``scales`` and ``lows``.

    With a ``seed``, numbers are rounded up or down at random, otherwise to the nearest. ``lows`` is ``None`` for symmetric
    blocks.
    """
    if flat.numel():
        mixed = None if seed is None else mix_seed(seed)
        grid = _tiles(flat, block)
        _encode_integers[grid](flat, codes, scales, lows, flat.numel(), mixed, block, is_rotated, num_warps=_WARPS)


def decode_integers(
    codes: torch.Tensor,
    scales: torch.Tensor,
    lows: torch.Tensor | None,
    flat: torch.Tensor,
    *,
    block: int,
    is_rotated: bool,
) -> None:
    """Decode whole numbers (``codes``) with the scale and least value of their block, and write the result into the contiguous
    tensor ``flat``.
    """
    if flat.numel():
        most = float(torch.finfo(flat.dtype).max)
        grid = _tiles(flat, block)
        _decode_integers[grid](codes, scales, lows, flat, flat.numel(), most, block, is_rotated, num_warps=_WARPS)


def encode_float8(flat: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Encode the contiguous tensor ``flat`` in the float8 format e4m3. Write the codes (as bytes) to ``codes``, and each
    block's scale to ``scales``.

    The conversion works on the bits, so that it also runs on devices without float8 (before compute capability 8.9).
    """
    if flat.numel():
        _encode_float8[_tiles(flat, block)](flat, codes, scales, flat.numel(), block, num_warps=_WARPS)


def decode_float8(codes: torch.Tensor, scales: torch.Tensor, flat: torch.Tensor, block: int) -> None:
    """Decode float8 codes (e4m3, as bytes) with the scale of their block, and write the result into the contiguous tensor
    ``flat``.
    """
    if flat.numel():
        _decode_float8[_tiles(flat, block)](codes, scales, flat, flat.numel(), block, num_warps=_WARPS)


def pack_positive(flat: torch.Tensor, packed: torch.Tensor, one: torch.Tensor) -> None:
    """Write one bit per element of contiguous floats: 1 if the element is above zero. Set ``one`` (the value that a 1 decodes
    to) to NaN if any element is NaN.
    """
    if flat.numel():
        _pack[_byte_tiles(flat)](flat, packed, one, flat.numel(), _BYTES)


def pack_nonzero(flat: torch.Tensor, packed: torch.Tensor) -> None:
    """Write one bit per element of contiguous non-negative integers: 1 if the element is not zero."""
    if flat.numel():
        _pack[_byte_tiles(flat)](flat, packed, None, flat.numel(), _BYTES)


def unpack(packed: torch.Tensor, constant: torch.Tensor, flat: torch.Tensor) -> None:
    """Decode one bit per element: write ``constant`` (one element) to ``flat`` where the bit is set, and ``constant * 0``
    elsewhere.
    """
    if flat.numel():
        is_float = flat.dtype.is_floating_point
        _unpack[_byte_tiles(flat)](packed, constant, flat, flat.numel(), _BYTES, is_float)


def _tiles(flat: torch.Tensor, block: int) -> tuple[int]:
    return (triton.cdiv(flat.numel(), max(_TILE.value, block)),)


def _byte_tiles(flat: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(flat.numel(), 8 * _BYTES),)


@triton.jit
def _to_bfloat16(values):  # type: ignore[no-untyped-def]
    """Return finite values rounded to bfloat16. The code works on their bits: Triton's interpreter truncates where a GPU
    rounds.
    """
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _to_whole(values):  # type: ignore[no-untyped-def]
    """Return values below 2**22 rounded to the nearest whole number. The code adds and subtracts: Triton's interpreter lacks
    ``rint``.
    """
    return (values + _TO_WHOLE) - _TO_WHOLE


@triton.jit  # type: ignore[untyped-decorator]  # triton ships no types
def _places(block: tl.constexpr):  # type: ignore[no-untyped-def]
    """For this Triton program: return the indices of its blocks, and the offsets of their elements."""
    rows: tl.constexpr = _TILE // block if block < _TILE else 1
    blocks = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    return blocks, blocks[:, None] * block + tl.arange(0, block)[None, :]


@triton.jit
def _rotate(values, offsets, count):  # type: ignore[no-untyped-def]
    """Return the values with whole groups of neighbours rotated. An incomplete last group stays unchanged.

    This is a fast Walsh-Hadamard transform: in each of five stages, two neighbours become their sum and their difference. The
    sums go to the first half and the differences to the second. The transform takes five additions per element, and a matrix
    product would take 32.
    """
    groups: tl.constexpr = values.shape[0] * values.shape[1] // _GROUP
    mixed = tl.reshape(values * _TO_UNIT, (groups, _GROUP))
    for _ in tl.static_range(_STAGES):
        one, other = tl.split(tl.reshape(mixed, (groups, _GROUP // 2, 2)))
        mixed = tl.reshape(tl.permute(tl.join(one + other, one - other), (0, 2, 1)), (groups, _GROUP))
    rotated = tl.reshape(mixed, values.shape)
    is_whole = offsets < count - count % _GROUP
    return tl.where(is_whole, rotated, values)


@triton.jit  # type: ignore[untyped-decorator]
def _bad_blocks(values, is_element, largest: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return for each block whether it contains NaN, infinity or a value beyond ``largest``."""
    return tl.max((is_element & ~(tl.abs(values) <= largest)).to(tl.int32), 1) > 0


@triton.jit  # type: ignore[untyped-decorator]
def _scales(reach, is_bad, steps: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scale of each block as bfloat16: ``reach / steps`` rounded up, or NaN for bad blocks."""
    step = tl.maximum(reach * (_UP / steps), _LEAST_SCALE)
    return tl.where(is_bad, float("nan"), _to_bfloat16(step).to(tl.float32)).to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def _encode_integers(  # type: ignore[no-untyped-def]
    flat, codes, scales, lows, count, seed, block: tl.constexpr, is_rotated: tl.constexpr
):
    is_affine: tl.constexpr = lows is not None
    has_bytes: tl.constexpr = codes.dtype.element_ty == tl.int8
    bias: tl.constexpr = (-128 if is_affine else 0) if has_bytes else (0 if is_affine else 8)
    steps: tl.constexpr = (255 if is_affine else 127) if has_bytes else (15 if is_affine else 7)
    limit: tl.constexpr = _LARGEST_HALF if flat.dtype.element_ty == tl.float16 else _LARGEST
    largest: tl.constexpr = _LARGEST_ROTATED if is_rotated else limit
    blocks, offsets = _places(block)
    is_element = offsets < count
    is_block = blocks * block < count
    values = tl.load(flat + offsets, mask=is_element, other=0.0).to(tl.float32)
    if is_rotated:
        values = _rotate(values, offsets, count)
    is_bad = _bad_blocks(values, is_element, largest)
    if is_affine:
        most = tl.max(tl.where(is_element, values, -float("inf")), 1)
        least = tl.min(tl.where(is_element, values, float("inf")), 1)
        low = _to_bfloat16(least - tl.abs(least) * _DOWN)
        tl.store(lows + blocks, low, mask=is_block)
        reach = most - low.to(tl.float32)
    else:
        reach = tl.max(tl.abs(values), 1)
    scale = _scales(reach, is_bad, steps)
    tl.store(scales + blocks, scale, mask=is_block)
    step = scale.to(tl.float32)
    if is_affine:
        values = values - (low.to(tl.float32) - bias * step)[:, None]
    values = values * (1.0 / step)[:, None]
    if seed is not None:
        values = tl.floor(values + tl.rand(seed, offsets))
    else:
        values = _to_whole(values)
    if is_affine:
        values = tl.minimum(tl.maximum(values, bias), bias + steps)
    else:
        values = values + bias
    whole = tl.where(is_element & ~is_bad[:, None], values, 0).to(tl.int32)
    if has_bytes:
        tl.store(codes + offsets, whole.to(tl.int8), mask=is_element)
    else:
        pairs = tl.reshape(whole, (whole.shape[0], block // 2, 2)) << (4 * tl.arange(0, 2))[None, None, :]
        places = blocks[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
        tl.store(codes + places, tl.sum(pairs, 2).to(tl.uint8), mask=places * 2 < count)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_integers(  # type: ignore[no-untyped-def]
    codes, scales, lows, flat, count, most, block: tl.constexpr, is_rotated: tl.constexpr
):
    is_affine: tl.constexpr = lows is not None
    has_bytes: tl.constexpr = codes.dtype.element_ty == tl.int8
    bias: tl.constexpr = (-128 if is_affine else 0) if has_bytes else (0 if is_affine else 8)
    blocks, offsets = _places(block)
    is_element = offsets < count
    is_block = blocks * block < count
    if has_bytes:
        whole = tl.load(codes + offsets, mask=is_element, other=0).to(tl.float32)
    else:
        places = blocks[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
        packed = tl.load(codes + places, mask=places * 2 < count, other=0).to(tl.int32)
        pairs = (packed[:, :, None] >> (4 * tl.arange(0, 2))[None, None, :]) & 15
        whole = tl.reshape(pairs, offsets.shape).to(tl.float32)
    step = tl.load(scales + blocks, mask=is_block, other=0.0).to(tl.float32)
    if is_affine:
        low = tl.load(lows + blocks, mask=is_block, other=0.0).to(tl.float32)
        values = whole * step[:, None] + (low - bias * step)[:, None]
    else:
        values = (whole - bias) * step[:, None]
    if is_rotated:
        values = _rotate(tl.where(is_element, values, 0.0), offsets, count)
        # A comparison with NaN is false, so NaN stays.
        values = tl.where(values > most, most, tl.where(values < -most, -most, values))
    tl.store(flat + offsets, values.to(flat.dtype.element_ty), mask=is_element)


@triton.jit  # type: ignore[untyped-decorator]
def _encode_float8(flat, codes, scales, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    largest: tl.constexpr = _LARGEST_HALF if flat.dtype.element_ty == tl.float16 else _LARGEST
    blocks, offsets = _places(block)
    is_element = offsets < count
    values = tl.load(flat + offsets, mask=is_element, other=0.0).to(tl.float32)
    is_bad = _bad_blocks(values, is_element, largest)
    scale = _scales(tl.max(tl.abs(values), 1), is_bad, _LARGEST_FLOAT8)
    tl.store(scales + blocks, scale, mask=blocks * block < count)
    values = tl.where(is_bad[:, None], 0.0, values * (1.0 / scale.to(tl.float32))[:, None])
    magnitude = tl.abs(values)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Round to the nearest of 3 bits behind the leading one, halves to even; a carry raises the exponent.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (_BIAS_FLOAT8 << 3)
    subnormal = _to_whole(magnitude * (1.0 / _SUBNORMAL_STEP_FLOAT8)).to(tl.int32)
    code = tl.where(magnitude < _LEAST_NORMAL_FLOAT8, subnormal, normal)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    tl.store(codes + offsets, (code | sign).to(tl.uint8), mask=is_element)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_float8(codes, scales, flat, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks, offsets = _places(block)
    is_element = offsets < count
    code = tl.load(codes + offsets, mask=is_element, other=0).to(tl.int32)
    scale = tl.load(scales + blocks, mask=blocks * block < count, other=0.0).to(tl.float32)
    normal = (((code & 0x7F) << 20) + (_BIAS_FLOAT8 << 23)).to(tl.float32, bitcast=True)
    magnitude = tl.where((code & 0x78) == 0, (code & 7).to(tl.float32) * _SUBNORMAL_STEP_FLOAT8, normal)
    values = tl.where(code >= 0x80, -magnitude, magnitude) * scale[:, None]
    tl.store(flat + offsets, values.to(flat.dtype.element_ty), mask=is_element)


@triton.jit  # type: ignore[untyped-decorator]
def _pack(flat, packed, one, count, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pack one bit per element into bytes. If ``one`` is given, ``flat`` holds floats, and ``one`` becomes NaN if any of them
    is NaN. Otherwise ``flat`` holds integers.
    """
    places = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    offsets = places[:, None] * 8 + tl.arange(0, 8)[None, :]
    values = tl.load(flat + offsets, mask=offsets < count, other=0)
    if one is not None:
        values = values.to(tl.float32)
        is_nan = tl.max(tl.max((values != values).to(tl.int32), 1), 0)
        if is_nan > 0:
            tl.store(one, float("nan"))  # every program that gets here writes the same value
    bits = (values > 0).to(tl.int32) << tl.arange(0, 8)[None, :]
    tl.store(packed + places, tl.sum(bits, 1).to(tl.uint8), mask=places * 8 < count)


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(packed, constant, flat, count, width: tl.constexpr, is_float: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    offsets = places[:, None] * 8 + tl.arange(0, 8)[None, :]
    bytes_ = tl.load(packed + places, mask=places * 8 < count, other=0).to(tl.int32)
    bits = (bytes_[:, None] >> tl.arange(0, 8)[None, :]) & 1
    if is_float:
        values = bits.to(tl.float32) * tl.load(constant).to(tl.float32)
    else:
        values = bits.to(flat.dtype.element_ty) * tl.load(constant)
    tl.store(flat + offsets, values.to(flat.dtype.element_ty), mask=offsets < count)
