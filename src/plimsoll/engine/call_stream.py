"""Tells whether a call of a region makes the same torch calls as one that was recorded, before anything is dropped.

Recipes bake in what forward's Python code decided: constants, slices, which weight is used, whether a layer is skipped. All of
that reaches torch as arguments of its functions. So a `TorchFunctionMode` compares every torch call in a region with the
recorded *stream* of calls: the function, its host arguments, and for each tensor which earlier call made it, or which
parameter or input it is. Where the state of the host has changed, a call differs, and the region keeps everything.

Host arguments are compared by type and value, never by hash alone (``1 == 1.0 == True``). Tensors are compared by identity
through weak references, so nothing lives longer than it would. A tensor from outside that is neither parameter nor input
must look like the recorded one; its contents are this call's own. What torch calls cannot show (constants inside a C++
extension, data that numpy changed) is left to the samples and inspections.
"""

from __future__ import annotations

import inspect
import numbers
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode, resolve_name

from plimsoll.tracing.recorder.calling import flat_tensors
from plimsoll.tracing.recorder.storages import is_plain

_Tensor, _ref = torch.Tensor, weakref.ref
"""Short ways to what every torch call in a region needs."""

_NOT_THE_USERS = ("<", f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
"""How the names of files begin that hold code of torch, of ours, or that was generated."""

TensorRef = Callable[[], torch.Tensor | None]
"""A weak reference, or `nothing`."""

_ANSWERS = frozenset({bool, int, float, complex, str, torch.Size, torch.dtype, torch.device, torch.layout})
"""Types of results that leave no trace among tensors: calls that only ask something are not part of the stream."""
_MADE_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer})
"""Functions whose first argument is data: the tensor that they make comes from outside, whatever it holds."""
_MARKS = frozenset(
    {torch.ops.profiler._record_function_exit._RecordFunction, torch.ops.profiler._record_function_exit.default}
)
"""The ends of ``record_function``: they name what is between them in a profile, and touch no tensor."""
_BY_VALUE = frozenset({bool, int, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device})


@dataclass(frozen=True, slots=True)
class Constant:
    """A host argument. Numbers other than integers are held as text, which tells ``-0.0`` from ``0.0``; NaN equals NaN."""

    kind: type
    value: Any


@dataclass(frozen=True, slots=True)
class Several:
    """A container of arguments, or a slice as its three parts."""

    kind: type
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Outsider:
    """The first appearance of a tensor from outside that is neither parameter nor input."""

    looks: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TorchCall:
    """One call in a stream. An argument is the number of a known tensor, or one of the classes above.

    ``made`` says how many tensors it returned, or how they look where they come from data.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    made: Any

    @property
    def is_simple(self) -> bool:
        """Whether it is a function of known tensors alone that returned one tensor, as most calls are."""
        return self.made == 1 and not self.kwargs and all(type(number) is int for number in self.args)


Stream = tuple[TorchCall, ...]


@dataclass(slots=True)
class Junction:
    """A place in the tree of known streams: the calls that may come next, and what serves a call that ends here.

    Nearly all places have one call, of known tensors alone, behind them: its function, its arguments' numbers and the place
    after it stand here, for this look-up is in the way of every torch call.
    """

    branches: list[tuple[TorchCall, Junction]] = field(default_factory=list)
    program: Any = None
    func: Any = None
    numbers: tuple[int, ...] = ()
    after: Junction | None = None

    def add(self, stream: Stream, program: Any) -> None:
        """Make a stream known."""
        place = self
        for call in stream:
            following = next((after for known, after in place.branches if known == call), None)
            if following is None:
                following = Junction()
                place.branches.append((call, following))
                is_simple = len(place.branches) == 1 and call.is_simple
                place.func, place.numbers, place.after = (
                    (call.func, call.args, following) if is_simple else (None, (), None)
                )
            place = following
        place.program = program


def called(func: Any) -> str:
    """The name of a torch function, for messages."""
    return f"{resolve_name(func) or getattr(func, '__name__', func)}"


def _line_of_user() -> str:
    """Where the innermost frame is that is neither torch's nor ours."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def references(tensors: Iterable[torch.Tensor | None]) -> list[TensorRef]:
    """Numbers for tensors that are known before the call: their places in this list."""
    return [_nothing if tensor is None else _ref(tensor) for tensor in tensors]


class Alarm:
    """Says to all regions of one model that one was surprised: what changes there will soon change in its neighbours."""

    def __init__(self) -> None:
        self.count = 0
        """In how many steps some region was surprised."""
        self._is_raised = False

    def begin_step(self) -> None:
        self._is_raised = False

    def sound(self) -> None:
        """A region was surprised. Several in one step count as one."""
        self.count += not self._is_raised
        self._is_raised = True


class StreamGuard(TorchFunctionMode):
    """Follows a steady call through the tree of known streams. ``known`` are tensors that are there before the call."""

    def __init__(self, root: Junction, known: list[TensorRef]) -> None:
        self._known = known
        self._place: Junction | None = root
        self.stranger: Any = None
        """The function whose call was in none of the streams."""
        self.where = ""
        """The line of the user's code that called it."""

    @property
    def program(self) -> Any:
        """What serves this call; ``None`` if its stream is new."""
        return None if self._place is None else self._place.program

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_compiling():  # Dynamo would write where this call stands into the compiled code
            return func(*args, **(kwargs or {}))
        if kwargs:
            result = func(*args, **kwargs)
            self._follow(func, args, kwargs, result)
            return result
        result = func(*args)
        place = self._place
        if place is not None and place.func is func and isinstance(result, _Tensor) and len(args) == len(place.numbers):
            known = self._known
            for value, number in zip(args, place.numbers):  # noqa: B905 - their lengths are equal
                if known[number]() is not value or value is None:
                    break
            else:
                known.append(_ref(result))
                self._place = place.after
                return result
        self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, result: Any) -> None:
        """The same for calls of any kind."""
        place, known = self._place, self._known
        if place is None or type(result) in _ANSWERS:
            return
        for call, following in place.branches:
            length = len(known)
            if (func is call.func or func == call.func) and _fits_call(call, args, kwargs, result, known):
                self._place = following
                return
            del known[length:]
        if _leaves_a_trace(func, result):
            self._place, self.stranger, self.where = None, func, _line_of_user()


