"""The body that all kinds of blocks share, and stacks of blocks that can be checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS, BLOCKS = 128, 512, 8

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model to train: ``make`` builds it, and ``batch_of`` draws the batch of a step."""

    name: str
    make: Callable[[], nn.Module]
    batch_of: Callable[[int], Batch]


class Block(nn.Module):
    """A residual block. Its subclasses override `forward`; `FunctionBlock` takes a function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.gate = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("table", torch.randn(8, WIDTH))

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class FunctionBlock(Block):
    """A block whose forward is a function of the block and its input."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(self, x)


class Checkpointable(nn.Module):
    """A model that runs its blocks by `run`, under ``torch.utils.checkpoint`` after `gradient_checkpointing_enable`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_checkpointed = False

    def gradient_checkpointing_enable(self, _: Mapping[str, bool]) -> None:
        self.is_checkpointed = True

    def run(self, block: nn.Module, *args: torch.Tensor) -> Any:
        return checkpoint(block, *args, use_reentrant=False) if self.is_checkpointed else block(*args)


class Stack(Checkpointable):
    """Blocks one after the other. The output is the loss."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x.square().mean()


def kind_of(block: Any) -> Kind:
    """Return a stack of `BLOCKS` blocks: of a subclass of `Block`, or of a function of a block and its input."""
    is_class = isinstance(block, type)
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in block.__name__)

    def make() -> nn.Module:
        return Stack(block() if is_class else FunctionBlock(block) for _ in range(BLOCKS))

    return Kind(name=words.replace("_", " ").strip(), make=make, batch_of=_rows)


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def _rows(step: int) -> Batch:
    return {"x": torch.randn(ROWS, WIDTH, generator=generator(step))}
