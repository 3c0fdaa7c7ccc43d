"""Record the contents of a value, to any depth, and put them back: containers, generators, objects, iterators.

Containers, generators of random numbers and attributes of objects are put back in place. Python cannot rewind an
iterator, so a trial step runs on a stand-in: an exact copy where Python can make one, otherwise one that raises when advanced.
"""

from __future__ import annotations

import array
import copy
import io
import itertools
import random
import sys
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from plimsoll.errors import InvalidBatch

_WITH_ATTRIBUTES = frozenset({"argparse", "collections", "types"})
_NOT_OF_THE_MODEL = (
    *(sys.stdlib_module_names - _WITH_ATTRIBUTES),
    *("torch", "numpy", "triton", "plimsoll", "deepspeed", "lightning", "pytorch_lightning", "lightning_fabric"),
)
"""Packages whose objects are never put back: locks, loggers, compiled kernels, and trainers, which lead to data sets."""
_EMPTY: tuple[Iterable[Any], ...] = ([], (), "", b"", bytearray(), range(0))
_COPIED: tuple[type, ...] = (itertools.count, *(type(iter(each)) for each in _EMPTY))
"""Iterators whose copies are independent. Copies of other kinds (``map``, ``cycle``) share the iterator that they draw from."""


def _refill_list(value: Any, contents: Any) -> None:
    value[:] = contents


def _refill(value: Any, contents: Any) -> None:
    value.clear()
    value.update(contents)


def _refill_deque(value: deque[Any], contents: deque[Any]) -> None:
    value.clear()
    value.extend(contents)


def _reseed(value: np.random.Generator, contents: Any) -> None:
    value.bit_generator.state = contents


REFILLS: Mapping[type, Callable[[Any, Any], object]] = MappingProxyType(
    {
        **dict.fromkeys((list, bytearray, array.array), _refill_list),
        deque: _refill_deque,
        **dict.fromkeys((dict, OrderedDict, defaultdict, Counter, set), _refill),
        torch.Generator: torch.Generator.set_state,
        random.Random: random.Random.setstate,
        np.random.Generator: _reseed,
        np.random.RandomState: np.random.RandomState.set_state,
        np.ndarray: np.copyto,
    }
)
"""How the contents of an attribute are put back, by its very type: what subclasses do on a write is not known."""


def contents_of(value: Any) -> Any:
    """What ``REFILLS`` puts back later."""
    if isinstance(value, torch.Generator | np.random.RandomState):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if isinstance(value, random.Random) else copy.copy(value)


def with_contents(values: Iterable[Any], *, attributes_as_well: bool = False) -> dict[int, Any]:
    """Values and what lies in them, in however many lists, tuples, sets and dictionaries, each once, by ``id``; on request also
    in attributes of other objects.
    """
    found: dict[int, Any] = {}
    pending = list(values)
    while pending:
        value = pending.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if isinstance(value, tuple) or type(value) in (list, deque, set):
            pending.extend(value)
        elif isinstance(value, dict) and type(value) in REFILLS:
            pending.extend(value.values())
        elif isinstance(value, UserDict):
            pending.append(value.data)
        if attributes_as_well and is_holder(value):
            pending.extend(vars(value).values())
    return found


def is_holder(value: Any) -> bool:
    """Whether to put back the attributes of this object: it is of a user's class, and not a tensor, module or class."""
    if isinstance(value, torch.Tensor | nn.Module | type):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in _NOT_OF_THE_MODEL and isinstance(getattr(value, "__dict__", None), dict)


class KeptValues:
    """The contents of those of ``values`` that are containers, generators or objects; ``put_back`` restores them."""

    def __init__(self, values: Iterable[Any]) -> None:
        values = list(values)
        self._attributes = [(vars(value), dict(vars(value))) for value in values if is_holder(value)]
        self._contents = [(value, contents_of(value)) for value in values if type(value) in REFILLS]

    def put_back(self) -> None:
        """The same objects in the same places, the same numbers in arrays and generators."""
        for held, kept in self._attributes:
            put_back_entries(held, kept)
        for value, contents in self._contents:
            REFILLS[type(value)](value, contents)

    def lend(self, *tables: dict[str, Any]) -> None:
        """Replace iterators by stand-ins, here and in these tables too, until all of them are put back."""
        lent: dict[int, Any] = {}
        mappings = [*tables, *(held for held, _ in self._attributes)]
        mappings += [value for value, _ in self._contents if isinstance(value, dict)]
        sequences = [value for value, _ in self._contents if isinstance(value, list | deque)]
        places = [(each, list(each.items())) for each in mappings] + [
            (each, list(enumerate(each))) for each in sequences
        ]
        for place, entries in places:
            for key, value in entries:
                if is_iterator(value):
                    place[key] = lent.setdefault(id(value), stand_in(value))


def put_back_entries(held: dict[Any, Any], kept: Mapping[Any, Any], but: frozenset[str] = frozenset()) -> None:
    """Make a dictionary hold the same entries in the same order. Entries of these names are left alone."""
    for name in held.keys() - kept.keys() - but:
        del held[name]
    if [name for name in held if name not in but] != list(kept):
        rest = {name: value for name, value in held.items() if name in but}
        held.clear()
        held.update(rest)
    held.update(kept)


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator of Python's own, whose position is hidden in it."""
    is_bare = isinstance(value, Iterator) and not isinstance(value, io.IOBase | nn.Module)
    return is_bare and not isinstance(getattr(value, "__dict__", None), dict)


def lent(batch: Any) -> Any:
    """The batch with stand-ins in place of its iterators."""
    return tree_map(lambda leaf: stand_in(leaf) if is_iterator(leaf) else leaf, batch)


def stand_in(iterator: Any) -> Any:
    """What a trial step may advance in place of an iterator: an exact copy, or one that raises."""
    if type(iterator) in _COPIED:
        try:
            with warnings.catch_warnings():  # Python 3.12 warns that 3.14 copies no counts any more
                warnings.simplefilter("ignore", DeprecationWarning)
                return copy.copy(iterator)
        except TypeError:
            pass
    return _NotAdvanced(type(iterator).__name__)


class _NotAdvanced(Iterator[Any]):
    """Replaces an iterator that cannot be rewound, and raises when a step advances it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __next__(self) -> Any:
        raise InvalidBatch(
            f"The step advances a Python {self._kind} that the model or the batch holds.",
            why="Plimsoll runs trial steps, and Python cannot rewind this iterator after them",
            next="hold a list and an index, an itertools.count, a random.Random or a numpy generator in its place",
        )

    def send(self, *_: Any) -> Any:
        """As a generator is advanced."""
        return next(self)

    throw = close = send
