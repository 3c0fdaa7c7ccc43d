"""Store the contents of containers, generators, objects and iterators that a model holds, to any depth, and restore them after
a trial step (run only to plan or verify).

Containers, random generators and attributes of objects are restored in place. Python cannot rewind an iterator, so a trial step
runs on a replacement: an exact copy if Python can make one, otherwise an iterator that raises when it is advanced.
"""

from __future__ import annotations

import array
import contextlib
import copy
import functools
import io
import itertools
import random
import sys
import threading
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any
from weakref import ProxyTypes, WeakKeyDictionary, WeakValueDictionary
from weakref import ref as weak_reference

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from plimsoll.errors import InvalidBatch

_WITH_ATTRIBUTES = frozenset({"argparse", "collections", "types"})
_NOT_OF_THE_MODEL = frozenset(
    (
        *(sys.stdlib_module_names - _WITH_ATTRIBUTES),
        *("torch", "numpy", "triton", "plimsoll", "deepspeed", "lightning", "pytorch_lightning", "lightning_fabric"),
        *("wandb", "mlflow", "tensorboard", "tensorboardX", "neptune", "comet_ml", "aim", "clearml", "swanlab"),
        *("tqdm", "rich", "loguru", "matplotlib", "pandas", "datasets", "pyarrow", "ray", "google", "grpc", "PIL"),
    )
)
"""Names of packages whose objects are never restored.

Such objects are locks, loggers (their threads write at any time, and hooks of the user often hold one), compiled kernels, and
trainers and data sets, which may be large.
"""
_SEQUENCES: tuple[Iterable[Any], ...] = (
    [],
    (),
    "",
    "é",
    b"",
    bytearray(),
    range(0),
    range(2**70),
    set(),
    deque(),
    array.array("d"),
)
_EMPTY: tuple[Iterable[Any], ...] = (*_SEQUENCES, {}, {}.values(), {}.items())
_COPIED: tuple[type, ...] = (
    *(itertools.count, itertools.repeat, reversed, type(reversed([]))),
    *(type(iter(each)) for each in _EMPTY),
)
"""Types of iterators whose copies are independent.

Copies of other iterators (``map``, ``cycle``) share the iterator that they draw from.
"""


def _refill_dict(value: dict[Any, Any], contents: Any) -> None:
    dict.clear(value)
    dict.update(value, contents)


def _refill_ordered(value: OrderedDict[Any, Any], contents: Any) -> None:
    OrderedDict.clear(value)
    for key, each in contents:
        OrderedDict.__setitem__(value, key, each)


def _refill_set(value: set[Any], contents: Any) -> None:
    if set.__ne__(value, contents):
        set.clear(value)
        set.update(value, contents)


def _refill_weak(value: MutableMapping[Any, Any], contents: Any) -> None:
    value.clear()
    value.update(contents)


def _refill_deque(value: deque[Any], contents: Any) -> None:
    deque.clear(value)
    deque.extend(value, contents)


def _numbers_of(value: np.ndarray[Any, Any]) -> Any:
    return np.array(value.view(np.ndarray))


def _refill_array(value: np.ndarray[Any, Any], contents: Any) -> None:
    if value.flags.writeable:
        np.copyto(value.view(np.ndarray), contents)


def _contents_of_masked(value: np.ma.MaskedArray[Any, Any]) -> Any:
    mask = np.ma.getmask(value)
    return _numbers_of(value), mask if mask is np.ma.nomask else np.array(mask), value.hardmask


def _refill_masked(value: np.ma.MaskedArray[Any, Any], contents: Any) -> None:
    numbers, mask, is_hard = contents
    _refill_array(value, numbers)
    if np.ma.getmask(value) is not mask:
        value.soften_mask()  # a hard mask refuses to unmask
        value.mask = mask
        if mask is np.ma.nomask:
            value.shrink_mask()
    _ = value.harden_mask() if is_hard else value.soften_mask()


_EMPTY_SLOT = object()
_BARE = frozenset({str, int, float, bool, bytes, type(None)})
"""The types of nearly all keys of dictionaries. Values of these types do not have contents."""


