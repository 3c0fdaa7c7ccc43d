"""Shows that a region's Python code cannot decide anything else than it did, because all that it can read is unchanged.

Comparing every torch call of a region (see ``call_stream``) costs more than torch takes for small ops. Python code is
deterministic, so where everything that it reads is as it was, it makes the same torch calls, and need not be compared. One call
is watched (see ``executed_code``); then `HostState.of` collects what its code can have read:

- the globals that it named, the cells of its closures, the default values and the code of its functions;
- of every object that can be reached, each attribute whose name the code mentions, on the object and on its classes;
- the contents of every dictionary, list and set that can be reached.

The set is larger than what was read. Whatever cannot be judged is an obstacle, and such a region is compared call by call as
before: C functions that may hold state (random numbers, the time, files), iterators, code that came by an unknown way, names
that are computed. Tensors are compared by identity and layout; their values are never decided on without a read, which a
recording refuses.

Weaknesses: an attribute whose name is put together at run time, and state inside C extensions that hide it from Python. So
some calls are still compared (see ``constancy``), and samples and inspections go on.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from plimsoll.engine.executed_code import ExecutedCode, is_torchs
from plimsoll.engine.torch_calls import looks

MOST_READS = 4000
"""More than this makes the check dearer than the comparison of calls that it saves."""

_SIMPLE = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, types.UnionType, types.GenericAlias),
)
"""Values that never change: a change puts another object in their place."""
_C_CALLABLES = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
)
"""C functions are judged where they are called."""
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType)
_CONTAINERS = (*_MAPPINGS, list, tuple, set, frozenset, collections.deque)
_MADE_BY_A_CLASS_STATEMENT = 1 << 9
"""The flag ``Py_TPFLAGS_HEAPTYPE`` of a class."""
_COMPARABLE = frozenset(_SIMPLE) - {slice}
"""Simple values that ``==`` compares; a slice may hold tensors."""
_ABSENT = object()


class HostState:
    """What the code of one region can read, with the values that it had."""

    def __init__(self) -> None:
        self.obstacle = ""
        self._reads: list[tuple[Callable[..., Any], Any, Any]] = []
        """A way to read, a key, and the value that it gave."""
        self._sizes: list[tuple[Any, int]] = []
        self._orders: list[tuple[Any, tuple[Any, ...]]] = []
        """Dictionaries, lists and sets, with their keys or items in order."""
        self._functions: list[tuple[types.FunctionType, Any, Any, Any]] = []
        """Functions, with their code and default values."""
        self._tensors: list[tuple[torch.Tensor, tuple[Any, ...]]] = []

    @staticmethod
    def of(module: nn.Module, executed: ExecutedCode, known: Iterable[torch.Tensor | None]) -> HostState:
        """What the executed code can read, as it is now. ``known`` are tensors that every call looks at anyway.

        Where something cannot be judged, ``obstacle`` says what.
        """
        collector = _Collector(executed, known)
        collector.state.obstacle = executed.obstacle or collector.collect(module)
        return collector.state

    def holds(self) -> bool:
        """Whether everything is as it was."""
        for read, key, expected in self._reads:
            found = read(key, _ABSENT)
            if found is not expected and not _is_same(found, expected):
                return False
        for container, size in self._sizes:
            if len(container) != size:
                return False
        for function, code, defaults, keywords in self._functions:
            if (
                function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not keywords
            ):
                return False
        for container, items in self._orders:
            if len(container) != len(items) or not all(map(_is_same, container, items)):
                return False
        return all(looks(tensor) == expected for tensor, expected in self._tensors)


def _is_same(found: Any, expected: Any) -> bool:
    """Whether two values are one object, or equal numbers or texts. Others are not compared: a tensor's ``==`` computes."""
    if found is expected:
        return True
    kind = type(expected)
    if type(found) is not kind or kind not in _COMPARABLE:
        return False
    return repr(found) == repr(expected) if kind in (float, complex) else bool(found == expected)


