"""float32 in, the nearest bfloat16 numbers and whole numbers out, inside kernels.

Triton's interpreter cuts off where a GPU rounds, and has no ``rint``: these are the same everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""Adding this to a small float32 and taking it away again rounds to the nearest whole number, halves to even ones."""


@triton.jit
def to_bfloat16(values):  # type: ignore[no-untyped-def]
    """The nearest bfloat16 numbers; for finite values."""
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def to_whole(values):  # type: ignore[no-untyped-def]
    """The nearest whole numbers; for values below 2**22."""
    return (values + _TO_WHOLE) - _TO_WHOLE
