"""Small real architectures with batches that train them: what the tracing tests run on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zoo
from steps import Net

Sample = tuple[nn.Module, dict[str, torch.Tensor]]
_WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}


def _language(name: str, **changes: Any) -> Sample:
    model = zoo.build(name, vocab_size=100, **changes)
    torch.manual_seed(0)
    ids = torch.randint(1, 100, (2, 32))
    return model, {"input_ids": ids, "labels": ids}


def _vision(name: str, **changes: Any) -> Sample:
    model = zoo.build(name, num_labels=10, **changes)
    torch.manual_seed(0)
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))}


def bert() -> Sample:
    model, batch = _language("bert", **_WIDE)
    return model, {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


llama = functools.partial(_language, "llama", **_WIDE)
gpt2 = functools.partial(_language, "gpt2", n_embd=64, n_layer=3)


def conv_block(width: int) -> Net:
    way = lambda net, x: F.relu(net.norm(net.conv(x)))  # noqa: E731
    return Net(way, conv=nn.Conv2d(width, width, 3, padding=1), norm=nn.BatchNorm2d(width))


def conv_net(width: int = 16) -> Sample:
    """Residual blocks of convolution, batch norm and ReLU."""

    def run(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = net.stem(x)
        for block in net.blocks:
            x = x + block(x)
        return F.cross_entropy(net.head(x.mean((2, 3))), y)

    torch.manual_seed(0)
    stem, blocks = nn.Conv2d(3, width, 3, padding=1), nn.ModuleList(conv_block(width) for _ in range(3))
    return Net(run, stem=stem, blocks=blocks, head=nn.Linear(width, 10)).train(), {
        "x": torch.randn(2, 3, 32, 32),
        "y": torch.randint(0, 10, (2,)),
    }


TRANSFORMERS: dict[str, Callable[[], Sample]] = {
    "llama": llama,
    "gpt2": gpt2,
    "vit": functools.partial(_vision, "vit", **_WIDE, image_size=32, patch_size=8),
    "bert": bert,
    "t5": functools.partial(_language, "t5", d_model=64, d_kv=16, d_ff=128),
}
ALL: dict[str, Callable[[], Sample]] = {
    **TRANSFORMERS,
    "clip": functools.partial(zoo.sample, "clip"),
    "mixtral": functools.partial(_language, "mixtral"),
    "swin": functools.partial(_vision, "swin"),
    "convnext": functools.partial(_vision, "convnext"),
    "resnet": functools.partial(_vision, "resnet", embedding_size=16, hidden_sizes=[16, 32]),
    "conv net": conv_net,
}


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
