"""Holds rebuilt tensors between the two halves of a backward that makes gradients of inputs first, of weights later.

A zero-bubble pipeline runs both halves over the same graph. Autograd unpacks what a node saved in both, whichever gradient
it makes, so a dropped slot would be rebuilt twice. The first micro-batch shows which slots both halves read; from then on
these are held from their first reading to their second.

Only where asked for: after ``backward(retain_graph=True)`` the tensors that the plan has given up would be held for as long
as the graph lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from plimsoll.tracing.torch_internals import current_graph_task


@dataclass(slots=True)
class Between:
    """Of one cell: the graph task that read it first, and the tensor if it is held for another one."""

    task: int
    tensor: torch.Tensor | None


class ReadTwice(Protocol):
    """A dropped cell, as far as it matters here."""

    index: int
    between: Between | None


class Halves:
    """Which dropped slots of a region are read by two graph tasks of one call. It holds no tensor: cells do."""

    __slots__ = ("read_twice",)

    def __init__(self) -> None:
        self.read_twice: set[int] = set()

    def take(self, cell: ReadTwice) -> torch.Tensor | None:
        """What the first half left for this reader; let go of, unless that half itself reads it again."""
        between = cell.between
        if between is None or between.tensor is None:
            return None
        tensor = between.tensor
        if between.task != current_graph_task():
            between.tensor = None
        return tensor

    def hold(self, cell: ReadTwice, value: torch.Tensor) -> None:
        """A slot was rebuilt: hold it if the second half will want it; if this is the second half, remember for next time."""
        between = cell.between
        task = current_graph_task()
        if between is None:
            cell.between = Between(task, value if cell.index in self.read_twice else None)
        elif between.task != task:
            self.read_twice.add(cell.index)
