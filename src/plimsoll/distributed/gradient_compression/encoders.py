"""The wire formats of topk, sign and int8: encode rows of numbers as bytes of a fixed length per row, and decode them.

A row is what one rank sends to another for one parameter, in float32. The length of its payload depends only on the number of
elements and the gradient's dtype, so all ranks know it. Payloads are whole multiples of 4 bytes.

An encoder has ``payload_bytes``, the length for one row. ``encode`` turns ``(rows, elements)`` float32 into ``(rows,
payload_bytes)`` uint8, and ``decode`` does the reverse. The caller keeps the encoding error: it decodes its own payload and
takes the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from plimsoll.distributed.gradient_compression.method import Method
from plimsoll.engine.codecs.layout import BitPacker

_ALIGNMENT = 4
_INDEX_BYTES = torch.int32.itemsize
_SCALE_BYTES = torch.float32.itemsize
_MOST_INT8 = 127


def encoder_of(method: Method) -> Encoder:
    """The encoder of ``topk``, ``sign`` and ``int8``."""
    if method.kind == "topk":
        return TopKEncoder(method)
    if method.kind == "sign":
        return SignEncoder(method.block)
    assert method.kind == "int8", f"{method} is not sent as payloads"
    return Int8Encoder(method.block)


@dataclass(frozen=True, slots=True)
class TopKEncoder:
    """The elements of the largest magnitude with their places; values are sent in the gradient's own dtype.

    Source: Lin et al. 2018, "Deep Gradient Compression"; Stich et al. 2018, "Sparsified SGD with memory".
    Known weakness: the device picks among equal magnitudes, and a GPU may pick others in a second run.
    """

    method: Method

    def payload_bytes(self, elements: int, dtype: torch.dtype) -> int:
        sent = self.method.elements_sent(elements)
        return sent * _INDEX_BYTES + _aligned(sent * dtype.itemsize)

    def encode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        sent = self.method.elements_sent(rows.shape[1])
        places = rows.abs().topk(sent, dim=1, sorted=False).indices
        values = narrow(rows.gather(1, places), dtype)
        return torch.cat([as_bytes(places.int()), _pad(as_bytes(values))], dim=1)

    def decode(self, payloads: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        sent = self.method.elements_sent(elements)
        places, rest = payloads.split([sent * _INDEX_BYTES, _aligned(sent * dtype.itemsize)], dim=1)
        values = from_bytes(rest[:, : sent * dtype.itemsize], dtype).float()
        rows = torch.zeros(len(payloads), elements, dtype=torch.float32, device=payloads.device)
        return rows.scatter_(1, from_bytes(places, torch.int32).long(), values)


@dataclass(frozen=True, slots=True)
class SignEncoder:
    """One bit per element and the mean magnitude of each block of ``block`` neighbours.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019, "Error feedback fixes SignSGD"
    (one scale per layer there, one per block here).
    """

    block: int

    def payload_bytes(self, elements: int, dtype: torch.dtype) -> int:
        del dtype
        return _aligned(-(-elements // 8)) + _SCALE_BYTES * -(-elements // self.block)

    def encode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        del dtype
        count, elements = rows.shape
        bits_bytes = _aligned(-(-elements // 8))
        packer = BitPacker(count * bits_bytes * 8, rows.device)
        padded = packer.bits(count * bits_bytes * 8).zero_().view(count, -1)
        padded[:, :elements] = rows >= 0
        bits = packer.pack(padded.numel(), torch.empty(count * bits_bytes, dtype=torch.uint8, device=rows.device))
        sizes = _block_sizes(elements, self.block, rows.device)
        scales = _blocks(rows.abs(), self.block).sum(dim=2) / sizes
        return torch.cat([bits.view(count, -1), as_bytes(scales)], dim=1)

    def decode(self, payloads: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        del dtype
        count = len(payloads)
        bits_bytes = _aligned(-(-elements // 8))
        packer = BitPacker(count * bits_bytes * 8, payloads.device)
        packed = payloads[:, :bits_bytes].contiguous().view(-1)
        positive = packer.unpack(packed, count * bits_bytes * 8).view(count, -1)[:, :elements]
        scales = from_bytes(payloads[:, bits_bytes:], torch.float32).repeat_interleave(self.block, dim=1)[:, :elements]
        return torch.where(positive, scales, -scales)


@dataclass(frozen=True, slots=True)
class Int8Encoder:
    """Whole numbers from -127 to 127 and the largest magnitude of each block of ``block`` neighbours, rounded to nearest.

    Source: Dettmers 2015, "8-bit approximations for parallelism in deep learning" (he uses a special data type, here the
    steps are linear).
    """

    block: int

    def payload_bytes(self, elements: int, dtype: torch.dtype) -> int:
        del dtype
        return _aligned(elements) + _SCALE_BYTES * -(-elements // self.block)

    def encode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        del dtype
        elements = rows.shape[1]
        blocks = _blocks(rows, self.block)
        largest = blocks.abs().amax(dim=2)
        # In a block of zeros, divide by the smallest normal number instead of 0; the block stays zero.
        steps = (largest / _MOST_INT8).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (blocks / steps.unsqueeze(2)).round().clamp(-_MOST_INT8, _MOST_INT8).to(torch.int8)
        return torch.cat([_pad(as_bytes(codes.flatten(1)[:, :elements].contiguous())), as_bytes(steps)], dim=1)

    def decode(self, payloads: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        del dtype
        codes = from_bytes(payloads[:, :elements], torch.int8).float()
        steps = from_bytes(payloads[:, _aligned(elements) :], torch.float32)
        return codes * steps.repeat_interleave(self.block, dim=1)[:, :elements]


Encoder: TypeAlias = TopKEncoder | SignEncoder | Int8Encoder


def narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert float32 to the gradient's own dtype; values beyond its range are clipped, and the rest stays in the residual."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of every row."""
    return rows.contiguous().view(torch.uint8)


def from_bytes(payloads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of bytes read as ``dtype``."""
    return payloads.contiguous().view(dtype)


def _aligned(bytes_: int) -> int:
    return -(-bytes_ // _ALIGNMENT) * _ALIGNMENT


def _pad(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, _aligned(rows.shape[1]) - rows.shape[1]))


def _blocks(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Split rows into ``(rows, blocks, block)``, the last block padded with zeros."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % block))
    return padded.view(len(rows), -1, block)


def _block_sizes(elements: int, block: int, device: torch.device) -> torch.Tensor:
    """The number of elements in each block; the last block may be shorter."""
    starts = torch.arange(0, elements, block, device=device)
    return (elements - starts).clamp_max(block).float()