def _filled_by(kind: Any) -> Callable[[Any, Any], object]:
    """Return a function that overwrites a sequence of this type (list, bytearray, array) in place with other contents."""
    return lambda value, contents: kind.__setitem__(value, slice(None), contents)


def _state_of(generator: Any) -> Any:
    return generator.state


def _set_state(generator: Any, state: Any) -> None:
    generator.state = state


_KINDS: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = MappingProxyType(
    {
        list: (list.copy, _filled_by(list)),
        bytearray: (bytes, _filled_by(bytearray)),
        array.array: (array.array.__copy__, _filled_by(array.array)),
        deque: (lambda value: tuple(deque.__iter__(value)), _refill_deque),
        **dict.fromkeys((dict, defaultdict, Counter), (dict.copy, _refill_dict)),
        OrderedDict: (lambda value: tuple(OrderedDict.items(value)), _refill_ordered),
        set: (lambda value: frozenset(set.__iter__(value)), _refill_set),
        **dict.fromkeys((WeakKeyDictionary, WeakValueDictionary), (lambda value: dict(value.items()), _refill_weak)),
        torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
        random.Random: (random.Random.getstate, random.Random.setstate),
        np.random.Generator: (
            lambda value: value.bit_generator.state,
            lambda value, state: _set_state(value.bit_generator, state),
        ),
        np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
        **dict.fromkeys(
            (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64),
            (_state_of, _set_state),
        ),
        **dict.fromkeys((np.ndarray, np.recarray), (_numbers_of, _refill_array)),
        np.ma.MaskedArray: (_contents_of_masked, _refill_masked),
    }
)
"""A mapping from type to two functions: one reads the contents of a value of this type, the other restores them.

They use these types' own methods, because a subclass may do more on a write.
"""


def kind_of(value: Any) -> type | None:
    """Return the container or generator type whose methods read and write the contents of this value.

    The user's class may derive from that type. Return ``None`` for any other value.
    """
    own = type(value)
    if own in _KINDS or not is_of_user(own):
        return own if own in _KINDS else None
    return next((kind for kind in own.__mro__ if kind in _KINDS), None)


def contents_of(value: Any) -> Any:
    """Return the contents of a value, in the form that `refill` takes. The value must have a kind (see `kind_of`)."""
    return _KINDS[_known(value)][0](value)


def refill(value: Any, contents: Any) -> None:
    """Restore the contents of a value in place. ``contents`` is what `contents_of` has returned for the value."""
    _KINDS[_known(value)][1](value, contents)


def _known(value: Any) -> type:
    kind = kind_of(value)
    assert kind is not None
    return kind


def is_of_user(kind: type | FunctionType) -> bool:
    """Return True if a class or a function is the user's: it does not belong to Python, torch or a trainer."""
    # Code that `exec` made may be without a module, such as the functions of `sympy.lambdify`.
    return (kind.__module__ or "").partition(".")[0] not in _NOT_OF_THE_MODEL


def with_contents(values: Iterable[Any], *, attributes_as_well: bool = False) -> dict[int, Any]:
    """Return the given values and everything inside of them, each once, as a mapping from ``id`` to value.

    Nested lists, tuples, sets and dictionaries are searched, and the objects of methods and weak references. With
    ``attributes_as_well``, the attributes of other objects are searched too.
    """
    found: dict[int, Any] = {}
    pending = list(values)
    while pending:
        value = pending.pop()
        if type(value) in ProxyTypes:
            # Do not ask a proxy itself: even ``isinstance`` raises if the object behind the proxy does not exist any more.
            value = _behind(value)
        if id(value) in found:
            continue
        found[id(value)] = value
        pending.extend(parts_of(value) if attributes_as_well else _within(value))
    return found


def parts_of(value: Any) -> list[Any]:
    """Return what a value holds itself: the items of a container, and the attributes of an object that is to be restored."""
    found = list(_within(value))
    if is_holder(value):
        found += (_attributes_of(value) or {}).values()
        found += [_in_slot(slot, value) for slot in _slots_of(value)]
    return found


