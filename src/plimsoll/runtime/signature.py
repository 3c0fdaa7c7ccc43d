"""A call of a region in, a hashable key out: calls with equal keys are expected to run the same ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SCALARS = (bool, int, float, complex, str)


class SignatureReader:
    """Reads everything on the host that may change what a module does: its inputs, its scalars, the modes around it."""

    def __init__(self, module: nn.Module, device_type: str) -> None:
        self._device_type = device_type
        self._scalars = [
            (inner.__dict__, name)
            for inner in module.modules()
            for name, value in inner.__dict__.items()
            if isinstance(value, _SCALARS)
        ]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The key of a call that is about to be made."""
        return (
            tuple(map(describe, args)),
            tuple((name, describe(value)) for name, value in kwargs.items()),
            tuple([holder.get(name) for holder, name in self._scalars]),
            torch.is_autocast_enabled(self._device_type) and torch.get_autocast_dtype(self._device_type),
        )


def describe(value: Any) -> Any:
    """Something hashable that stands for an argument: how a tensor lies, what a scalar is, of which type an object is."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.stride(), value.requires_grad, value.device)
    if value is None or isinstance(value, _SCALARS):
        return (type(value), value)
    if isinstance(value, tuple | list):
        return (type(value), *map(describe, value))
    if isinstance(value, dict):
        return (dict, *((str(name), describe(item)) for name, item in value.items()))
    return type(value)
