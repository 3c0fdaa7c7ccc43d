"""48 blocks of width 16: arithmetic is nothing, what counts is how much Python and dispatch there is around each op."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_DEPTH, _WIDTH, _BATCH = 48, 16, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class LaunchBound(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def build(size: str) -> tuple[Any, dict[str, Any], Any]:
    del size  # the same everywhere: it is meant to be too small
    return LaunchBound(_DEPTH, _WIDTH), {"x": torch.randn(_BATCH, _WIDTH)}, lambda loss: loss
