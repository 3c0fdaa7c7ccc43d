"""float32 in, bfloat16 out: half the bytes, 8 significant bits, the same range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.engine.codecs.layout import CHUNK, Elements, chunks, empty_decoded
from plimsoll.engine.codecs.protocol import Codec, Payload


@dataclass(frozen=True, slots=True)
class BFloat16(Codec):
    """Rounded to the nearest bfloat16: off by at most 1/256 of the value. What rounds to infinity is out of range."""

    is_lossless: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "bf16"

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float32

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
            if elements.device.type == "cpu" and not math.isfinite(_farthest(run).bfloat16().item()):
                return None
            rounded[start:stop].copy_(run)
        return elements.payload(rounded)

    def decode(self, payload: Payload) -> torch.Tensor:
        tensor, flat = empty_decoded(payload)
        flat.copy_(payload.parts[0])
        return tensor


def _farthest(run: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of the run; NaN if there is one."""
    return torch.maximum(run.amax(), -run.amin())
