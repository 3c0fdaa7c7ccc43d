"""Compile a recorded sequence of torch calls (a stream) into Python functions that recognise the same calls later.

Every torch call of a region (a module that the plan decides about) is compared with the recorded one, so each small op has to
wait for the comparison. Walking the description of a call took about 6 µs; straight-line code for one particular call takes
about 1 µs. The source depends only on the structure of the stream, and its constants are bound by name. So blocks with equal
structure share one compilation. The same block at another batch size shares it too.

Call a function as ``matches(args, kwargs, result, known)`` after the torch call has returned. If it returns True, it has
appended the tensors that the call made, or showed for the first time, to ``known``. If the stream has a placeholder for a
number, the call's number is then in ``known.numbers``.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch

from plimsoll.engine.open_numbers import has_unknown, may_stand
from plimsoll.engine.torch_calls import (
    Constant,
    References,
    Several,
    Stream,
    TorchCall,
    Unknown,
    comparable,
    geometry,
    is_made_from_data,
    looks,
    number_in,
)
from plimsoll.tracing.recorder.calling import flat_tensors

Matches = Callable[[tuple[Any, ...], Mapping[str, Any] | None, Any, References], bool]

_BY_EQUALITY = (int, str, bytes, torch.device)
"""Types whose values are equal if ``==`` says so and their types are the same.

