"""Hold rebuilt tensors between the two halves of a split backward. The first half computes the gradients of inputs, the second
half the gradients of weights.

A zero-bubble pipeline runs both halves over the same graph. In both halves autograd unpacks everything that a node saved,
whichever gradient the node computes, so a dropped slot (saved tensor) would be rebuilt twice. The first micro-batch shows which
slots both halves read; from then on these slots are held from their first reading to their second.

This is opt-in: after ``backward(retain_graph=True)`` it would hold tensors that the plan has dropped for as long as the graph
lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from plimsoll.tracing.torch_internals import current_graph_task


@dataclass(slots=True)
class Between:
    """State of one cell: the autograd graph task that read the cell first, and the tensor if it is held for a second task."""

    task: int
    tensor: torch.Tensor | None


class ReadTwice(Protocol):
    """A protocol with the attributes of a dropped cell that `Halves` uses."""

    index: int
    between: Between | None


class Halves:
    """Remembers which dropped slots (saved tensors) of a region both halves of a split backward read. The cells hold the
    tensors, not this object.

    A half is one autograd graph task.
    """

    __slots__ = ("read_twice",)

    def __init__(self) -> None:
        self.read_twice: set[int] = set()

    def take(self, cell: ReadTwice) -> torch.Tensor | None:
        """Return the tensor that the first half left in the cell, or ``None``.

        The cell releases the tensor now, unless the first half itself reads it again.
        """
        between = cell.between
        if between is None or between.tensor is None:
            return None
        tensor = between.tensor
        if between.task != current_graph_task():
            between.tensor = None
        return tensor

    def hold(self, cell: ReadTwice, value: torch.Tensor) -> None:
        """Hold the tensor of a rebuilt slot in its cell, if the second half will read it.

        If this is the second half, remember the slot, so that later calls hold its tensor.
        """
        between = cell.between
        task = current_graph_task()
        if between is None:
            # Hold only slots that both halves were seen to read. Holding all would keep values for nothing that only the first
            # half reads (docs/project/design/held-between-halves.md).
            cell.between = Between(task, value if cell.index in self.read_twice else None)
        elif between.task != task:
            self.read_twice.add(cell.index)
