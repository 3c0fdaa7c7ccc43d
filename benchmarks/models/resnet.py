"""A ResNet-50-like net of bottleneck blocks with batch norm, as plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.models.data import images_and_labels

_EXPANSION = 4
_SIZES = {
    "tiny": ((2, 2), 8, 4, 64),
    "cpu": ((2, 3, 4, 2), 32, 8, 128),
    "h200": ((3, 4, 6, 3), 64, 512, 224),
}


class Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up, and the input added; He et al. 2016, figure 5, stride in the 3×3."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        self.down = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.middle = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.up = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.down(x)))
        y = self.relu(self.norm2(self.middle(y)))
        return self.relu(self.norm3(self.up(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )  # fmt: skip
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                blocks.append(Bottleneck(channels, width * 2**stage, stride=2 if stage and not i else 1))
                channels = width * 2**stage * _EXPANSION
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x.mean((2, 3))), labels)


def build(size: str) -> tuple[Any, dict[str, Any], Any]:
    depths, width, batch, side = _SIZES[size]
    images, labels = images_and_labels(batch, side)
    return ResNet(depths, width), {"images": images, "labels": labels}, lambda loss: loss