Subclasses do not count: ``1 == True == 1.0``.
"""
_SINGLETONS = (bool, type(None), type(Ellipsis), torch.dtype, torch.layout)
"""Types that have exactly one object for each value, so that values can be compared with ``is``."""


def compile_stream(stream: Stream) -> tuple[Matches, ...]:
    """Return, for each torch call of a recorded stream, a function that recognises the same call later (see the module's
    docstring for its arguments).
    """
    writer = _Writer()
    for index, call in enumerate(stream):
        writer.call(index, call)
    namespace: dict[str, Any] = {
        "Tensor": torch.Tensor,
        "comparable": comparable,
        "flat_tensors": flat_tensors,
        "geometry": geometry,
        "looks": looks,
        "may_stand": may_stand,
        "number_in": number_in,
        "ref": weakref.ref,
        **writer.constants,
    }
    exec(_compiled("\n".join(writer.lines)), namespace)
    return tuple([namespace[f"call_{index}"] for index in range(len(stream))])


@functools.lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    return compile(source, "<plimsoll stream>", "exec")


class _Writer:
    """Writes the Python source of functions that recognise recorded torch calls. Nothing from the user reaches the source.

    The user's values (arguments of calls) are bound to names as constants.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self._given: set[int] = set()
        """Indices of the placeholders (for numbers that change from call to call) that have already occurred in an earlier call
        or an earlier argument.
        """
        self._is_open = False
        """Whether the torch call that is being written has a placeholder for a changing number among its arguments."""
        self._locals = 0
        self._undo = ""
        """Source code that removes what the function has appended to ``known``.

        The function runs it before it returns False.
        """

    def call(self, index: int, call: TorchCall) -> None:
        """Write the function that recognises one torch call: it checks the arguments, the keyword arguments and the result."""
        self._locals, self._undo, self._is_open = 0, "", False
        self._emit(f"def call_{index}(args, kwargs, result, known):", 0)
        is_data = isinstance(call.made, tuple)
        if is_data:
            self._fail_if("not args or isinstance(args[0], Tensor)")
            # the data itself may differ: the tensor made from it counts as a tensor from outside
            self._emit("args = args[1:]")
        elif is_made_from_data(call.func):
            self._fail_if("args and not isinstance(args[0], Tensor)")
        self._fail_if(f"len(args) != {len(call.args)}")
        self._unpack("args", call.args)
        if call.kwargs:
            self._fail_if(f"not kwargs or tuple(kwargs) != {self._constant(tuple(name for name, _ in call.kwargs))}")
            self._unpack("kwargs.values()", tuple(value for _, value in call.kwargs))
        else:
            self._fail_if("kwargs")
        for tensor, number in call.reads:
            name = self._local()
            self._emit(f"{name} = number_in(known[{tensor}]())")
            self._check_constant(name, number)
        # A number may determine a size inside of torch, as in torch.arange.
        if call.lies or self._is_open or any(map(has_unknown, call.results)):
            name = self._local()
            self._emit(f"{name} = tuple([geometry(tensor) for tensor in flat_tensors(result)])")
            self._check(name, Several(tuple, call.results))
        self._check_result(call.made)
        self._emit("return True")

    def _check_result(self, made: int | tuple[Any, ...]) -> None:
        """Write source code that compares the result of the torch call with the recorded result, and appends references to its
        tensors to ``known``.
        """
        if made == 0:
            self._fail_if("result is not None")
        elif made == 1:  # nearly every call
            # A tuple of one tensor counts as well: `x.split(n)` of one part, `torch.where(mask)` of one dimension.
            self._emit("made = (result,) if isinstance(result, Tensor) else flat_tensors(result)")
            self._fail_if("len(made) != 1")
            self._emit("known.append(ref(made[0]))")
        else:
            self._emit("made = flat_tensors(result)")
            if isinstance(made, tuple):
                self._fail_if(f"tuple([looks(tensor) for tensor in made]) != {self._constant(made)}")
            else:
                self._fail_if(f"len(made) != {made}")
            self._emit("known.extend([ref(tensor) for tensor in made])")

    def _unpack(self, expression: str, expected: tuple[Any, ...]) -> None:
        """Write source code that gives names to the items of a container of known length, and checks each item."""
        if not expected:
            return
        names = [self._local() for _ in expected]
        self._emit(f"{', '.join(names)}, = {expression}")
        for name, item in zip(names, expected, strict=True):
            self._check(name, item)

    def _check(self, name: str, expected: Any) -> None:
        if type(expected) is int:  # a known tensor; its reference returns None once it is freed
            self._fail_if(f"{name} is None or known[{expected}]() is not {name}")
        elif isinstance(expected, Constant):
            self._check_constant(name, expected)
        elif isinstance(expected, Several):
            self._fail_if(f"type({name}) is not {self._constant(expected.kind)}")
            if expected.kind is slice:
                self._unpack(f"({name}.start, {name}.stop, {name}.step)", expected.items)
                return
            self._fail_if(f"len({name}) != {len(expected.items)}")
            self._unpack(f"{name}.items()" if issubclass(expected.kind, dict) else name, expected.items)
        else:
            self._fail_if(f"not isinstance({name}, Tensor) or looks({name}) != {self._constant(expected.looks)}")
            if not self._undo:
                self._emit("length = len(known)")
                self._undo = "del known[length:]; "
            self._emit(f"known.append(ref({name}))")

    def _check_constant(self, name: str, expected: Constant) -> None:
        kind, value = expected.kind, expected.value
        if isinstance(value, Unknown):
            self._check_open(name, kind, value)
            return
        if kind in _SINGLETONS:
            self._fail_if(f"{name} is not {self._constant(value)}")
            return
        is_same = f"{name} == {self._constant(value)}"
        if kind is float and math.isfinite(float(value)) and float(value):
            is_same = f"{name} == {self._constant(float(value))}"
        elif kind not in _BY_EQUALITY:  # zeros differ by sign and NaN equals itself: compare as text, as recorded
            is_same = f"comparable({name}) == {self._constant(value)}"
        self._fail_if(f"type({name}) is not {self._constant(kind)} or not ({is_same})")

    def _check_open(self, name: str, kind: type, number: Unknown) -> None:
        """Write source code that checks a number. The recording has a placeholder for this number, because it changes from call
        to call.

        At its first occurrence in the stream, the code accepts and stores the number. At later occurrences, the number must be
        equal.
        """
        kind_name, self._is_open = self._constant(kind), True
        if number.index in self._given:
            self._fail_if(f"type({name}) is not {kind_name} or {name} != known.numbers[{number.index}]")
            return
        self._given.add(number.index)
        self._fail_if(f"not may_stand({name}, {kind_name}, is_positive={number.is_positive})")
        self._emit(f"known.numbers[{number.index}] = {name}")

    def _fail_if(self, condition: str) -> None:
        self._emit(f"if {condition}: {self._undo}return False")

    def _constant(self, value: Any) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def _local(self) -> str:
        self._locals += 1
        return f"a{self._locals}"

    def _emit(self, line: str, indent: int = 1) -> None:
        self.lines.append("    " * indent + line)
