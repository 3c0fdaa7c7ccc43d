"""A trial step leaves the contents of every kind of value unchanged, wherever a model or a call holds it."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import itertools
import random
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.errors import InvalidBatch
from plimsoll.tracing.recorder.contents import lent
from plimsoll.tracing.recorder.untouched import arguments_kept, untouched


class Counter:
    def __init__(self):
        self.calls = 0

    def next(self):
        self.calls += 1
        return self.calls


class Slotted:
    __slots__ = ("__hidden", "late", "seen")

    def __init__(self):
        self.__hidden, self.seen = 0, []

    def next(self):
        self.__hidden += 1
        self.seen.append(self.__hidden)
        self.late = getattr(self, "late", 0) + 10
        return self.late + len(self.seen)


class SlottedCounter(Slotted):
    """Has slots by its base class, and attributes."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def next(self):
        self.calls += 1
        return super().next() + self.calls


@dataclasses.dataclass(slots=True)
class Data:
    calls: int = 0

    def next(self):
        self.calls += 1
        return self.calls


class Iterating:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.calls += 1
        return self.calls


class History(list):
    """Refuses to be written but by ``append``, and counts."""

    def append(self, value):
        self.appended = getattr(self, "appended", 0) + 1
        super().append(value)

    def __setitem__(self, key, value):
        raise TypeError

    copy = __setitem__


class Frozen(collections.OrderedDict):
    """As configurations of diffusers: writes raise."""

    def __setitem__(self, key, value):
        raise TypeError

    clear = update = copy = __setitem__


class Dictionary(dict):
    pass


class Names(set):
    pass


class Recent(collections.deque):
    pass


class Bytes(bytearray):
    pass


class Numbers(np.ndarray):
    pass


class Dice(random.Random):
    pass


def _grown(values):
    values.append(0)
    return len(values)


def _added(names):
    names.add(len(names))
    return len(names)


def _counted(mapping):
    count = mapping.get("count", 0) + 1
    dict.__setitem__(mapping, "count", count)
    return count


def _ordered(mapping):
    collections.OrderedDict.__setitem__(mapping, len(mapping), 0)
    return len(mapping)


def _raised(values):
    values[0] += 1
    return float(values[0])


def _masked(values):
    count = int(np.ma.count_masked(values))
    values[0] += 1
    values[1 if count == 0 else 0] = np.ma.masked
    return count, values.data.tolist(), repr(values)


def _called(method, held):
    method(*(len(held), 0) if isinstance(held, dict) else (0,))
    return len(held)


def _alive(counter, refer):
    ALIVE.append(counter)
    return refer(counter)


ALIVE = []
"""Objects that only weak references lead to."""


def _next(value):
    return value.next()


NUMBERS = [float(number) for number in range(9)]
ITERATORS = {
    **{
        f"iterator of a {type(each).__name__}": each
        for each in ((1, 2, 3, 4, 5, 6, 7), range(9), "abcdefgh", "äbcdefgh")
    },
    **{
        f"iterator of a {type(each).__name__}": each
        for each in (NUMBERS, b"abcdefgh", {1, 2, 3, 4, 5, 6, 7}, range(2**70))
    },
    **{
        f"iterator of a {type(each).__name__}": each for each in (collections.deque(NUMBERS), array.array("d", NUMBERS))
    },
    "iterator of a dict": dict.fromkeys(NUMBERS),
    "iterator of items": dict.fromkeys(NUMBERS).items(),
}
KINDS = {
    "numpy's old generator": (lambda: np.random.RandomState(0), lambda value: value.rand()),
    "numpy's generator": (lambda: np.random.default_rng(0), lambda value: value.random()),
    "numpy's bit generator": (lambda: np.random.Philox(0), lambda value: value.random_raw()),
    "Python's generator": (lambda: random.Random(0), lambda value: value.random()),
    "torch's generator": (
        lambda: torch.Generator().manual_seed(0),
        lambda value: float(torch.rand((), generator=value)),
    ),
    "own random.Random": (lambda: Dice(0), lambda value: value.random()),
    "list": (list, _grown),
    "own list": (History, lambda value: (_grown(value), value.appended)),
    "deque": (collections.deque, _grown),
    "own deque": (Recent, _grown),
    "set": (set, _added),
    "own set": (Names, _added),
    "dict": (dict, _counted),
    "own dict": (Dictionary, _counted),
    "Counter": (collections.Counter, _counted),
    "defaultdict": (lambda: collections.defaultdict(int), _counted),
    "OrderedDict": (collections.OrderedDict, _ordered),
    "own OrderedDict": (Frozen, _ordered),
    "UserDict": (collections.UserDict, lambda value: _counted(value.data)),
    "bytearray": (lambda: bytearray(2), _raised),
    "own bytearray": (lambda: Bytes(2), _raised),
    "array": (lambda: array.array("d", [0]), _raised),
    "numpy array": (lambda: np.zeros(2), _raised),
    "record array": (lambda: np.rec.array(np.zeros(2, dtype=[("calls", "i8")])), lambda value: _raised(value.calls)),
    "masked array": (lambda: np.ma.zeros(2), _masked),
    "masked array with a hard mask": (lambda: np.ma.array(np.zeros(2), mask=[0, 0], hard_mask=True), _masked),
    "array of objects": (lambda: np.array([Counter()], dtype=object), lambda value: value[0].next()),
    "own numpy array": (lambda: np.zeros(2).view(Numbers), _raised),
    "object": (Counter, _next),
    "object with slots": (Slotted, _next),
    "object with slots and attributes": (SlottedCounter, _next),
    "dataclass with slots": (Data, _next),
    "own iterator with slots": (Iterating, next),
    "namespace": (lambda: types.SimpleNamespace(counter=Counter()), lambda value: value.counter.next()),
    "mapping proxy": (lambda: types.MappingProxyType({"counter": Counter()}), lambda value: value["counter"].next()),
    "frozen set": (lambda: frozenset({Counter()}), lambda value: next(iter(value)).next()),
    "bound method": (lambda: Counter().next, lambda value: value()),
    "method of a list": (lambda: [].append, lambda value: _called(value, value.__self__)),
    "method of a dictionary": (lambda: {}.__setitem__, lambda value: _called(value, value.__self__)),
    "partial of a method of a list": (
        lambda: functools.partial([].append),
        lambda value: _called(value, value.func.__self__),
    ),
    "key of a dictionary": (lambda: {Counter(): 0}, lambda value: next(iter(value)).next()),
    "weak reference": (lambda: _alive(Counter(), weakref.ref), lambda value: value().next()),
    "weak method": (
        lambda: _alive(Counter(), lambda counter: weakref.WeakMethod(counter.next)),
        lambda value: value()(),
    ),
    "partial": (lambda: functools.partial(_grown, values=[]), lambda value: value()),
    "partial of a bound method": (lambda: functools.partial(Counter().next), lambda value: value()),
    "count": (itertools.count, next),
    "repeat": (lambda: itertools.repeat(1, 5), lambda value: (next(value), repr(value))),
    "reversed list": (lambda: reversed(NUMBERS), next),
    "reversed tuple": (lambda: reversed((1, 2, 3, 4, 5, 6)), next),
    **{name: (functools.partial(iter, each), next) for name, each in ITERATORS.items()},
}


