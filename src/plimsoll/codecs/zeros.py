"""A tensor that is mostly zeros in, a bitmap and the other values out.

Activations behind ReLU or dropout. Exact by bit pattern: -0.0 and NaN are values like any other. How many values there
are has to be waited for, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.codecs.layout import CHUNK, Elements, chunks, empty_decoded
from plimsoll.codecs.packing import BitPacker, packed_bits_bytes
from plimsoll.codecs.patterns import has_patterns, patterns_of
from plimsoll.codecs.protocol import Codec, Payload

_CHUNK = CHUNK // 4
"""Selecting by a mask needs up to 16 bytes of temporaries per element."""


@dataclass(frozen=True, slots=True)
class Zeros(Codec):
    """A bit for each element, and in full what is not zero."""

    is_lossless: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "zeros"

    def accepts(self, dtype: torch.dtype) -> bool:
        return has_patterns(dtype) and dtype is not torch.bool

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int | None:
        return None

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        most = min(count, _CHUNK)
        return BitPacker.scratch_bytes(most) + most * (dtype.itemsize + 17) + min(count, CHUNK) * dtype.itemsize + 256

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        elements = Elements(tensor)
        kept = sum(
            int(torch.count_nonzero(patterns_of(elements.run(*ends)))) for ends in chunks(elements.count, _CHUNK)
        )
        payload_bytes = packed_bits_bytes(elements.count) + kept * elements.dtype.itemsize
        if most_bytes is not None and payload_bytes > most_bytes:
            return None
        packed = torch.empty(packed_bits_bytes(elements.count), dtype=torch.uint8, device=elements.device)
        values = torch.empty(kept, dtype=elements.dtype, device=elements.device)
        packer = BitPacker(min(_CHUNK, elements.count), elements.device)
        end = 0
        for start, stop in chunks(elements.count, _CHUNK):
            patterns = patterns_of(elements.run(start, stop))
            bits = packer.bits(stop - start).copy_(patterns)
            found = torch.masked_select(patterns, bits)
            begin, end = end, end + found.numel()
            patterns_of(values[begin:end]).copy_(found)
            packer.pack(stop - start, out=packed[start // 8 : packed_bits_bytes(stop)])
        return elements.payload(packed, values)

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        packed, values = payload.parts
        packer = BitPacker(min(_CHUNK, flat.numel()), flat.device)
        end = 0
        for start, stop in chunks(flat.numel(), _CHUNK):
            bits = packer.unpack(packed[start // 8 : packed_bits_bytes(stop)], stop - start)
            begin, end = end, end + int(torch.count_nonzero(bits))
            patterns_of(flat[start:stop]).zero_().masked_scatter_(bits, patterns_of(values[begin:end]))
        return tensor
