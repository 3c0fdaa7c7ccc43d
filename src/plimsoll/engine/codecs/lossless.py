"""Lossless codecs: masks and signs in a bit per element, whole numbers in fewer bytes.

For mostly-zero tensors, see ``sparse``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.engine.codecs import layout
from plimsoll.engine.codecs.layout import (
    CHUNK,
    BitPacker,
    Elements,
    chunks,
    empty_decoded,
    has_patterns,
    packed_bits_bytes,
    patterns_of,
    runs_kernels,
)
from plimsoll.engine.codecs.protocol import Codec, Payload


@dataclass(frozen=True, slots=True)
class Bits(Codec):
    """A codec that stores a bit per element and a constant, for tensors that contain only zero and one other value.

    Such tensors are booleans, 0/1 masks of any dtype, and dropout's mask times 1/(1 - p). The codec is exact: bit patterns come
    back. To check whether a tensor is such a tensor, the host waits for the device once, except with booleans.
    """

    family: ClassVar[str] = "bits"
    is_lossless: ClassVar[bool] = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return has_patterns(dtype)

    def is_capturable(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bool

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
        if elements.dtype is torch.bool and elements.flat is not None and runs_kernels(elements.device):
            from plimsoll.engine.codecs import kernels

            kernels.pack_nonzero(patterns_of(elements.flat), packed)
            return elements.payload(packed, torch.ones(1, dtype=torch.bool, device=elements.device))
        packer = BitPacker(min(CHUNK, elements.count), elements.device)
        value = torch.zeros(1, dtype=elements.dtype, device=elements.device)
        constant = patterns_of(value)  # 0 until an element that is not zero is found
        is_other = torch.zeros(1, dtype=torch.bool, device=elements.device)
        for start, stop in chunks(elements.count):
            patterns = patterns_of(elements.run(start, stop))
            bits = packer.bits(stop - start).copy_(patterns)
            if elements.dtype is not torch.bool:
                least, most = torch.aminmax(patterns)
                constant.copy_(torch.where(constant == 0, torch.where(most == 0, least, most), constant))
                is_other |= _has_others(patterns, bits, constant)
                if not layout.host_waits(elements.device) and is_other:
                    return None
            packer.pack(stop - start, out=packed[start // 8 : packed_bits_bytes(stop)])
        if elements.dtype is torch.bool:
            constant.fill_(1)
        elif is_other:
            return None
        return elements.payload(packed, value)

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        packed, value = payload.parts
        _unpack(packed, patterns_of(value), patterns_of(flat))
        return tensor


@dataclass(frozen=True, slots=True)
class Sign(Codec):
    """A codec that stores a bit per element: whether the element is above zero. The backward of ReLU reads only that.

    An element decodes to 1 if it was above 0, else to 0. NaN cannot be stored: on the CPU ``encode`` returns None, on CUDA
    everything decodes to NaN.
    """

    family: ClassVar[str] = "sign"
    dtypes: ClassVar = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    is_lossless: ClassVar[bool] = True
    keeps_sign_only: ClassVar[bool] = True

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
        if elements.flat is not None and runs_kernels(elements.device):
            from plimsoll.engine.codecs import kernels

            kernels.pack_positive(elements.flat, packed, one)
            return elements.payload(packed, one)
        packer = BitPacker(min(CHUNK, elements.count), elements.device)
        clamped = torch.empty(min(CHUNK, elements.count), dtype=elements.dtype, device=elements.device)
        for start, stop in chunks(elements.count):
            positive = torch.clamp(elements.run(start, stop), min=0, max=1, out=clamped[: stop - start])
            most = positive.amax()  # NaN if any element is NaN, but never infinity
            if elements.device.type == "cpu" and torch.isnan(most):
                return None
            one.add_(most - most)
            packer.bits(stop - start).copy_(positive)
            packer.pack(stop - start, out=packed[start // 8 : packed_bits_bytes(stop)])
        return elements.payload(packed, one)

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        packed, one = payload.parts
        _unpack(packed, one, flat)
        return tensor


@dataclass(frozen=True, slots=True)
class Narrow(Codec):
    """A codec for integers. It stores them in the narrowest dtype that holds their range, with one number to add to each when
    they are decoded.

    It is for token ids, positions, indices of max-pooling, and class labels. To find the range, the host waits for the device
    once.
    """

    family: ClassVar[str] = "narrow"
    dtypes: ClassVar = (torch.int16, torch.int32, torch.int64)
    is_lossless: ClassVar[bool] = True

    def is_capturable(self, dtype: torch.dtype) -> bool:
        return False

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int | None:
        return None

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        return 2 * min(count, CHUNK) * dtype.itemsize + 64

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        elements = Elements(tensor)
        ranges = [torch.stack(torch.aminmax(elements.run(start, stop))) for start, stop in chunks(elements.count)]
        ends = torch.stack(ranges).tolist() if ranges else []  # waits for the device once
        least = min((low for low, _ in ends), default=0)
        most = max((high for _, high in ends), default=0)
        narrower = (d for d in (torch.int8, torch.int16, torch.int32) if d.itemsize < elements.dtype.itemsize)
        dtype = next((d for d in narrower if most - least < 2 ** (8 * d.itemsize)), None)
        if dtype is None:
            return None
        if most_bytes is not None and elements.count * dtype.itemsize + elements.dtype.itemsize > most_bytes:
            return None
        half = 2 ** (8 * dtype.itemsize - 1)
        offset = least + half if least < 0 else most - half + 1  # the offset, and every difference, fit in both dtypes
        codes = torch.empty(elements.count, dtype=dtype, device=elements.device)
        scratch = torch.empty(min(CHUNK, elements.count), dtype=elements.dtype, device=elements.device)
        for start, stop in chunks(elements.count):
            codes[start:stop].copy_(torch.sub(elements.run(start, stop), offset, out=scratch[: stop - start]))
        return elements.payload(codes, torch.full((1,), offset, dtype=elements.dtype, device=elements.device))

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        codes, offset = payload.parts
        for start, stop in chunks(flat.numel()):
            flat[start:stop].copy_(codes[start:stop]).add_(offset)
        return tensor


def _has_others(patterns: torch.Tensor, bits: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
    """Return whether some bit pattern is neither zero nor ``constant``. The result is a tensor that stays on the device."""
    rebuilt = torch.empty_like(patterns).copy_(bits.view(torch.int8)).mul_(constant)
    return rebuilt.ne_(patterns).any()


def _unpack(packed: torch.Tensor, constant: torch.Tensor, flat: torch.Tensor) -> None:
    """Decode bits: write ``constant`` (one element) to ``flat`` where bits are set, and ``constant * 0`` elsewhere."""
    if runs_kernels(flat.device):
        from plimsoll.engine.codecs import kernels

        kernels.unpack(packed, constant, flat)
        return
    packer = BitPacker(min(CHUNK, flat.numel()), flat.device)
    for start, stop in chunks(flat.numel()):
        bits = packer.unpack(packed[start // 8 : packed_bits_bytes(stop)], stop - start)
        flat[start:stop].copy_(bits.view(torch.int8)).mul_(constant)
