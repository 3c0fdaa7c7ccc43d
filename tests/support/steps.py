"""Tiny models with a batch and a loss: what tests of the whole path plan, run and measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import zoo

Step = tuple[nn.Module, Any, Callable[[Any], torch.Tensor] | None]


class Net(nn.Module):
    """Parts and a function of them: ``Net(lambda net, x: net.line(x).tanh(), line=nn.Linear(8, 8))``."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


class Block(nn.Module):
    """A residual MLP with dropout and a norm."""

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, count: int = 3, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class PaddingFree(Stack):
    """Drops the padding of a batch before its blocks, as encoders with variable-length attention do."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x[mask])


class Biased(Block):
    """Adds a buffer to its input."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(width)
        self.register_buffer("bias", torch.randn(rows, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.bias)


class CheckpointedStack(Stack):
    """The same with every block checkpointed by hand, where ``is_on``."""

    is_on = True
    is_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant) if self.is_on else block(x)
        return x


class ConvBlock(nn.Module):
    """A residual pair of convolutions with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(x + self.second_norm(self.second(y)))


def on(device: torch.device, step: Step) -> Step:
    """The same step on a device."""
    model, batch, loss = step
    return model.to(device), tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch), loss


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """A loss that weighs every element differently."""
    return output.square().mean()


def stack(rows: int = 48, width: int = 32) -> Step:
    torch.manual_seed(0)
    return Stack(width=width), torch.randn(rows, width), mean_square


def conv_net(scale: int = 1) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16 * scale, 3, padding=1), *(ConvBlock(16 * scale) for _ in range(2)))
    return model, torch.randn(4, 3, 16 * scale, 16 * scale), mean_square


def llama(scale: int = 1) -> Step:
    model = zoo.build("llama", vocab_size=128, hidden_size=64 * scale, intermediate_size=172 * scale)
    return model, zoo.words(2 * scale, tokens=64, vocabulary=128), None


def gpt2(scale: int = 1) -> Step:
    return zoo.build("gpt2", n_embd=64 * scale, vocab_size=128), zoo.words(2 * scale, tokens=64, vocabulary=128), None


def vit(scale: int = 1) -> Step:
    model = zoo.build("vit", hidden_size=64 * scale, intermediate_size=128 * scale, image_size=32, num_labels=2)
    return model, zoo.pictures(4 * scale, size=32, classes=2), None
