"""A mask in, one bit per element and a constant out: tensors that hold nothing but zero and one other value.

Booleans, 0/1 masks of any dtype, and dropout's mask times 1/(1 - p). Exact by bit pattern. Looking whether a tensor is
such a mask waits for the device, except with booleans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.engine.codecs.kernels import are_usable
from plimsoll.engine.codecs.layout import CHUNK, Elements, chunks, empty_decoded
from plimsoll.engine.codecs.packing import BitPacker, packed_bits_bytes
from plimsoll.engine.codecs.patterns import has_patterns, patterns_of
from plimsoll.engine.codecs.protocol import Codec, Payload


@dataclass(frozen=True, slots=True)
class Bits(Codec):
    """Zero and one other value, a bit each."""

    is_lossless: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "bits"

    def accepts(self, dtype: torch.dtype) -> bool:
        return has_patterns(dtype)

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int:
        return packed_bits_bytes(count) + dtype.itemsize

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        most = min(count, CHUNK)
        return BitPacker.scratch_bytes(most) + most * (2 * dtype.itemsize + 1) + 64

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        elements = Elements(tensor)
        if most_bytes is not None and self.payload_bytes(elements.count, elements.dtype) > most_bytes:
            return None
        packed = torch.empty(packed_bits_bytes(elements.count), dtype=torch.uint8, device=elements.device)
        if elements.dtype is torch.bool and elements.flat is not None and are_usable(elements.device):
            from plimsoll.engine.codecs.kernels import bits as kernels

            kernels.pack_nonzero(patterns_of(elements.flat), packed)
            return elements.payload(packed, torch.ones(1, dtype=torch.bool, device=elements.device))
        packer = BitPacker(min(CHUNK, elements.count), elements.device)
        constant = 1 if elements.dtype is torch.bool else 0  # 0 until an element says otherwise
        for start, stop in chunks(elements.count):
            patterns = patterns_of(elements.run(start, stop))
            bits = packer.bits(stop - start).copy_(patterns)
            if elements.dtype is not torch.bool:
                least, most = (int(end) for end in torch.aminmax(patterns))
                constant = constant or most or least
                if not {least, most} <= {0, constant} or not _is_mask(patterns, bits, constant):
                    return None
            packer.pack(stop - start, out=packed[start // 8 : packed_bits_bytes(stop)])
        value = torch.empty(1, dtype=elements.dtype, device=elements.device)
        patterns_of(value).fill_(constant)
        return elements.payload(packed, value)

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        packed, value = payload.parts
        constant = patterns_of(value)
        if are_usable(flat.device):
            from plimsoll.engine.codecs.kernels import bits as kernels

            kernels.unpack(packed, constant, patterns_of(flat))
            return tensor
        packer = BitPacker(min(CHUNK, flat.numel()), flat.device)
        for start, stop in chunks(flat.numel()):
            bits = packer.unpack(packed[start // 8 : packed_bits_bytes(stop)], stop - start)
            patterns_of(flat[start:stop]).copy_(bits.view(torch.int8)).mul_(constant)
        return tensor


def _is_mask(patterns: torch.Tensor, bits: torch.Tensor, constant: int) -> bool:
    """Whether every pattern that is not zero is ``constant``."""
    rebuilt = torch.empty_like(patterns).copy_(bits.view(torch.int8)).mul_(constant)
    return torch.equal(rebuilt, patterns)
