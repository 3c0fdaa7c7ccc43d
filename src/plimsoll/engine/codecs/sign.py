"""An activation in, one bit per element out: where it is positive, which is all that the backward of ReLU reads.

Decodes to 1 where the tensor was above 0 and to 0 elsewhere. A NaN is neither: on the CPU ``encode`` answers None, on CUDA
everything decodes to NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.engine.codecs.kernels import are_usable
from plimsoll.engine.codecs.layout import CHUNK, Elements, chunks, empty_decoded
from plimsoll.engine.codecs.packing import BitPacker, packed_bits_bytes
from plimsoll.engine.codecs.protocol import Codec, Payload


@dataclass(frozen=True, slots=True)
class Sign(Codec):
    """One bit: above zero or not."""

    is_lossless: ClassVar[bool] = True
    keeps_sign_only: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "sign"

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int:
        return packed_bits_bytes(count) + dtype.itemsize

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        most = min(count, CHUNK)
        return BitPacker.scratch_bytes(most) + most * 2 * dtype.itemsize + 64

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        elements = Elements(tensor)
        if most_bytes is not None and self.payload_bytes(elements.count, elements.dtype) > most_bytes:
            return None
        packed = torch.empty(packed_bits_bytes(elements.count), dtype=torch.uint8, device=elements.device)
        one = torch.ones(1, dtype=elements.dtype, device=elements.device)
        if elements.flat is not None and are_usable(elements.device):
            from plimsoll.engine.codecs.kernels import bits as kernels

            kernels.pack_positive(elements.flat, packed, one)
            return elements.payload(packed, one)
        packer = BitPacker(min(CHUNK, elements.count), elements.device)
        clamped = torch.empty(min(CHUNK, elements.count), dtype=elements.dtype, device=elements.device)
        for start, stop in chunks(elements.count):
            positive = torch.clamp(elements.run(start, stop), min=0, max=1, out=clamped[: stop - start])
            most = positive.amax()  # NaN if there is one, and never infinity
            if elements.device.type == "cpu" and torch.isnan(most):
                return None
            one.add_(most - most)
            packer.bits(stop - start).copy_(positive)
            packer.pack(stop - start, out=packed[start // 8 : packed_bits_bytes(stop)])
        return elements.payload(packed, one)

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        packed, one = payload.parts
        if are_usable(flat.device):
            from plimsoll.engine.codecs.kernels import bits as kernels

            kernels.unpack(packed, one, flat)
            return tensor
        packer = BitPacker(min(CHUNK, flat.numel()), flat.device)
        for start, stop in chunks(flat.numel()):
            bits = packer.unpack(packed[start // 8 : packed_bits_bytes(stop)], stop - start)
            flat[start:stop].copy_(bits.view(torch.int8)).mul_(one)
        return tensor
