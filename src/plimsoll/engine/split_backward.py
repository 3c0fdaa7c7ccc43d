"""Hold rebuilt tensors between the two halves of a split backward. The first half computes the gradients of inputs, the second
half the gradients of weights.

A zero-bubble pipeline runs both halves over the same graph. In both halves autograd unpacks everything that a node saved,
whichever gradient the node computes, so a dropped tensor would be rebuilt twice. The first micro-batch shows which dropped
tensors both halves read. From then on these tensors are held from their first reading to their second.

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
    """State of one dropped tensor in a split backward: the autograd graph task that read it first, and the tensor if it is held
    for a second task.
    """

    task: int
    tensor: torch.Tensor | None


class ReadTwice(Protocol):
    """A protocol with the attributes that `Halves` uses of a cell, the object that autograd holds for a dropped tensor."""

    index: int
    between: Between | None


class Halves:
    """Remembers which dropped tensors of a region (a module that the plan decides about) are read by both halves of a split
    backward. The cells (the objects in autograd) hold the tensors, not this object.

    A half is one autograd graph task.
    """

    __slots__ = ("read_twice",)

    def __init__(self) -> None:
        self.read_twice: set[int] = set()

    def take(self, cell: ReadTwice) -> torch.Tensor | None:
        """Return the tensor that the first half of a split backward left in the cell (the object in autograd), or ``None``.

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
        """Hold a rebuilt tensor in its cell (the object in autograd), if the second half of the split backward will read it
        too.

        If this is the second half, remember that both halves read the tensor, so that later calls hold it.
        """
        between = cell.between
        task = current_graph_task()
        if between is None:
            # Hold only slots that both halves were seen to read. Holding all would keep values for nothing that only the first
            # half reads (docs/project/design/held-between-halves.md).
            cell.between = Between(task, value if cell.index in self.read_twice else None)
        elif between.task != task:
            self.read_twice.add(cell.index)
