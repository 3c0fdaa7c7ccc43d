"""Small real architectures with batches that train them: what the tracing tests run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zoo

Sample = tuple[nn.Module, dict[str, torch.Tensor]]
_WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}


def llama() -> Sample:
    return _language(zoo.build("llama", **_WIDE, vocab_size=100))


def gpt2() -> Sample:
    return _language(zoo.build("gpt2", n_embd=64, n_layer=3, vocab_size=100))


def bert() -> Sample:
    model, batch = _language(zoo.build("bert", **_WIDE, vocab_size=100))
    return model, {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def t5() -> Sample:
    return _language(zoo.build("t5", d_model=64, d_kv=16, d_ff=128, vocab_size=100))


def mixtral() -> Sample:
    return _language(zoo.build("mixtral", vocab_size=100))


def vit() -> Sample:
    return _vision(zoo.build("vit", **_WIDE, image_size=32, patch_size=8, num_labels=10))


def swin() -> Sample:
    return _vision(zoo.build("swin", num_labels=10))


def convnext() -> Sample:
    return _vision(zoo.build("convnext", num_labels=10))


def resnet() -> Sample:
    return _vision(zoo.build("resnet", embedding_size=16, hidden_sizes=[16, 32], num_labels=10))


def clip() -> Sample:
    return zoo.sample("clip")


class ConvNet(nn.Module):
    """Residual blocks of convolution, batch norm and ReLU."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)))


def conv_net() -> Sample:
    torch.manual_seed(0)
    return ConvNet().train(), {"x": torch.randn(2, 3, 32, 32), "y": torch.randint(0, 10, (2,))}


TRANSFORMERS: dict[str, Callable[[], Sample]] = {"llama": llama, "gpt2": gpt2, "vit": vit, "bert": bert, "t5": t5}
ALL: dict[str, Callable[[], Sample]] = {
    **TRANSFORMERS,
    "clip": clip,
    "mixtral": mixtral,
    "swin": swin,
    "convnext": convnext,
    "resnet": resnet,
    "conv net": conv_net,
}


def _language(model: nn.Module, length: int = 32) -> Sample:
    torch.manual_seed(0)
    ids = torch.randint(1, 100, (2, length))
    return model.train(), {"input_ids": ids, "labels": ids}


def _vision(model: nn.Module) -> Sample:
    torch.manual_seed(0)
    return model.train(), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))}


def loss_of(output: Any) -> torch.Tensor:
    """What the step calls backward on."""
    return getattr(output, "loss", output)


class Block(nn.Module):
    """A residual two-layer block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks in a row; ``calls`` says which block runs when."""

    def __init__(self, width: int = 8, depth: int = 2, calls: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.calls:
            x = self.blocks[index](x)
        return x.square().mean()
