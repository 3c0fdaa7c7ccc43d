"""What autograd holds instead of a saved tensor: a cell that keeps it, or a cell that knows how to get it back.

Cells own memory by plain references, so Python's reference counts free what nothing needs. A kept cell owns its tensor
(as an alias: packing the very output of a node would make a cycle). A dropped cell owns the kept cells that its recipe
reads, through any number of ops, and no more; when autograd lets go of it, they go with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from plimsoll.errors import SavedTensorModified
from plimsoll.tracing.local_tensors import Shell

if TYPE_CHECKING:
    from plimsoll.engine.frame import Frame
    from plimsoll.engine.split_backward import Between


class Readable(Protocol):
    """Something that a recipe can start from."""

    def read(self) -> torch.Tensor: ...


class Cell:
    """One saved tensor of one call of a region.

    A cell is *open* while the region runs (it holds nothing; the frame holds the tensors), then *kept* (``tensor``
    and ``version`` are set) or *dropped* (``leaves`` and ``sample`` are set). ``between`` is what ``halves`` knows of a
    dropped cell whose backward runs in two halves. Of a DTensor it is the local shard that a cell is about; ``shell`` is what
    the DTensor is besides (``None`` for other tensors), and its version counts as well.
    """

    __slots__ = ("__weakref__", "between", "frame", "index", "leaves", "sample", "shell", "tensor", "version")

    frame: Frame | None
    index: int
    tensor: torch.Tensor | None
    version: int
    leaves: tuple[Readable, ...]
    sample: torch.Tensor | None
    between: Between | None
    shell: Shell | None

    def __init__(self, frame: Frame, index: int, version: int, shell: Shell | None = None) -> None:
        self.frame = frame
        self.shell = shell
        self.index = index
        self.tensor = None
        self.version = version

    def keep(self, tensor: torch.Tensor) -> None:
        """Hold the tensor, aliased; ``version`` stays the one that it had when autograd saved it."""
        self.tensor = tensor.detach()
        self.frame = None
        if self.shell is not None:
            self.shell.keep()

    def drop(self, leaves: tuple[Readable, ...]) -> None:
        """Hold only what the recipe starts from."""
        self.leaves = leaves
        self.sample = None
        self.between = None
        if self.shell is not None:
            self.shell.let_go()

    def version_now(self, tensor: torch.Tensor) -> int:
        """The version of a saved tensor (a DTensor's local shard) that is still held."""
        return tensor._version if self.shell is None else tensor._version + self.shell.version

    def show(self, value: torch.Tensor) -> torch.Tensor:
        """What autograd gets to see of a value: a DTensor where it saved one."""
        shell = self.shell
        if shell is None:
            return value
        return shell.around(value) if shell.outer is None else shell.outer

    def read(self) -> torch.Tensor:
        """The kept tensor.

        Raises:
            SavedTensorModified: it was written in place since it was saved.
        """
        tensor = self.tensor
        assert tensor is not None, "only kept cells are read by recipes"
        found = self.version_now(tensor)
        if found != self.version:
            raise modified_in_place(f"a saved tensor of shape {tuple(tensor.shape)}", self.version, found)
        return tensor


class Copy:
    """A private copy of an input that autograd does not protect (nobody saved it, so anybody may write to it)."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def read(self) -> torch.Tensor:
        return self.tensor


def modified_in_place(what: str, expected: int, found: int) -> SavedTensorModified:
    """The error that autograd raises for the unmanaged model, in our words."""
    return SavedTensorModified(
        f"Backward needs {what}, but an in-place operation has modified it.",
        why=f"it is at version {found}, forward used version {expected}; gradients would be wrong, with or without a plan",
        next="replace the in-place operation (x += y becomes x = x + y), or step the optimizer after backward",
    )
