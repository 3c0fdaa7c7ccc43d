"""A float tensor in, half a byte per element and a scale per block out, and back. How: `quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from plimsoll.engine.codecs.blocks import FLOATS, WIDEST
from plimsoll.engine.codecs.options import number, spell, word
from plimsoll.engine.codecs.protocol import Codec, Payload
from plimsoll.engine.codecs.quantize import Grid, dequantize, quantize


@dataclass(frozen=True, slots=True)
class Int4(Codec):
    """Whole numbers of 4 bits; the defaults are what measured best (docs/lab-notes.md)."""

    block: int = number(64, least=32, most=WIDEST)
    mode: str = word("affine", "symmetric")
    basis: str = word("rotated", "unrotated")
    rounding: str = word("nearest", "stochastic")

    is_lossless: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return spell("int4", self)

    @property
    def grid(self) -> Grid:
        return Grid(4, self.block, self.mode == "affine", self.basis == "rotated", self.rounding == "stochastic")

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def payload_bytes(self, count: int, dtype: torch.dtype) -> int:
        return self.grid.payload_bytes(count)

    def workspace_bytes(self, count: int, dtype: torch.dtype) -> int:
        return self.grid.workspace_bytes(count, dtype)

    def encode(self, tensor: torch.Tensor, *, seed: int = 0, most_bytes: int | None = None) -> Payload | None:
        if most_bytes is not None and self.payload_bytes(tensor.numel(), tensor.dtype) > most_bytes:
            return None
        return quantize(tensor, self.grid, seed)

    def decode(self, payload: Payload) -> torch.Tensor:
        return dequantize(payload, self.grid)