def _within(value: Any) -> Iterable[Any]:
    """Return the items of a container, if it is one of Python's own types or derives from one.

    For other values return nothing.
    """
    kind = kind_of(value)
    if isinstance(value, tuple | frozenset):
        return value
    if kind in (list, deque, set):
        return kind.__iter__(value)
    if isinstance(value, dict) and kind is not None:
        return (*filter(_has_contents, dict.keys(value)), *dict.values(value))
    if isinstance(value, MappingProxyType | WeakKeyDictionary | WeakValueDictionary):
        return (*filter(_has_contents, value.keys()), *value.values())
    if isinstance(value, UserDict):
        return (value.data,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, FunctionType) and is_of_user(value):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (*defaults, *(content for _, content in _cells_of(value)))
    # `losses.append`, but not a function of a module such as `len`
    if isinstance(value, BuiltinMethodType | MethodWrapperType):
        return () if isinstance(value.__self__, ModuleType) else (value.__self__,)
    if isinstance(value, weak_reference):
        return (value(),)
    if isinstance(value, np.ndarray) and kind is not None:
        return (value.view(np.ndarray).tolist(),) if value.dtype.hasobject else ()
    return (value.__self__, value.__func__) if isinstance(value, MethodType) else ()


def _has_contents(key: Any) -> bool:
    return type(key) not in _BARE


def _behind(proxy: Any) -> Any:
    """Return the object behind a ``weakref.proxy``, or ``None`` if the object does not exist any more."""
    try:
        return getattr(proxy.__repr__, "__self__", None)
    except ReferenceError:
        return None


def _cells_of(function: FunctionType) -> list[tuple[CellType, Any]]:
    """Return the variables of a closure that have a value, each as a pair of cell and value."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell that is still empty
            found.append((cell, cell.cell_contents))
    return found


def is_holder(value: Any) -> bool:
    """Return True if an object's attributes should be restored.

    This is so for functions of the user, for objects of the user's classes, for ``threading.local``, and for torch's schedules
    of learning rates. Tensors, modules and classes are excluded.
    """
    if isinstance(value, FunctionType):
        return is_of_user(value)
    if isinstance(value, threading.local | LRScheduler):
        return True  # of threading.local, the attributes that it has in this thread
    if isinstance(value, torch.Tensor | nn.Module | type) or not is_of_user(type(value)):
        return False
    return _has_attributes(value)


def _has_attributes(value: Any) -> bool:
    return _attributes_of(value) is not None or bool(_slots_of(value))


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the dictionary with an object's attributes, or ``None`` if it does not have one.

    The user's ``__getattr__`` is not called, because it may raise anything.
    """
    if isinstance(value, threading.local):
        return value.__dict__
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:  # of a class with slots alone
        return None
    return found if isinstance(found, dict) else None


def _slots_of(value: Any) -> list[MemberDescriptorType]:
    """Return the descriptors of those attributes of an object that a user's class declares in ``__slots__``."""
    classes = [vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind) and is_of_user(kind)]
    return [slot for held in classes for slot in held.values() if isinstance(slot, MemberDescriptorType)]