class _Collector:
    """Follows everything that the executed code can reach, until nothing new is found."""

    def __init__(self, executed: ExecutedCode, known: Iterable[torch.Tensor | None]) -> None:
        self.state = HostState()
        self._executed = executed
        self._known = {id(tensor) for tensor in known if tensor is not None}
        self._names: set[str] = set()
        self._new_names: set[str] = set()
        self._functions: set[types.CodeType] = set()
        """Code of functions that were reached."""
        self._seen: dict[int, Any] = {}
        """Objects that were followed, by identity; held, so that an identity names one object."""
        self._objects: list[Any] = []
        """Modules, classes and instances, whose attributes count by name."""
        self._read: set[tuple[int, Any]] = set()
        self._open: list[Any] = []

    def collect(self, module: nn.Module) -> str:
        """Collect; the obstacle, if there is one."""
        self._open.append(module)
        for code, names in self._executed.globals.items():
            global_names, attributes = self._executed.read_names(code)
            self._new_names |= attributes
            for name in global_names:
                if name in names:
                    self._attribute(names, name)
                else:  # a builtin, as long as no global has its name
                    self._add_read(names, names.get, name, _ABSENT)
        if self._executed.obstacle:
            return self._executed.obstacle
        while self._open or self._new_names - self._names:
            if not self._open:
                self._new_names -= self._names
                self._names |= self._new_names
                for each in list(self._objects):
                    self._members(each, self._new_names)
                continue
            obstacle = self._follow(self._open.pop())
            if obstacle:
                return obstacle
            if len(self._read) > MOST_READS:
                return f"its code can read more than {MOST_READS} values"
        return self._unreached()

    def _unreached(self) -> str:
        """The code that ran though nothing that was reached leads to it."""
        made = {
            inner for code in self._executed.globals for inner in code.co_consts if isinstance(inner, types.CodeType)
        }
        for code in self._executed.globals:
            if code not in self._functions and code not in made and not is_torchs(code):
                return f"it is not known how {code.co_qualname} was reached"
        return ""

    def _follow(self, value: Any) -> str:
        """Note what a value holds; the obstacle, if it cannot be judged."""
        if id(value) in self._seen or isinstance(value, _C_CALLABLES):
            return ""
        kind = type(value)
        if kind is str:
            self._new_names.add(value)  # it may be the name of an attribute
        if kind in _SIMPLE:
            return ""
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if id(value) not in self._known:
                self.state._tensors.append((value, looks(value)))
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._open += [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            self._open += [value.func, value.args, value.keywords]
        elif isinstance(value, staticmethod | classmethod):
            self._open.append(value.__func__)
        elif isinstance(value, property):
            self._open += [value.fget, value.fset]
        elif isinstance(value, type | types.ModuleType):
            self._object(value)
        elif kind in _CONTAINERS:
            self._container(value)
        elif isinstance(value, tuple):
            self._open += tuple.__iter__(value)
        elif kind.__module__.startswith("plimsoll."):
            pass
        elif isinstance(value, torch.jit.ScriptModule) or not _is_of_python(kind):
            return f"its code can reach an object of type {kind.__qualname__}, which may hide its state"
        else:
            self._object(value)
            self._open.append(kind)
        return ""

    def _function(self, function: types.FunctionType) -> None:
        """A function's code, defaults and closure, where it has run."""
        self._functions.add(function.__code__)
        if function.__code__ not in self._executed.globals:
            return
        parts = (function.__code__, function.__defaults__, function.__kwdefaults__)
        self.state._functions.append((function, *parts))
        self._open += [function.__defaults__, function.__kwdefaults__]
        self._object(function)
        for cell in function.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:  # not filled yet
                contents = _ABSENT
            self._add_read(cell, functools.partial(getattr, cell), "cell_contents", contents)
            if contents is not _ABSENT:
                self._open.append(contents)

    def _container(self, value: Any) -> None:
        if isinstance(value, _MAPPINGS):
            self._orders(value, tuple(value))
            for key in value:
                self._open.append(key)
                self._attribute(value, key)
            return
        items = tuple(value)
        if not isinstance(value, tuple | frozenset):
            self._orders(value, items)
        self._open += items

    def _orders(self, container: Any, items: tuple[Any, ...]) -> None:
        if items:
            self.state._orders.append((container, items))
        else:  # most are the empty dictionaries of a module's hooks
            self.state._sizes.append((container, 0))

    def _object(self, value: Any) -> None:
        """Attributes of an object whose names the code mentions; more names may come."""
        self._objects.append(value)
        members = value.__dict__ if isinstance(value, type) else _attributes_of(value)
        if not isinstance(value, types.ModuleType):
            # a new attribute would hide one of the class, or of a class behind it
            self.state._sizes.append((members, len(members)))
        self._members(value, self._names)

    def _members(self, value: Any, names: set[str]) -> None:
        if isinstance(value, type):
            for owner in value.__mro__:
                for name, member in list(owner.__dict__.items()):
                    if name in names or _code_of(member) in self._executed.globals:
                        self._attribute(owner.__dict__, name, owner)
            return
        members = _attributes_of(value)
        for name in names & members.keys():
            self._attribute(members, name)
        for owner in type(value).__mro__:
            for name in _slots_of(owner) & names:
                read = functools.partial(_slot, owner.__dict__[name], value)
                self._add_read(value, read, name, read(name, _ABSENT))
                self._open.append(read(name, None))

    def _attribute(self, entries: Mapping[Any, Any], name: Any, holder: Any = None) -> None:
        """One entry of a dictionary, or of that of ``holder``, which makes a new one for everybody who asks."""
        value = entries[name]
        if id(value) not in self._known:
            self._add_read(entries if holder is None else holder, entries.get, name, value)
        self._open.append(value)

    def _add_read(self, holder: Any, read: Callable[..., Any], name: Any, value: Any) -> None:
        place = (id(holder), name)
        if place not in self._read:
            self._read.add(place)
            self.state._reads.append((read, name, value))


def _attributes_of(value: Any) -> dict[str, Any]:
    """The object's own attributes, without running code of its class."""
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def _slot(descriptor: types.MemberDescriptorType, value: Any, name: str, default: Any) -> Any:
    try:
        return descriptor.__get__(value)
    except AttributeError:
        return default


def _code_of(member: Any) -> types.CodeType | None:
    """The code of a class's member that is a function of some kind."""
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    return getattr(member, "__code__", None)


def _slots_of(owner: type) -> set[str]:
    return {name for name, member in owner.__dict__.items() if isinstance(member, types.MemberDescriptorType)}


def _is_of_python(kind: type) -> bool:
    """Whether all state of the instances of a class lies in attributes and slots: C types have fields besides."""
    classes = [owner for owner in kind.__mro__ if owner is not object]
    slots = sum(len(_slots_of(owner)) for owner in classes)
    return all(owner.__flags__ & _MADE_BY_A_CLASS_STATEMENT for owner in classes) and (
        kind.__basicsize__ <= object.__basicsize__ + 8 * (slots + 2)
    )
