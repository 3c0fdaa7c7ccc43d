"""A deep residual MLP, as plain torch: large matrix products and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SIZES = {"dry": (2, 64, 256), "tiny": (8, 64, 64), "cpu": (32, 512, 1024), "h200": (64, 8192, 65536)}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Mlp(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def build(size: str) -> tuple[Any, dict[str, Any], Any]:
    depth, width, batch = _SIZES[size]
    return Mlp(depth, width), {"x": torch.randn(batch, width)}, lambda loss: loss
