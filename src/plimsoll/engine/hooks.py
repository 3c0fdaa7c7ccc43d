"""The saved-tensor hooks of a managed region (a module that the plan decides about), and the cells: objects that the hooks give
to autograd instead of tensors.

While the region runs, its cells hold everything that autograd saves: only after the region has returned is it known whether the
call matches the recorded one. Then each cell is *kept* or *dropped*, and the `OpenCall` is done. Tensors that autograd frees
during forward, such as the graph of a detached tensor, are freed at once. The exception is a node that has saved its own
output: the two form a reference cycle, which is broken when the region returns.

Cells own memory by plain references, so reference counting frees memory in time, without a table of live tensors. A dropped
cell owns the kept cells that its recipe (the ops that rebuild its tensor) reads (directly or through other ops), and nothing
else. When autograd frees the dropped cell, they are freed too.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from plimsoll.engine.replay_rng import ENTRY, StatePoints, take_states
from plimsoll.engine.split_backward import Between
from plimsoll.errors import SavedTensorModified
from plimsoll.tracing.local_tensors import Shell, unwrapped, version_of


class Readable(Protocol):
    """Protocol of objects that give an input to a recipe (the ops that rebuild a dropped tensor): a cell with a kept tensor, an
    encoded tensor, or a ticket for an offloaded tensor. The recipe calls ``read`` to get the input.
    """

    def read(self) -> torch.Tensor: ...


class Restorer(Protocol):
    """Protocol of objects that return the tensor that belongs to a cell (the object that autograd holds instead of the tensor).
    While forward runs, it is the `OpenCall`; afterwards it is the replay, which rebuilds the tensor.
    """

    def restore(self, cell: Cell) -> torch.Tensor: ...


class Cell:
    """The object that autograd holds in place of one saved tensor, for one call of a region.

    A cell is *open* while the region runs (``tensor`` is what autograd has saved), then *kept* (``tensor`` and ``version`` are
    set) or *dropped* (``leaves`` are the inputs of its recipe, the ops that rebuild the tensor, and ``sample`` has some of its
    elements). ``between`` is the state that `split_backward` attaches to a dropped cell. For a DTensor, the cell holds the
    local shard and ``shell`` holds the rest of the DTensor (``None`` for other tensors). The version of a DTensor is the sum of
    the shard's version and the shell's version.
    """

    __slots__ = ("__weakref__", "between", "index", "leaves", "restorer", "sample", "shell", "tensor", "version")

    restorer: Restorer | None
    index: int
    tensor: torch.Tensor | None
    version: int
    leaves: tuple[Readable, ...]
    sample: tuple[Any, int, Any] | None
    between: Between | None
    shell: Shell | None

    def __init__(
        self,
        restorer: Restorer | None,
        index: int,
        version: int,
        shell: Shell | None = None,
        tensor: torch.Tensor | None = None,
    ) -> None:
        # ``leaves``, ``sample`` and ``between`` stay unset until ``drop``, to save time: this runs for every saved tensor
        self.restorer = restorer
        self.shell = shell
        self.index = index
        self.tensor = tensor
        self.version = version

    @classmethod
    def kept(cls, tensor: torch.Tensor) -> Cell:
        """Return a new cell that keeps this tensor from the start. All other cells are kept or dropped only when the call of
        the region ends.
        """
        cell = cls(None, 0, tensor._version)
        cell.keep(tensor)
        return cell

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the tensor until backward. This cell's ``version`` stays the tensor's version counter at the time when autograd
        saved it.
        """
        # Hold an alias: the tensor may be the output of the node that holds this cell, and that cycle would never be freed.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.restorer = None
        if self.shell is not None:
            self.shell.keep()

    def alias(self) -> Cell:
        """Return another cell (the object that autograd holds instead of a tensor) that keeps an alias of the same tensor.

        The tensor may be a parameter. If the parameter gets other memory later, the alias still shows the present memory.
        """
        assert self.tensor is not None, "only kept cells are read"
        return Cell(None, self.index, self.version, self.shell, self.tensor.detach())

    def drop(self, leaves: tuple[Readable, ...], restorer: Restorer) -> None:
        """Release the tensor. From now on, hold only ``leaves``, the inputs of the recipe (the ops that rebuild the tensor),
        and ``restorer``, the object that runs the recipe.
        """
        self.leaves = leaves
        self.restorer = restorer
        self.sample = None
        self.between = None
        if self.shell is not None:
            self.shell.let_go()

    def version_now(self, tensor: torch.Tensor) -> int:
        """Return the current version counter of a saved tensor that is still held.

        For a DTensor, it is the sum of the versions of the local shard and of the DTensor around it.
        """
        return tensor._version if self.shell is None else tensor._version + self.shell.version

    def show(self, value: torch.Tensor) -> torch.Tensor:
        """Return what autograd gets for the tensor ``value``: if autograd has saved a DTensor, a DTensor around ``value``, else
        ``value`` itself.
        """
        shell = self.shell
        if shell is None:
            return value
        return shell.around(value) if shell.outer is None else shell.outer

    def read(self) -> torch.Tensor:
        """Return the kept tensor.

        Raises:
            SavedTensorModified: the tensor was written to in place after it was saved.
        """
        tensor = self.tensor
        assert tensor is not None, "only kept cells are read"
        found = tensor._version if self.shell is None else self.version_now(tensor)
        if found != self.version:  # with saved-tensor hooks, autograd leaves this check to us
            raise modified_in_place(f"a saved tensor of shape {tuple(tensor.shape)}", self.version, found)
        return tensor


