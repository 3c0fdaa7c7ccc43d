"""A call of a region in, a hashable key out: calls with equal keys are expected to run the same ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plimsoll.tracing.local_tensors import is_pending, is_sharded, layout_key, local_of

_SCALARS = (bool, int, float, complex, str)


class SignatureReader:
    """Reads everything on the host that may change what a module does: its inputs, its scalars, the modes around it."""

    def __init__(self, module: nn.Module, device_type: str) -> None:
        self._module = module
        self._device_type = device_type
        self._generation = 0
        self._scan()

    def _scan(self) -> None:
        """Find what is read in every call. Done again when submodules were replaced, which makes a new generation."""
        module = self._module
        self._generation += 1
        self._children = [
            (inner._modules, tuple(inner._modules.values())) for inner in module.modules() if inner._modules
        ]
        self._scalars = [
            (inner.__dict__, name)
            for inner in module.modules()
            for name, value in inner.__dict__.items()
            if isinstance(value, _SCALARS)
        ]
        self._parameters = [
            (inner._parameters, name)
            for inner in module.modules()
            for name, p in inner._parameters.items()
            if p is not None
        ]
        first: dict[int, tuple[dict[str, Any], str]] = {}
        self._ties = []
        for holder, name in self._parameters:
            parameter = holder[name]
            assert parameter is not None
            twin = first.setdefault(local_of(parameter).untyped_storage()._cdata, (holder, name))
            if twin[0] is not holder or twin[1] != name:
                self._ties.append((*twin, holder, name))

    def scalars(self) -> tuple[Any, ...]:
        """The scalar attributes of the region's modules, as they are now."""
        return tuple([holder.get(name) for holder, name in self._scalars])

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The key of a call that is about to be made."""
        bases: list[int] = []
        for modules, children in self._children:
            if tuple(modules.values()) != children:
                self._scan()
                break
        return (
            self._generation,
            tuple([describe(value, bases) for value in args]),
            tuple([(name, describe(value, bases)) for name, value in kwargs.items()]),
            None if len(set(bases)) == len(bases) else tuple(map(bases.index, bases)),
            self.scalars(),
            tuple([(p := holder.get(name)) is not None and p.requires_grad for holder, name in self._parameters]),
            tuple([_share_memory(one.get(a), other.get(b)) for one, a, other, b in self._ties]),
            torch.is_autocast_enabled(self._device_type) and torch.get_autocast_dtype(self._device_type),
        )


def is_transparent(value: Any) -> bool:
    """Whether an argument is made of tensors, scalars and plain containers: nothing that a call could write to unseen."""
    if isinstance(value, tuple | list):
        return all(map(is_transparent, value))
    if isinstance(value, dict):
        return all(map(is_transparent, value.values()))
    return value is None or isinstance(value, (torch.Tensor, *_SCALARS))


def _share_memory(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    return bool(local_of(one).untyped_storage()._cdata == local_of(other).untyped_storage()._cdata)


def describe(value: Any, bases: list[int]) -> Any:
    """Something hashable that stands for an argument: how a tensor lies, what a scalar is, of which type an object is.

    The address at which each tensor's storage starts is added to ``bases``: all of them live, so equal addresses mean that
    two arguments share memory, which decides what a recipe may start from.
    """
    if isinstance(value, torch.Tensor):
        kind = type(value)
        if is_sharded(value):
            return (kind, layout_key(value), value.requires_grad, describe(local_of(value).detach(), bases))
        if is_pending(value):
            return (kind, value.requires_grad, describe(local_of(value), bases))
        if value.layout is not torch.strided or (kind is not torch.Tensor and kind is not nn.Parameter):
            bases.append(id(value))
            return (kind, value.layout, value.shape, value.dtype, value.requires_grad, value.device)
        offset = value.storage_offset()
        bases.append(int(value.data_ptr() - offset * value.element_size()))
        lazy = value.is_neg() or value.is_conj()
        return (value.shape, value.dtype, value.stride(), offset, value.requires_grad, value.device, lazy)
    if value is None or isinstance(value, _SCALARS):
        return (type(value), value)
    if isinstance(value, tuple | list):
        return (type(value), *[describe(item, bases) for item in value])
    if isinstance(value, dict):
        return (dict, *[(str(name), describe(item, bases)) for name, item in value.items()])
    return type(value)
