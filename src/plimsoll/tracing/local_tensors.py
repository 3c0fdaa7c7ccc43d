"""The tensors of this process behind tensors that are spread over ranks: a DTensor's local shard, what a collective fills.

A ``DTensor`` has no memory of its own: it is a local tensor and the note that says which part of a global one that is. An
``AsyncCollectiveTensor`` is a tensor whose contents are still on their way. Everything that Plimsoll decides is decided on
the local tensor; ``Shell`` keeps the note and puts it around the local tensor again.

Known weakness: torch does not bump any version counter when a multi-tensor or fused optimizer writes to DTensors (2.13), so
such a write between forward and backward goes unnoticed here as it does without Plimsoll; the sentinels may still see it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from plimsoll.tracing.torch_internals import without_modes

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""Types whose tensors hold their own memory. Nearly all tensors are of these, so they are checked first."""
_DEEPEST_STATE = 2
"""A weight's scales may have scales of their own (double quantisation)."""
_SHARDED = ("torch.distributed.tensor", "DTensor")
_PENDING = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
"""Modules and names of the two types. Importing them takes a second; where nobody did, no such tensor exists."""


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no memory of its own and stands for others."""
    return is_traceable_wrapper_subclass(tensor)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The plain tensors that hold the memory of ``tensor``: itself, a DTensor's local shard, a sparse one's indices and values.

    The storage of a wrapper has the size of the whole tensor and no memory, so bytes are counted, and bits compared, here.
    No collective runs and autograd sees nothing.

    Example:
        >>> [part.shape for part in dense_parts(torch.zeros(2, 3))]
        [torch.Size([2, 3])]
    """
    if tensor.layout is not torch.strided:
        return parts_of_sparse(tensor)
    if not is_wrapper(tensor):
        return (tensor,)
    wrapper: Any = tensor
    inside = (getattr(tensor, name) for name in wrapper.__tensor_flatten__()[0])
    return tuple(part for it in inside if isinstance(it, torch.Tensor) for part in dense_parts(it))


def beside_weights(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where tensors are that frozen weights keep beside themselves, as the scales and code books of bitsandbytes' 4-bit ones.
    From their first forward on its 8-bit ones have theirs in their module's ``state``.

    Each by the weight's name and its own, the dictionary that holds it, and its key there.
    """
    for name, parameter in module.named_parameters():
        if not (parameter.requires_grad or is_wrapper(parameter)):
            yield from _tensors_in(name, vars(parameter), _DEEPEST_STATE)
    for name, part in module.named_modules():
        if type(state := vars(part).get("state")).__name__ == "MatmulLtState" and not state.has_fp16_weights:
            yield from _tensors_in(f"{name}.state".lstrip("."), vars(state), 0)


def _tensors_in(name: str, holder: dict[str, Any], depth: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    for key, value in holder.items():
        if isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and value.layout is torch.strided:
                yield f"{name}.{key}", holder, key
        elif depth and type(value).__dictoffset__ and not isinstance(value, nn.Module | type):
            yield from _tensors_in(f"{name}.{key}", vars(value), depth - 1)


def densified(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a dense copy of a sparse one."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The indices and values of a sparse tensor; of any other tensor, also of one in a library's own layout (MKL-DNN), none."""
    if tensor.layout is torch.strided:
        return ()
    with without_modes(), torch.no_grad():
        if tensor.layout is torch.sparse_coo:  # indices() and values() refuse what is not coalesced yet
            return torch.ops.aten._indices(tensor), torch.ops.aten._values(tensor)
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that this process holds of ``tensor``."""
    return sum(part.numel() * part.element_size() for part in dense_parts(tensor))


def is_sharded(tensor: Any) -> bool:
    """Whether it is a ``DTensor``."""
    return type(tensor) not in _PLAIN and isinstance(tensor, _loaded(_SHARDED))


def is_pending(tensor: Any) -> bool:
    """Whether it stands for what a collective is still filling."""
    return type(tensor) not in _PLAIN and isinstance(tensor, _loaded(_PENDING))


def dispatches_itself(kinds: Any) -> bool:
    """Whether tensors of these types turn their ops into ops on local tensors and collectives."""
    return any(kind not in _PLAIN and issubclass(kind, (*_loaded(_SHARDED), *_loaded(_PENDING))) for kind in kinds)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of this process, without waiting for its contents; a plain tensor is its own."""
    if type(tensor) in _PLAIN:
        return tensor
    inner: Any = tensor
    if is_sharded(tensor):
        return local_of(inner._local_tensor)
    return local_of(inner.elem) if is_pending(tensor) else tensor


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of this process, with its contents in place."""
    if type(tensor) in _PLAIN:
        return tensor
    inner: Any = tensor
    if is_sharded(tensor):
        return settled(inner._local_tensor)
    return settled(inner.trigger_wait()) if is_pending(tensor) else tensor


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place: through itself, or through the local tensor inside it.

    Writes through a DTensor count at the DTensor alone, writes to its local tensor at that alone.
    """
    local = local_of(tensor)
    return tensor._version if local is tensor else tensor._version + local._version


def unwrapped(tensor: torch.Tensor) -> tuple[torch.Tensor, Shell | None]:
    """The tensor of this process with its contents in place, and what a DTensor is besides."""
    return settled(tensor), Shell(tensor) if is_sharded(tensor) else None


class Shell:
    """What a DTensor is besides its local tensor: device mesh, placements, global shape and strides.

    The DTensor is held until ``keep`` or ``let_go``, so that its version can be read.
    """

    __slots__ = ("_kind", "layout", "outer")

    def __init__(self, tensor: torch.Tensor) -> None:
        inner: Any = tensor
        self._kind = type(tensor)
        self.layout = inner._spec
        """Mesh, placements, global shape and strides: hashable, and equal for tensors that lie alike."""
        self.outer: torch.Tensor | None = tensor
        """The DTensor as it was, while it is held."""

    @property
    def version(self) -> int:
        """How often it was written through the DTensor; 0 once it is let go."""
        return 0 if self.outer is None else self.outer._version

    def keep(self) -> None:
        """Hold an alias, which shares the version but not the graph."""
        if self.outer is not None:
            self.outer = self.outer.detach()

    def let_go(self) -> None:
        """Hold nothing but the note."""
        self.outer = None

    def around(self, local: torch.Tensor) -> torch.Tensor:
        """The DTensor of which ``local`` is this process's part."""
        make: Any = self._kind
        dressed: torch.Tensor = make(local, self.layout, requires_grad=False)
        return dressed


def layout_of(tensor: torch.Tensor) -> str:
    """`` (Shard(dim=0),) on (2, 4)``: how a DTensor lies on its mesh, the same on every rank; empty for others."""
    inner: Any = tensor
    return f" {inner.placements} on {tuple(inner.device_mesh.shape)}" if is_sharded(tensor) else ""


def layout_key(tensor: torch.Tensor) -> Any:
    """Something hashable that says how a DTensor lies: mesh, placements, global shape and strides; ``None`` for others."""
    inner: Any = tensor
    return inner._spec if is_sharded(tensor) else None


def _loaded(place: tuple[str, str]) -> tuple[type, ...]:
    """The type, if anybody has imported it."""
    module = sys.modules.get(place[0])
    found = None if module is None else module.__dict__.get(place[1])
    return () if found is None else (found,)
