"""Functions that find this process's tensor behind a distributed tensor: a DTensor's local shard, or the buffer that a
collective fills.

A ``DTensor`` does not hold memory itself. It is a local tensor plus the layout, which says which part of a global tensor the
local tensor is. An ``AsyncCollectiveTensor`` is a tensor whose contents have not arrived yet. Plimsoll decides everything on
the local tensor. ``Shell`` keeps the layout and wraps the local tensor in it again.

Known weakness: torch does not bump any version counter when a multi-tensor or fused optimizer writes to DTensors (2.13). Such a
write between forward and backward goes unnoticed here, as it does without Plimsoll. The sentinels (samples of dropped tensors)
may still notice it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from plimsoll.tracing.stepped_gradients import SteppedGradient
from plimsoll.tracing.torch_internals import without_modes

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""Types whose tensors hold their own memory. Nearly all tensors are of these types, so these types are checked first."""
_DEEPEST_STATE = 2
"""The number of levels of attributes to search: a weight's scales may have scales of their own (double quantisation)."""
_SHARDED = ("torch.distributed.tensor", "DTensor")
_PENDING = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
"""The module and the name of ``AsyncCollectiveTensor``; the constant above is the same for ``DTensor``.

Neither type is imported here, because that takes a second. If its module is not imported, such tensors do not exist.
"""


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return True if the tensor only wraps other tensors, which hold the memory."""
    return is_traceable_wrapper_subclass(tensor)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the plain tensors that hold the memory of ``tensor``.

    They are the tensor itself, a DTensor's local shard, or a sparse tensor's indices and values. The storage of a wrapper has
    the size of the whole tensor but does not have memory, so bytes must be counted, and bits compared, on these parts. The
    function does not run a collective, and autograd does not record it.

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


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter, or ``None`` if it does not have one, or if backward has used and freed it.

    In ``torch.func.functional_call`` a module's parameters may be results of other tensors (fast weights). Torch warns when
    their ``grad`` is read, and they do not have a gradient unless ``retain_grad`` was called.
    """
    gradient = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    return None if isinstance(gradient, SteppedGradient) else gradient


def beside_weights(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the tensors that frozen weights keep as attributes, such as the scales and code books of bitsandbytes' 4-bit
    weights.

    The 8-bit weights of bitsandbytes keep such tensors in their module's ``state`` from the first forward on. Each tensor is
    given by a name (made of the weight's name and the attribute's name), the dictionary that holds the tensor, and the key in
    the dictionary.
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
    """Return the tensor itself if it is dense, else a dense copy of it."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a dense tensor of real numbers. A complex tensor gets a last dimension: real and imaginary part."""
    dense = densified(tensor)
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the indices and values of a sparse tensor.

    For any other tensor return an empty tuple, even if the tensor has a library's own layout (MKL-DNN).
    """
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
    """Return the size in bytes of those elements of ``tensor`` that this process holds."""
    return sum(part.numel() * part.element_size() for part in dense_parts(tensor))


def is_sharded(tensor: Any) -> bool:
    """Return True if the tensor is a ``DTensor``."""
    return type(tensor) not in _PLAIN and isinstance(tensor, _loaded(_SHARDED))


def is_pending(tensor: Any) -> bool:
    """Return True if a collective is still filling the tensor."""
    return type(tensor) not in _PLAIN and isinstance(tensor, _loaded(_PENDING))


def dispatches_itself(kinds: Any) -> bool:
    """Return True if one of these tensor types turns its ops into ops on local tensors and collectives: a DTensor, or a tensor
    that a collective fills.
    """
    return any(kind not in _PLAIN and issubclass(kind, (*_loaded(_SHARDED), *_loaded(_PENDING))) for kind in kinds)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's tensor behind a distributed tensor, without waiting for its contents. For a plain tensor, return
    the tensor itself.
    """
    if type(tensor) in _PLAIN:
        return tensor
    inner: Any = tensor
    if is_sharded(tensor):
        return local_of(inner._local_tensor)
    return local_of(inner.elem) if is_pending(tensor) else tensor


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a tensor's contents have arrived, and return this process's tensor behind it: a DTensor's local shard, or a
    plain tensor itself.
    """
    if type(tensor) in _PLAIN:
        return tensor
    inner: Any = tensor
    if is_sharded(tensor):
        return settled(inner._local_tensor)
    return settled(inner.trigger_wait()) if is_pending(tensor) else tensor


def version_of(tensor: torch.Tensor) -> int:
    """Return how often the tensor was written in place, through itself or through its local tensor.

    A write through a DTensor increases only the DTensor's version. A write to its local tensor increases only the local
    tensor's version.

    For a tensor that was made under ``torch.inference_mode``, return 0: torch does not count writes to it, and refuses them
    outside of that mode.
    """
    local = local_of(tensor)
    if local.is_inference():
        return 0
    return tensor._version if local is tensor else tensor._version + local._version


def unwrapped(tensor: torch.Tensor) -> tuple[torch.Tensor, Shell | None]:
    """Return this process's tensor after its contents have arrived, and for a DTensor its `Shell` (otherwise ``None``)."""
    return settled(tensor), Shell(tensor) if is_sharded(tensor) else None


class Shell:
    """Holds the parts of a DTensor other than its local tensor: device mesh, placements, global shape and strides. `around`
    makes a DTensor from this again.

    The DTensor itself is held until `let_go`, so that its version can be read. `keep` replaces it by an alias.
    """

    __slots__ = ("_kind", "layout", "outer")

    def __init__(self, tensor: torch.Tensor) -> None:
        inner: Any = tensor
        self._kind = type(tensor)
        self.layout = inner._spec
        """The mesh, placements, global shape and strides.

        The object is hashable, and equal for tensors with the same layout.
        """
        self.outer: torch.Tensor | None = tensor
        """The original DTensor or an alias of it; ``None`` after `let_go`."""

    @property
    def version(self) -> int:
        """The number of writes to the DTensor so far. After `let_go` it is 0."""
        return 0 if self.outer is None else self.outer._version

    def keep(self) -> None:
        """Hold, instead of the DTensor, an alias that shares the version counter but not the autograd graph."""
        if self.outer is not None:
            self.outer = self.outer.detach()

    def let_go(self) -> None:
        """Stop holding the DTensor, and hold only its layout."""
        self.outer = None

    def around(self, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor with this layout whose local part is ``local``."""
        make: Any = self._kind
        dressed: torch.Tensor = make(local, self.layout, requires_grad=False)
        return dressed


def layout_of(tensor: torch.Tensor) -> str:
    """Return a DTensor's layout as text, such as `` (Shard(dim=0),) on (2, 4)``. The text is equal on all ranks.

    For other tensors return "".
    """
    inner: Any = tensor
    return f" {inner.placements} on {tuple(inner.device_mesh.shape)}" if is_sharded(tensor) else ""


def layout_key(tensor: torch.Tensor) -> Any:
    """Return the layout of a DTensor as a hashable object: mesh, placements, global shape and strides. Return ``None`` for
    other tensors.
    """
    inner: Any = tensor
    return inner._spec if is_sharded(tensor) else None


def _loaded(place: tuple[str, str]) -> tuple[type, ...]:
    """Return a tuple with the type of this module and name, or an empty tuple if the module was not imported yet."""
    module = sys.modules.get(place[0])
    found = None if module is None else module.__dict__.get(place[1])
    return () if found is None else (found,)