class Own:
    def __init__(self, held):
        self.held = held


class OwnSlot:
    __slots__ = ("held",)
    __init__ = Own.__init__


class OwnList(list):
    pass


PLACES = {
    "itself": (lambda state: state, lambda held: held),
    "in a dictionary's list": (lambda state: {"all": [state]}, lambda held: held["all"][0]),
    "in a tuple": (lambda state: ("name", (state,)), lambda held: held[1][0]),
    "in an object": (Own, lambda held: held.held),
    "in an object's slot": (OwnSlot, lambda held: held.held),
    "in a list of a class of its own": (lambda state: OwnList([state]), lambda held: held[0]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_contents_of_an_attribute_are_put_back(kind, place):
    (make, advance), (hold, look) = KINDS[kind], PLACES[place]
    model, state, twin = nn.Linear(1, 1), make(), make()
    model.held = hold(state)
    with untouched(model):
        within = [advance(look(model.held)) for _ in range(2)]
    assert look(model.held) is state
    expected = [advance(twin) for _ in range(3)]
    assert within == expected[:2]
    assert [advance(look(model.held)) for _ in range(3)] == expected


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_contents_of_an_argument_are_put_back(kind, place):
    (make, advance), (hold, look) = KINDS[kind], PLACES[place]
    state, twin = make(), make()
    held = hold(state)
    with arguments_kept((held,)):
        (given,) = lent((held,))
        within = [advance(look(given)) for _ in range(2)]
    assert look(held) is state
    expected = [advance(twin) for _ in range(3)]
    assert within == expected[:2]
    assert [advance(look(held)) for _ in range(3)] == expected


def test_an_iterator_that_is_held_twice_stays_one_while_a_step_runs():
    model, count = nn.Linear(1, 1), itertools.count()
    model.one, model.other = count, (count,)
    with untouched(model):
        assert [next(model.one), next(model.other[0]), next(model.one)] == [0, 1, 2]
    assert next(count) == 0


@pytest.mark.parametrize("place", PLACES)
def test_an_iterator_that_nobody_can_copy_is_not_advanced_wherever_it_is(place):
    hold, look = PLACES[place]
    model, drawn = nn.Linear(1, 1), map(float, range(9))
    model.held = hold(drawn)
    with untouched(model), pytest.raises(InvalidBatch, match="advances a Python map"):
        next(look(model.held))
    assert look(model.held) is drawn
    assert next(drawn) == 0


def test_tensors_that_an_argument_holds_get_their_numbers_back():
    total, given = torch.zeros(2), torch.zeros(2)
    held = Own([total])
    with arguments_kept((held, given)):
        total += 1
        total.data.mul_(2)
        held.held.append(total + 1)
        given += 1
    assert held.held[0] is total
    assert [each.tolist() for each in held.held] == [[0, 0]]
    assert given.tolist() == [1, 1]  # a trial step is handed a copy of it


def test_the_object_behind_a_weak_proxy_is_put_back():
    model, counter = nn.Linear(1, 1), Counter()
    model.owner = weakref.proxy(counter)
    with untouched(model):
        assert model.owner.next() == 1
    assert counter.calls == 0
    with arguments_kept((model.owner,)):
        (given,) = lent((model.owner,))
        assert given.next() == 1
    assert counter.calls == 0


def test_a_weak_proxy_whose_object_is_gone_is_left_alone():
    model, counter = nn.Linear(1, 1), Counter()
    model.owner = proxy = weakref.proxy(counter)
    model.others = [model.owner]
    del counter
    with untouched(model), arguments_kept(((model.owner, Own(model.owner)),)):
        assert lent((model.owner,))[0] is proxy
    assert vars(model)["owner"] is proxy


def test_arrays_that_nobody_can_write_are_left_alone():
    model = nn.Linear(1, 1)
    model.table = np.arange(3)
    model.table.flags.writeable = False
    with untouched(model):
        assert model.table[1] == 1
    assert model.table.tolist() == [0, 1, 2]
