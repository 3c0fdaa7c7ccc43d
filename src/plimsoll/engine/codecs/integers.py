"""The codecs int8 and int4: elements become whole numbers (codes), with a scale per block of elements.

Symmetric: ``x = code * scale``; zero stays zero. Affine: ``x = code * scale + low``, which wastes no codes if all elements of a
block have the same sign. Both kinds work in a rotated basis, where outliers do not increase the scale of their block, or in the
unrotated basis. The error is at most half a scale when rounding to nearest, and less than one scale with stochastic rounding.
`blocks` computes scales and the basis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.engine.codecs.blocks import (
    GAIN,
    SCALE_DTYPE,
    WIDEST,
    Span,
    StochasticRounding,
    affine_scales,
    are_representable,
    block_count,
    blocks_of,
    hadamard,
    largest_of,
    rotate,
    spans,
    symmetric_scales,
)
from plimsoll.engine.codecs.layout import (
    CHUNK,
    FLOATS,
    Elements,
    empty_decoded,
    pack_nibbles,
    packed_nibbles_bytes,
    runs_kernels,
    unpack_nibbles,
)
from plimsoll.engine.codecs.protocol import Codec, Payload, number, word


@dataclass(frozen=True, slots=True)
class IntegerCodec(Codec):
    """Base class of codecs that store each element as a whole number of ``bits`` bits (8 or 4), in blocks of ``block``
    elements.
    """

    # Half a bit per element for smaller blocks would reduce the error less than half a bit per code
    # (docs/project/lab-notes.md).
    block: int = number(64, least=32, most=WIDEST)
    mode: str = word("symmetric", "affine")
    basis: str = word("rotated", "unrotated")
    rounding: str = word("nearest", "stochastic")

    dtypes: ClassVar = FLOATS
    is_lossless: ClassVar[bool] = False
    bits: ClassVar[int]

    def is_capturable(self, dtype: torch.dtype) -> bool:
        return self.rounding == "nearest"  # a graph would repeat the same random numbers every time

    @property
    def is_affine(self) -> bool:
        return self.mode == "affine"

    @property
    def is_rotated(self) -> bool:
        return self.basis == "rotated"

    @property
    def last_code(self) -> int:
        """The largest code of a symmetric block. The smallest code is its negative."""
        return (1 << (self.bits - 1)) - 1

    @property
    def bias(self) -> int:
        """The number that is added to a code before the code is stored. Stored bytes are signed, stored half bytes are not."""
        if self.bits == 8:
            return -128 if self.is_affine else 0
        return 0 if self.is_affine else 1 << (self.bits - 1)

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int:
        scales = 2 if self.is_affine else 1
        return self._codes_bytes(count) + scales * SCALE_DTYPE.itemsize * block_count(count, self.block)

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        most = min(count, CHUNK)
        per_block = 40 * (block_count(most, self.block) + 1)
        noise = StochasticRounding.scratch_bytes(most) if self.rounding == "stochastic" else 0
        floats = 8 if self.is_rotated else 4
        return most * (floats + dtype.itemsize) + 2 * (most + 1) + per_block + noise + 256

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        """Return a payload (the encoded tensor) with codes (whole numbers), scales and, for affine blocks, the least value of
        each block. Return ``None`` if a scale is NaN or the payload would exceed ``most_bytes``.
        """
        elements = Elements(tensor)
        count, device = elements.count, elements.device
        if most_bytes is not None and self.payload_bytes(count, elements.dtype) > most_bytes:
            return None
        codes_dtype = torch.int8 if self.bits == 8 else torch.uint8
        codes = torch.empty(self._codes_bytes(count), dtype=codes_dtype, device=device)
        scales = torch.empty(block_count(count, self.block), 1, dtype=SCALE_DTYPE, device=device)
        lows = torch.empty_like(scales) if self.is_affine else None
        if elements.flat is not None and runs_kernels(device):
            from plimsoll.engine.codecs import kernels

            kernels.encode_integers(
                elements.flat,
                codes,
                scales,
                lows,
                block=self.block,
                is_rotated=self.is_rotated,
                seed=seed if self.rounding == "stochastic" else None,
            )
        elif not self._encode(elements, codes, scales, lows, seed):
            return None
        return elements.payload(codes, scales) if lows is None else elements.payload(codes, scales, lows)

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        codes, scales = payload.parts[:2]
        lows = payload.parts[2] if self.is_affine else None
        if runs_kernels(flat.device):
            from plimsoll.engine.codecs import kernels

            kernels.decode_integers(codes, scales, lows, flat, block=self.block, is_rotated=self.is_rotated)
            return tensor
        scratch = _Scratch(self, flat.numel(), flat.device)
        is_float32 = flat.dtype is torch.float32
        for span in spans(flat.numel(), self.block):
            out = flat[span.start : span.stop]
            rows = (out if is_float32 and not self.is_rotated else scratch.values[: out.numel()]).view(-1, span.width)
            rows.copy_(scratch.load(codes, span).view(rows.shape))
            step = scales[span.blocks].float()
            if lows is not None:
                rows.mul_(step).add_(self._zero_points(step, lows[span.blocks]))
            else:
                if self.bias:
                    rows.sub_(self.bias)
                rows.mul_(step)
            if scratch.matrix is not None:
                rows = rotate(rows, scratch.matrix, out=out if is_float32 else scratch.rotated)
                if flat.dtype is torch.float16:
                    rows.clamp_(torch.finfo(flat.dtype).min, torch.finfo(flat.dtype).max)
            if not is_float32:
                out.copy_(rows.view(-1))
        return tensor

    def _encode(
        self, elements: Elements, codes: torch.Tensor, scales: torch.Tensor, lows: torch.Tensor | None, seed: int
    ) -> bool:
        """Fill the given tensors with codes, scales and lows, one chunk of elements at a time. Return False as soon as a scale
        is NaN (the codec cannot represent the data), else True.
        """
        scratch = _Scratch(self, elements.count, elements.device)
        # Rotating back may enlarge values by the same factor again; for float16 decode clamps them.
        largest = largest_of(torch.float32) / (2 * GAIN) if self.is_rotated else largest_of(elements.dtype)
        round_: Callable[[torch.Tensor], torch.Tensor] = torch.round_
        if self.rounding == "stochastic":
            round_ = StochasticRounding(seed, min(elements.count, CHUNK), elements.device).round_
        for span in spans(elements.count, self.block):
            rows = blocks_of(elements, span, scratch.values)
            if scratch.matrix is not None:
                rows = rotate(rows, scratch.matrix, out=scratch.rotated)
            if lows is not None:
                scales[span.blocks], lows[span.blocks] = affine_scales(rows, 2**self.bits, largest)
            else:
                scales[span.blocks] = symmetric_scales(rows, self.last_code, largest)
            if not are_representable(scales[span.blocks]):
                return False
            values = scratch.values[: span.stop - span.start].view(rows.shape)
            step = scales[span.blocks].float()
            if lows is not None:
                torch.sub(rows, self._zero_points(step, lows[span.blocks]), out=values)
                values.mul_(step.reciprocal())
                round_(values).clamp_(self.bias, self.bias + 2**self.bits - 1)
            else:
                round_(torch.mul(rows, step.reciprocal(), out=values))
                if self.bias:
                    values.add_(self.bias)
            scratch.store(values.view(-1), span, codes)
        return True

    def _zero_points(self, step: torch.Tensor, lows: torch.Tensor) -> torch.Tensor:
        """Return, for each affine block, the value that a stored code of 0 decodes to."""
        return lows.float().sub_(step, alpha=self.bias)

    def _codes_bytes(self, count: int) -> int:
        return count if self.bits == 8 else packed_nibbles_bytes(count)


@dataclass(frozen=True, slots=True)
class Int8(IntegerCodec):
    """A codec with one byte per element. Its default parameters are the best measured (docs/project/lab-notes.md)."""

    family: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8


@dataclass(frozen=True, slots=True)
class Int4(IntegerCodec):
    """A codec with half a byte per element. Its default parameters are the best measured (docs/project/lab-notes.md)."""

    # A symmetric block uses only 15 of the 16 codes, which matters with so few (docs/project/lab-notes.md).
    mode: str = word("affine", "symmetric")

    family: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4


class _Scratch:
    """Scratch memory for one call of encode or decode. All spans of the call reuse it."""

    __slots__ = ("codes", "matrix", "moved", "rotated", "values")

    def __init__(self, codec: IntegerCodec, count: int, device: torch.device) -> None:
        most = min(count, CHUNK)
        even = most + most % 2 if codec.bits == 4 else 0
        self.values = torch.empty(most, dtype=torch.float32, device=device)
        self.rotated = torch.empty(most if codec.is_rotated else 0, dtype=torch.float32, device=device)
        self.matrix = torch.from_numpy(hadamard()).to(device) if codec.is_rotated else None
        self.codes = torch.empty(even, dtype=torch.int8, device=device)
        self.moved = torch.empty(even // 2, dtype=torch.int16, device=device)

    def store(self, values: torch.Tensor, span: Span, codes: torch.Tensor) -> None:
        """Write the codes (whole numbers) of one span (a run of elements) to their place in ``codes``, as bytes or as packed
        half bytes.
        """
        if not self.codes.numel():
            codes[span.start : span.stop].copy_(values)
            return
        count = values.numel()
        unpacked = self.codes[: count + count % 2]
        unpacked[count:].zero_()
        unpacked[:count].copy_(values)
        pack_nibbles(unpacked, self.moved, codes[span.start // 2 : packed_nibbles_bytes(span.stop)])

    def load(self, codes: torch.Tensor, span: Span) -> torch.Tensor:
        """Return the codes (whole numbers) of one span (a run of elements) from ``codes``, where `store` has written them."""
        if not self.codes.numel():
            return codes[span.start : span.stop]
        count = span.stop - span.start
        packed = codes[span.start // 2 : packed_nibbles_bytes(span.stop)]
        return unpack_nibbles(packed, self.moved, self.codes[: count + count % 2])[:count]
