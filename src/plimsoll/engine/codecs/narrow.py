"""Integers in, the narrowest integers that hold their range out, and the number to add to get them back.

Token ids, positions, indices of max-pooling, class labels. Finding the range waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.engine.codecs.layout import CHUNK, Elements, chunks, empty_decoded
from plimsoll.engine.codecs.protocol import Codec, Payload

_WIDE = (torch.int16, torch.int32, torch.int64)
_NARROW = (torch.int8, torch.int16, torch.int32)


@dataclass(frozen=True, slots=True)
class Narrow(Codec):
    """Integers by what they range over."""

    is_lossless: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "narrow"

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _WIDE

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int | None:
        return None

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        return 2 * min(count, CHUNK) * dtype.itemsize + 64

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        elements = Elements(tensor)
        least, most = _range(elements)
        dtype = next(
            (d for d in _NARROW if most - least < 2 ** (8 * d.itemsize) and d.itemsize < elements.dtype.itemsize), None
        )
        if dtype is None:
            return None
        if most_bytes is not None and elements.count * dtype.itemsize + elements.dtype.itemsize > most_bytes:
            return None
        half = 2 ** (8 * dtype.itemsize - 1)
        offset = least + half if least < 0 else most - half + 1  # what stays within both dtypes
        codes = torch.empty(elements.count, dtype=dtype, device=elements.device)
        scratch = torch.empty(min(CHUNK, elements.count), dtype=elements.dtype, device=elements.device)
        for start, stop in chunks(elements.count):
            codes[start:stop].copy_(torch.sub(elements.run(start, stop), offset, out=scratch[: stop - start]))
        return elements.payload(codes, torch.tensor([offset], dtype=elements.dtype, device=elements.device))

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        codes, offset = payload.parts
        for start, stop in chunks(flat.numel()):
            flat[start:stop].copy_(codes[start:stop]).add_(offset)
        return tensor


def _range(elements: Elements) -> tuple[int, int]:
    """The smallest and the largest element; zeros where there is none."""
    least, most = [], []
    for start, stop in chunks(elements.count):
        ends = torch.aminmax(elements.run(start, stop))
        least.append(int(ends.min))
        most.append(int(ends.max))
    return (min(least), max(most)) if least else (0, 0)
