"""Flat elements in, a bit for each out, and back, as one kernel each. What `codecs.bits` and `codecs.sign` do.

Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BYTES = 512
"""Packed bytes of a program."""


def pack_positive(flat: torch.Tensor, packed: torch.Tensor, one: torch.Tensor) -> None:
    """Write where contiguous floats are above zero; ``one`` becomes NaN if there is a NaN."""
    if flat.numel():
        _pack[_programs(flat.numel())](flat, packed, one, flat.numel(), width=_BYTES, is_float=True)


def pack_nonzero(flat: torch.Tensor, packed: torch.Tensor) -> None:
    """Write where contiguous integers, none of them negative, are not zero."""
    if flat.numel():
        _pack[_programs(flat.numel())](flat, packed, packed, flat.numel(), width=_BYTES, is_float=False)


def unpack(packed: torch.Tensor, constant: torch.Tensor, flat: torch.Tensor) -> None:
    """Write ``constant``, of one element, where bits are set, and ``constant * 0`` elsewhere."""
    if flat.numel():
        is_float = flat.dtype.is_floating_point
        _unpack[_programs(flat.numel())](packed, constant, flat, flat.numel(), width=_BYTES, is_float=is_float)


def _programs(count: int) -> tuple[int]:
    return (triton.cdiv(count, 8 * _BYTES),)


@triton.jit  # type: ignore[untyped-decorator]  # triton ships no types
def _pack(flat, packed, one, count, width: tl.constexpr, is_float: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    offsets = places[:, None] * 8 + tl.arange(0, 8)[None, :]
    values = tl.load(flat + offsets, mask=offsets < count, other=0)
    if is_float:
        values = values.to(tl.float32)
        is_nan = tl.max(tl.max((values != values).to(tl.int32), 1), 0)
        if is_nan > 0:
            tl.store(one, float("nan"))  # every program that gets here writes the same
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