NOTHING = torch.empty(0)
"""An empty tensor. It takes the place of a freed tensor in a call's list of saved tensors."""
GONE = Cell.kept(NOTHING)
"""A cell (the object that autograd holds instead of a tensor) that takes the place of a cell that autograd has freed, in a
call's list of cells.
"""


class OpenCall:
    """One call of a region while it runs. It holds the saved tensors in the order of saving (for DTensors, the local shards).

    Only autograd owns cells until the region has returned. After ``end``, ``cells`` has the cells that are still alive (`GONE`
    for the others), and ``tensors`` has their tensors.
    """

    __slots__ = ("_points", "cells", "references", "sharded", "sources", "states", "storages", "tensors")

    def __init__(
        self,
        points: StatePoints,
        sources: Sequence[torch.Tensor | None] = (),
        storages: Mapping[int, torch.UntypedStorage] = MappingProxyType({}),
    ) -> None:
        self.sources = sources
        """The parameters and buffers of the region at the start of the call; ``None`` for one that is not set."""
        self.storages = storages
        """The storages, at the start of the call, of the parameters and buffers that recipes (ops that rebuild dropped tensors)
        read.

        The key is the index in ``sources``.
        """
        self.cells: list[Cell] = []
        self.tensors: list[torch.Tensor] = []
        self.sharded = 0
        """The number of saved tensors that are shards of DTensors."""
        self.states: dict[tuple[int, int], torch.Generator] = {}
        """States of random generators, so that random ops can run again with the same numbers. The key is a pair of generator
        index and point in forward.
        """
        self.references: list[weakref.ref[Cell]] = []
        """Weak references to all cells (objects that autograd holds instead of tensors). The index is the number of the saved
        tensor in the order of saving.
        """
        self._points = points
        take_states(points, ENTRY, self.states)

    def pack(self, tensor: torch.Tensor) -> Cell:
        """The pack hook: hold the saved tensor until the region returns, and give autograd a cell (an object that can return
        the tensor).
        """
        opened = self.references
        if (
            type(tensor) is torch.Tensor or type(tensor) is nn.Parameter
        ):  # the fast path for everything but DTensors and similar subclasses
            cell = Cell(self, len(opened), tensor._version, None, tensor)
        else:
            version = version_of(tensor)
            tensor, shell = unwrapped(tensor)
            cell = Cell(self, len(opened), version, shell, tensor)
            self.sharded += shell is not None
        opened.append(weakref.ref(cell))
        return cell

    def pack_random(self, tensor: torch.Tensor) -> Cell:
        """The pack hook of a region whose random ops backward will repeat. It also records the state of the random generator
        before such an op.
        """
        take_states(self._points, len(self.references), self.states)
        return self.pack(tensor)

    def restore(self, cell: Cell) -> torch.Tensor:
        """Return the tensor of a cell (the object that autograd holds instead) while the region still runs. It is needed if
        forward itself runs a backward.
        """
        return self.tensors[cell.index] if cell.tensor is None else cell.tensor

    def end(self) -> None:
        """Collect the cells (the objects that autograd holds instead of tensors) that are still alive, and their tensors. Call
        this after the region has returned.
        """
        cells, tensors = self.cells, self.tensors
        for reference in self.references:
            cell = reference()
            if cell is None or cell.tensor is None:
                cell, tensor = GONE, NOTHING
            else:
                tensor, cell.tensor = cell.tensor, None
            cells.append(cell)
            tensors.append(tensor)
        if self.sharded:
            self.sharded = sum(cell.shell is not None for cell in self.cells)

    def keep_all(self) -> None:
        """Keep every saved tensor of this call until backward."""
        if len(self.cells) < len(self.references):
            self.end()
        for cell, tensor in zip(self.cells, self.tensors, strict=True):
            cell.keep(tensor)
        self.close()

    def close(self) -> None:
        """Release the tensors of this call of a region.

        Without this method, cells (the objects that autograd holds), tensors, autograd's graph and this object would form a
        reference cycle, which Python's garbage collector cannot free because it does not see into autograd.
        """
        self.cells = []
        self.tensors = []
        self.references = []


def unpack(cell: Cell) -> torch.Tensor:
    """The unpack hook: return the tensor that a cell (the object in autograd) keeps, or rebuild it with recorded ops."""
    restorer = cell.restorer
    value = cell.read() if restorer is None else restorer.restore(cell)
    return value if cell.shell is None else cell.show(value)


def restore(cell: Cell) -> torch.Tensor:
    """Return the saved tensor that belongs to a cell (the object in autograd). For a DTensor, return the local shard."""
    return cell.read() if cell.restorer is None else cell.restorer.restore(cell)


def modified_in_place(what: str, expected: int, found: int) -> SavedTensorModified:
    """Return the error to raise for a saved tensor that was written to in place.

    ``what`` describes the tensor, ``expected`` is its version counter in forward, and ``found`` its version counter now.
    Autograd raises such an error for the model without a plan too. The text of this error is Plimsoll's.
    """
    return SavedTensorModified(
        f"Backward needs {what}, but an in-place operation has modified it.",
        why=f"it is now at version {found}, but forward used version {expected}; gradients would be wrong even without a plan",
        next="replace the in-place operation (x += y becomes x = x + y), or step the optimizer after backward",
    )
