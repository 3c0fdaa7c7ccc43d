"""Elements and the bits of those to keep in, a bitmap and the kept ones out; and back, with zeros between them.

What `zeros` and `topk` share. Exact by bit pattern.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from plimsoll.engine.codecs.layout import CHUNK, Elements, chunks, empty_decoded
from plimsoll.engine.codecs.packing import BitPacker, packed_bits_bytes
from plimsoll.engine.codecs.patterns import patterns_of
from plimsoll.engine.codecs.protocol import Payload

SPARSE_CHUNK = CHUNK // 4
"""Selecting by a mask needs up to 16 bytes of temporaries per element."""


def sparse_bytes(count: int, kept: int, dtype: torch.dtype) -> int:
    """Bytes of bitmap and kept elements."""
    return packed_bits_bytes(count) + kept * dtype.itemsize


def sparse_workspace_bytes(count: int, dtype: torch.dtype) -> int:
    """Most bytes of temporaries, with a copy of a chunk where a tensor has gaps."""
    most = min(count, SPARSE_CHUNK)
    return BitPacker.scratch_bytes(most) + most * (dtype.itemsize + 17) + min(count, CHUNK) * dtype.itemsize + 256


def gather(elements: Elements, kept: int, mark: Callable[[torch.Tensor, torch.Tensor], object]) -> Payload:
    """The payload of ``kept`` elements.

    Args:
        elements: all of them.
        kept: how many are marked.
        mark: writes to its second argument, of bools, which patterns of the first one are kept.
    """
    packed = torch.empty(packed_bits_bytes(elements.count), dtype=torch.uint8, device=elements.device)
    values = torch.empty(kept, dtype=elements.dtype, device=elements.device)
    packer = BitPacker(min(SPARSE_CHUNK, elements.count), elements.device)
    end = 0
    for start, stop in chunks(elements.count, SPARSE_CHUNK):
        patterns = patterns_of(elements.run(start, stop))
        bits = packer.bits(stop - start)
        mark(patterns, bits)
        found = torch.masked_select(patterns, bits)
        begin, end = end, end + found.numel()
        patterns_of(values[begin:end]).copy_(found)
        packer.pack(stop - start, out=packed[start // 8 : packed_bits_bytes(stop)])
    return elements.payload(packed, values)


def scatter(payload: Payload) -> torch.Tensor:
    """The tensor of a payload that ``gather`` made."""
    tensor, flat = empty_decoded(payload)
    packed, values = payload.parts
    packer = BitPacker(min(SPARSE_CHUNK, flat.numel()), flat.device)
    end = 0
    for start, stop in chunks(flat.numel(), SPARSE_CHUNK):
        bits = packer.unpack(packed[start // 8 : packed_bits_bytes(stop)], stop - start)
        begin, end = end, end + int(torch.count_nonzero(bits))
        patterns_of(flat[start:stop]).zero_().masked_scatter_(bits, patterns_of(values[begin:end]))
    return tensor
