"""Describe a torch call so that it can be recognised later: its function, its host arguments, and its tensors.

Host arguments are compared by type and value, never by hash alone (``1 == 1.0 == True``). Tensors are compared by identity
through weak references, so the description does not keep tensors alive.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from plimsoll.errors import InvalidModel
from plimsoll.tracing.recorder.storages import is_plain
from plimsoll.tracing.torch_internals import FUNCTION_SPACES, TensorBase, without_torch_function

Number = int | float

TensorRef = Callable[[], torch.Tensor | None]
"""A weak reference to a tensor, or a function that returns ``None`` in place of a missing tensor."""


class References(list[TensorRef]):
    """A list of weak references to the tensors that a call has met so far. A tensor's index is its number in recorded torch
    calls.

    ``numbers`` maps the index of a placeholder in the recording (for a number that changes from call to call) to the number
    that this call passes to torch.
    """

    __slots__ = ("numbers",)

    def __init__(self, references: Iterable[TensorRef] = ()) -> None:
        super().__init__(references)
        self.numbers: dict[int, Number] = {}


_MADE_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer})
"""Functions that make a tensor from data of the host, which is their first argument.

The tensor that they make counts as a tensor from outside: its contents may differ.
"""
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
"""The path prefix of torch's own source files."""
_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_BY_VALUE = frozenset({bool, int, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device})


@dataclass(frozen=True, slots=True)
class Unknown:
    """A placeholder for a number in a recording that changes from call to call. In a later call, the number follows from the
    call's input sizes or arguments.

    ``index`` is its position among all placeholders of the recording. ``is_positive`` says whether all recorded values of this
    number are positive.
    """

    index: int
    is_positive: bool = True


@dataclass(frozen=True, slots=True)
class Constant:
    """Data: an argument of a torch call that is not a tensor, as its type and value.

    Numbers other than integers are stored as text, which distinguishes ``-0.0`` from ``0.0``; NaN equals NaN. A number may be
    `Unknown`.
    """

    kind: type
    value: Any


@dataclass(frozen=True, slots=True)
class Several:
    """Data: an argument of a torch call that is a container, as its type and items. A slice counts as a container of its three
    parts.
    """

    kind: type
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Outsider:
    """Data: an argument of a torch call that is a tensor from outside of the region (a module that the plan decides about). It
    is neither a parameter nor an input, and no earlier call of the region made or used it.

    ``looks`` has the properties (shape, dtype and the like) that a later tensor in this place must have.
    """

    looks: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TorchCall:
    """Data: one recorded torch call. An argument is the number of a known tensor, or an instance of `Constant`, `Several` or
    `Outsider`.

    ``made`` is the number of tensors that the call returned. If they were made from data, ``made`` describes them instead.
    ``reads`` are the numbers that the call read from tensors on its own (the index of ``table[index]``): each as a pair of the
    tensor's number and its value. ``lies`` are the geometries of the results, if they may depend on the contents of tensors.
    ``results`` are the geometries of all results. They are not compared: they follow from everything else.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    made: Any
    reads: tuple[tuple[int, Constant], ...] = ()
    lies: tuple[Several, ...] = ()
    results: tuple[Several, ...] = field(default=(), compare=False)


Stream = tuple[TorchCall, ...]


_BUILTINS = tuple(dict(vars(space)) for space in FUNCTION_SPACES)
"""Torch's functions by name, for each namespace. They are read when Plimsoll is imported."""


def unreplaced(func: Any) -> Any:
    """Return torch's own function if ``func`` is the user's replacement of it (a patched ``torch.Tensor.tanh``), else ``func``.

    Under a function mode, torch looks up the called function by its name and finds the replacement. The replacement is running
    already, and would run a second time.

    Raises:
        InvalidModel: the function was replaced before Plimsoll was imported.
    """
    if type(func) is not FunctionType or func.__code__.co_filename.startswith(_TORCH):
        return func
    for name, found in vars(torch.Tensor).items():
        if found is func:
            return getattr(TensorBase, name, func)
    for space, known in zip(FUNCTION_SPACES, _BUILTINS, strict=True):
        for name, found in vars(space).items():
            if found is func and known.get(name) is func:
                raise InvalidModel(
                    f"{space.__name__}.{name} was replaced before Plimsoll was imported.",
                    why="Plimsoll watches torch calls in a TorchFunctionMode, where torch calls a replacement twice",
                    next="import plimsoll first, then replace the function",
                )
            if found is func:
                return known.get(name, func)
    return func


def is_made_from_data(func: Any) -> bool:
    """Return whether the function's first argument may be data of the host (a number, a list, an array)."""
    return func in _MADE_FROM_DATA


def comparable(value: Any) -> Any:
    """Return a stand-in for a value of the host that can be compared with ``==``. Two stand-ins of one type are equal if and
    only if the values count as the same.
    """
    kind = type(value)
    if kind in _BY_VALUE:
        return value
    if kind is torch.Generator:
        return value.device  # random numbers drawn from it are kept, so it may be another object in every call
    if kind is float or isinstance(value, numbers.Number):
        return repr(value)
    return _Same(value)


class _Same:
    """A wrapper that is equal only to a wrapper of the very same object."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def number_in(tensor: torch.Tensor | None) -> Any:
    """Return the number in a tensor with one element, or ``None`` if the tensor no longer exists. ``ref`` is a weak reference
    to it.
    """
    if tensor is None:
        return None
    with without_torch_function():
        return tensor.item()


def geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the sizes, the strides and the storage offset of a tensor, in elements. A sparse tensor has only sizes."""
    if type(tensor) not in _PLAIN:  # reading a tensor of the user's type calls the user's code
        with without_torch_function():
            return _geometry(tensor)
    return _geometry(tensor)


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    if not is_plain(tensor):
        return tuple(tensor.shape), (), 0
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def described_geometry(tensor: torch.Tensor) -> Several:
    """Return the sizes, strides and offset of a tensor, recorded like arguments of torch calls.

    Numbers in it that change from call to call can become placeholders.
    """
    sizes, strides, offset = geometry(tensor)
    parts = [Several(tuple, tuple([Constant(int, number) for number in numbers])) for numbers in (sizes, strides)]
    return Several(tuple, (*parts, Constant(int, offset)))


def looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties that a tensor must share with the recorded tensor: type, shape, strides, dtype, device,
    requires_grad. The contents may differ.
    """
    if type(tensor) not in _PLAIN:  # reading a tensor of the user's type calls the user's code
        with without_torch_function():
            return _looks(tensor)
    return _looks(tensor)


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    stride = tensor.stride() if is_plain(tensor) else ()
    is_parameter = isinstance(tensor, nn.Parameter)
    return (type(tensor), is_parameter, tensor.shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)