def _in_slot(slot: MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _EMPTY_SLOT


class KeptValues:
    """Stores the contents of those ``values`` that are containers, generators or objects. `put_back` restores them.

    Of modules it stores only attributes that a class declares in ``__slots__``.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        values = list(values)
        holders = [value for value in values if is_holder(value)]
        tables = (_attributes_of(value) for value in holders)
        self._attributes = [(held, dict(held)) for held in tables if held is not None]
        slotted = [value for value in values if is_holder(value) or isinstance(value, nn.Module)]
        self._slots = [(slot, value, _in_slot(slot, value)) for value in slotted for slot in _slots_of(value)]
        self._contents = [(value, contents_of(value)) for value in values if kind_of(value) is not None]
        functions = [value for value in values if isinstance(value, FunctionType) and is_of_user(value)]
        self._cells = [entry for function in functions for entry in _cells_of(function)]

    def put_back(self) -> None:
        """Put the same objects back into the same places, and the same numbers into arrays and generators."""
        for held, kept in self._attributes:
            put_back_entries(held, kept)
        for slot, value, known in self._slots:
            if _in_slot(slot, value) is known:
                continue
            if known is _EMPTY_SLOT:
                slot.__delete__(value)
            else:
                slot.__set__(value, known)
        for cell, content in self._cells:
            if cell.cell_contents is not content:
                cell.cell_contents = content
        for value, contents in self._contents:
            refill(value, contents)

    def lend(self, *tables: dict[str, Any]) -> None:
        """Replace iterators in the values and in the dictionaries ``tables`` by copies. `put_back` restores the iterators."""
        known: dict[int, Any] = {}
        for write, owner, key, value in self._places(tables):
            stand_in = _with_stand_ins(value, known)
            if stand_in is not value:
                write(owner, key, stand_in)

    def _places(
        self, tables: Iterable[dict[str, Any]]
    ) -> Iterator[tuple[Callable[[Any, Any, Any], object], Any, Any, Any]]:
        """Yield the places that hold values.

        A place is given by a function that writes to it, the two arguments of this function before the value, and the value.
        """
        for table in (*tables, *(held for held, _ in self._attributes)):
            yield from ((dict.__setitem__, table, key, value) for key, value in list(table.items()))
        yield from ((MemberDescriptorType.__set__, slot, value, held) for slot, value, held in self._slots)
        for container, _ in self._contents:
            kind: Any = kind_of(container)
            if issubclass(kind, dict):
                yield from ((kind.__setitem__, container, key, value) for key, value in list(kind.items(container)))
            elif kind in (list, deque):
                yield from (
                    (kind.__setitem__, container, *entry) for entry in enumerate(list(kind.__iter__(container)))
                )


def put_back_entries(held: dict[Any, Any], kept: Mapping[Any, Any], but: frozenset[str] = frozenset()) -> None:
    """Make a dictionary hold the entries of ``kept`` in the same order. Entries whose names are in ``but`` are not changed."""
    for name in held.keys() - kept.keys() - but:
        del held[name]
    if [name for name in held if name not in but] != list(kept):
        rest = {name: value for name, value in held.items() if name in but}
        held.clear()
        held.update(rest)
    held.update(kept)


def lent(batch: Any) -> Any:
    """Return a copy of the batch with its iterators replaced, so that a trial step does not advance the user's iterators."""
    known: dict[int, Any] = {}
    return tree_map(lambda leaf: _with_stand_ins(leaf, known), batch)


def _is_iterator(value: Any) -> bool:
    """Return True if a value is an iterator whose position cannot be read or set, as with those of Python's own types."""
    if type(value) in ProxyTypes:  # a proxy has ``__next__`` for every object
        return False
    is_bare = isinstance(value, Iterator) and not isinstance(value, io.IOBase | nn.Module)
    return is_bare and not _has_attributes(value)


def _with_stand_ins(value: Any, known: dict[int, Any]) -> Any:
    """Return what a trial step gets in place of a value: a replacement for an iterator or for a tuple with iterators, otherwise
    the value itself.

    ``known`` maps the ``id`` of an iterator to its replacement, so that the same iterator gets the same replacement.
    """
    if type(value) not in ProxyTypes and isinstance(value, tuple):
        parts = [_with_stand_ins(each, known) for each in value]
        is_same = all(one is other for one, other in zip(parts, value, strict=True))
        return value if is_same else tuple.__new__(type(value), parts)
    if not _is_iterator(value):
        return value
    return known.setdefault(id(value), _stand_in(value))


def _stand_in(iterator: Any) -> Any:
    """Return what a trial step may advance in place of an iterator: an exact copy, or an iterator that raises."""
    if type(iterator) in _COPIED:
        try:
            with warnings.catch_warnings():  # Python 3.12 warns that from 3.14 on counts cannot be copied
                warnings.simplefilter("ignore", DeprecationWarning)
                return copy.copy(iterator)
        except TypeError:
            pass
    return _NotAdvanced(type(iterator).__name__)


class _NotAdvanced(Iterator[Any]):
    """Replaces an iterator that cannot be rewound. It raises when a step advances it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __next__(self) -> Any:
        raise InvalidBatch(
            f"The step advances a Python {self._kind} that the model or the batch holds.",
            why="Plimsoll runs trial steps, and Python cannot rewind this iterator after them",
            next="replace it by a list and an index, an itertools.count, a random.Random or a numpy generator",
        )

    def send(self, *_: Any) -> Any:
        """Raise the same error as ``__next__``. Generators can also be advanced by this method."""
        return next(self)

    throw = close = send