class StreamRecorder(TorchFunctionMode):
    """Writes down the stream of a call."""

    def __init__(self, known: list[TensorRef]) -> None:
        super().__init__()
        self._known = known
        self._numbers = {id(tensor): number for number, ref in enumerate(known) if (tensor := ref()) is not None}
        self._calls: list[TorchCall] = []
        self.is_within = False
        """Whether a torch call is under way: other operations come from code that nobody sees (TorchScript, extensions)."""

    @property
    def stream(self) -> Stream:
        """The calls so far."""
        return tuple(self._calls)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before, self.is_within = self.is_within, True
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.is_within = before
        if not _leaves_a_trace(func, result):
            return result
        is_data = func in _MADE_FROM_DATA and _is_data(args)
        described = tuple([self._describe(value) for value in args[is_data:]])
        named = tuple([(name, self._describe(value)) for name, value in (kwargs or {}).items()])
        made = flat_tensors(result)
        self._calls.append(TorchCall(func, described, named, _made(made, is_data=is_data)))
        for tensor in made:
            self._number(tensor)
        return result

    def _number(self, tensor: torch.Tensor) -> None:
        self._numbers[id(tensor)] = len(self._known)
        self._known.append(weakref.ref(tensor))

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self._numbers.get(id(value))
            if number is not None and self._known[number]() is value:
                return number
            self._number(value)
            return Outsider(_looks(value))
        if isinstance(value, tuple | list):
            return Several(type(value), tuple([self._describe(item) for item in value]))
        if isinstance(value, slice):
            return Several(slice, tuple([self._describe(item) for item in (value.start, value.stop, value.step)]))
        if isinstance(value, dict):
            return Several(dict, tuple([self._describe(item) for item in value.items()]))
        return Constant(type(value), _comparable(value))


def _fits_call(
    call: TorchCall, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, result: Any, known: list[TensorRef]
) -> bool:
    """Whether a call is the recorded one; the tensors that it makes, or shows for the first time, become known."""
    is_data = call.func in _MADE_FROM_DATA and _is_data(args)
    if is_data:
        args = args[1:]
    if len(args) != len(call.args) or len(kwargs or ()) != len(call.kwargs):
        return False
    for value, expected in zip(args, call.args, strict=True):
        if not _fits(value, expected, known):
            return False
    if kwargs:
        for (name, value), (expected_name, expected) in zip(kwargs.items(), call.kwargs, strict=True):
            if name != expected_name or not _fits(value, expected, known):
                return False
    if call.made == 1 and isinstance(result, torch.Tensor):
        known.append(weakref.ref(result))
        return True
    made = flat_tensors(result)
    known.extend([weakref.ref(tensor) for tensor in made])
    return bool(_made(made, is_data=is_data) == call.made)


def _fits(value: Any, expected: Any, known: list[TensorRef]) -> bool:
    if type(expected) is int:
        return value is not None and known[expected]() is value
    kind = type(value)
    if type(expected) is Constant:
        return kind is expected.kind and bool(_comparable(value) == expected.value)
    if type(expected) is Outsider:
        if not isinstance(value, torch.Tensor) or _looks(value) != expected.looks:
            return False
        known.append(weakref.ref(value))
        return True
    if kind is not expected.kind:
        return False
    items: Sequence[Any] = value
    if kind is slice:
        items = (value.start, value.stop, value.step)
    elif kind is dict:
        items = tuple(value.items())
    return len(items) == len(expected.items) and all(
        _fits(item, wanted, known) for item, wanted in zip(items, expected.items, strict=True)
    )


def _is_data(args: tuple[Any, ...]) -> bool:
    return bool(args) and not isinstance(args[0], torch.Tensor)


def _comparable(value: Any) -> Any:
    """Something whose ``==`` says that two host values of one type are the same."""
    kind = type(value)
    if kind in _BY_VALUE:
        return value
    if kind is float or isinstance(value, numbers.Number):
        return repr(value)
    return _Same(value)


class _Same:
    """Equal to itself around the very same object."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _leaves_a_trace(func: Any, result: Any) -> bool:
    """Whether a call may have made or changed a tensor: it returned one, or nothing at all, as a profiler's marks do too."""
    if isinstance(result, torch.Tensor):
        return True
    if result is None:
        return func not in _MARKS
    return type(result) not in _ANSWERS and bool(flat_tensors(result))


def _made(tensors: Sequence[torch.Tensor], *, is_data: bool) -> Any:
    return tuple([_looks(tensor) for tensor in tensors]) if is_data else len(tensors)


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What recipes rely on in a tensor whose contents may be others in every call."""
    stride = tensor.stride() if is_plain(tensor) else ()
    is_parameter = isinstance(tensor, nn.Parameter)
    return (type(tensor), is_parameter, tensor.shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)


def _nothing() -> None:
    """Stands for a parameter that is not there."""
