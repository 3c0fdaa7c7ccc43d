"""Codecs that store floating-point numbers in fewer bits: bf16 and fp8."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.engine.codecs.blocks import (
    SCALE_DTYPE,
    WIDEST,
    are_representable,
    block_count,
    blocks_of,
    largest_of,
    spans,
    symmetric_scales,
)
from plimsoll.engine.codecs.layout import CHUNK, FLOATS, Elements, chunks, empty_decoded, runs_kernels
from plimsoll.engine.codecs.protocol import Codec, Payload, number

_LARGEST_FLOAT8 = 448.0


@dataclass(frozen=True, slots=True)
class BFloat16(Codec):
    """A codec for float32: each element is rounded to the nearest bfloat16. The error is at most 1/256 of the value.

    Values that would round to infinity are refused.
    """

    family: ClassVar[str] = "bf16"
    dtypes: ClassVar = (torch.float32,)
    is_lossless: ClassVar[bool] = False

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int:
        return count * torch.bfloat16.itemsize

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        return min(count, CHUNK) * dtype.itemsize + 256

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        elements = Elements(tensor)
        if most_bytes is not None and self.payload_bytes(elements.count, elements.dtype) > most_bytes:
            return None
        rounded = torch.empty(elements.count, dtype=torch.bfloat16, device=elements.device)
        for start, stop in chunks(elements.count):
            run = elements.run(start, stop)
            farthest = torch.maximum(run.amax(), -run.amin())  # NaN if any element is NaN
            if elements.device.type == "cpu" and not math.isfinite(farthest.bfloat16().item()):
                return None
            rounded[start:stop].copy_(run)
        return elements.payload(rounded)

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        flat.copy_(payload.parts[0])
        return tensor


@dataclass(frozen=True, slots=True)
class Float8(Codec):
    """A codec with float8 (e4m3) and a scale per block, for tensors whose elements differ by many orders of magnitude.

    It keeps 4 significant bits at each magnitude down to 2**-15 of the block's largest magnitude. So the error is at most 1/16
    of the value itself. With int8, by contrast, the error is the same for all elements of a block.
    """

    block: int = number(128, least=32, most=WIDEST)

    family: ClassVar[str] = "fp8"
    dtypes: ClassVar = FLOATS
    is_lossless: ClassVar[bool] = False

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int:
        return count + SCALE_DTYPE.itemsize * block_count(count, self.block)

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        most = min(count, CHUNK)
        return most * (6 + dtype.itemsize) + 40 * (block_count(most, self.block) + 1) + 256

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        elements = Elements(tensor)
        if most_bytes is not None and self.payload_bytes(elements.count, elements.dtype) > most_bytes:
            return None
        codes = torch.empty(elements.count, dtype=torch.float8_e4m3fn, device=elements.device)
        scales = torch.empty(block_count(elements.count, self.block), 1, dtype=SCALE_DTYPE, device=elements.device)
        if elements.flat is not None and runs_kernels(elements.device):
            from plimsoll.engine.codecs import kernels

            kernels.encode_float8(elements.flat, codes.view(torch.uint8), scales, self.block)
            return elements.payload(codes, scales)
        scratch = torch.empty(min(CHUNK, elements.count), dtype=torch.float32, device=elements.device)
        for span in spans(elements.count, self.block):
            rows = blocks_of(elements, span, scratch)
            scales[span.blocks] = symmetric_scales(rows, _LARGEST_FLOAT8, largest_of(elements.dtype))
            if not are_representable(scales[span.blocks]):
                return None
            values = scratch[: span.stop - span.start].view(rows.shape)
            torch.mul(rows, scales[span.blocks].float().reciprocal_(), out=values)
            codes[span.start : span.stop].copy_(values.view(-1))
        return elements.payload(codes, scales)

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        codes, scales = payload.parts
        if runs_kernels(flat.device):
            from plimsoll.engine.codecs import kernels

            kernels.decode_float8(codes.view(torch.uint8), scales, flat, self.block)
            return tensor
        most = min(CHUNK, flat.numel())
        halves = torch.empty(most, dtype=torch.int16, device=flat.device)
        scratch = torch.empty(0 if flat.dtype is torch.float32 else most, dtype=torch.float32, device=flat.device)
        for span in spans(flat.numel(), self.block):
            out = flat[span.start : span.stop]
            rows = (scratch[: out.numel()] if scratch.numel() else out).view(-1, span.width)
            _to_float(codes[span.start : span.stop], halves[: out.numel()], rows.view(-1))
            # Halves have an exponent bias of 15 where e4m3 has 7.
            rows.mul_(scales[span.blocks].float().mul_(2**8))
            if scratch.numel():
                out.copy_(rows.view(-1))
        return tensor


def _to_float(codes: torch.Tensor, halves: torch.Tensor, out: torch.Tensor) -> None:
    """Decode e4m3 numbers (float8), and write them times 2**-8 to ``out``. All numbers must be finite.

    The bits of each number are moved to their position in a float16 (a half). This is ten times as fast as torch's own
    conversion on a CPU.
    """
    halves.copy_(codes.view(torch.int8)).bitwise_left_shift_(8)
    halves.bitwise_right_shift_(1).bitwise_and_(~0x4000)  # the shift brings the sign along
    out.copy_(halves.view(torch.float16))
