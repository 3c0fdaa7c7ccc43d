"""State of the host that changes between steps: gradients stay right, nothing stops, and at most one step keeps everything."""

from __future__ import annotations

import copy
import itertools
import os
import random
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from contracts.harness import Block, Stack, batch, differences, manage, train, weigh
from long_cases import some

STEPS = 8
FULL = "PLIMSOLL_EVERY_SHAPE" in os.environ
"""Every kind with every shape, which takes minutes; by default each kind has one of them."""
SHAPES = ((4, 16, 8), (2, 256, 16), (5, 7, 12))
"""Rows, columns and width of the model; what the kinds work on is twice as wide."""


def _sliced(x, pick):
    width = x.shape[-1] >> pick(3)
    return F.pad(x[..., :width].sin(), (0, x.shape[-1] - width)) * x


def _nested_dropout(x, pick):
    mask = torch.ones_like(x)
    mask[..., x.shape[-1] >> pick(3) :] = 0
    return (x.exp() * mask).tanh() * x


def _numpy_mask(x, pick):
    mask = np.arange(x.shape[-1], dtype=np.float32) % (pick(3) + 1)
    return ((x + torch.from_numpy(mask)).sigmoid() * x).tanh()


def _repeats(x, pick):
    for _ in range(1 + pick(3)):
        x = (x * 0.9).tanh()
    return x


def _one_of_two_tensors(x, pick):
    halves = x.sigmoid(), x.cos()
    return (halves[pick(2)] * x).tanh().sin()


def _order(x, pick):
    parts = [part.sin() for part in x.chunk(4, -1)]
    first = pick(4)
    return torch.cat(parts[first:] + parts[:first], -1) * x


def _columns(x, pick):
    kept = [column for column in range(x.shape[-1]) if column % (pick(3) + 2)]
    return torch.zeros_like(x).index_add(-1, torch.tensor(kept), x[..., kept].tanh())


KINDS = {
    "a width": _sliced,
    "nested dropout": _nested_dropout,
    "a mask made from a list": lambda x, pick: (
        (x * torch.tensor([float(pick(3)) for _ in range(x.shape[-1])])).exp().tanh()
    ),
    "a mask made from numpy": _numpy_mask,
    "layer drop": lambda x, pick: x.sigmoid().sin() * x if pick(2) else x,
    "stochastic depth": lambda x, pick: (x.sin() / (1 - 0.1 * pick(3))).tanh() if pick(2) else x * 0.5,
    "how often a layer runs": _repeats,
    "which of two tensors": _one_of_two_tensors,
    "the order of parts": _order,
    "a scalar of numpy's": lambda x, pick: (x * np.float32(0.5 + pick(3))).exp().clamp(max=3).sin(),
    "which columns": _columns,
    "a scale": lambda x, pick: (x * (1.0 + pick(3))).sin().tanh(),
    "an integer that equals a float": lambda x, pick: (x * [2, 2.5, 3][pick(3)]).sin().tanh(),
    "a sign": lambda x, pick: (x.sin() * [1.0, -1.0][pick(2)]).exp().tanh(),
    "minus one or minus two": lambda x, pick: (x.exp().clamp(max=5).sum(-1 - pick(2), keepdim=True) * x).tanh(),
    "a temperature": lambda x, pick: (x / (0.5 + pick(3))).softmax(-1) * x,
    "the probability of dropout": lambda x, pick: F.dropout(x.sin(), 0.1 + 0.2 * pick(3)).tanh(),
    "whether dropout is on": lambda x, pick: F.dropout(x.sin(), 0.5, training=bool(pick(2))).tanh(),
    "an epsilon": lambda x, pick: F.layer_norm(x.sin(), x.shape[-1:], eps=10.0 ** -(1 + pick(3))).tanh(),
    "a slope": lambda x, pick: F.leaky_relu(x.sin(), 0.1 * pick(3)).tanh(),
    "an activation": lambda x, pick: (torch.tanh, torch.sigmoid, F.gelu)[pick(3)](x.sin()) * x,
    "a method by its name": lambda x, pick: getattr(x.sin(), ("tanh", "sigmoid", "cos")[pick(3)])() * x,
    "a dimension": lambda x, pick: x.sin().softmax(pick(2) - 2) * x,
    "a shift": lambda x, pick: x.sin().roll(pick(3), -1).tanh(),
    "what is flipped": lambda x, pick: x.sin().flip(([-1], [-2], [-1, -2])[pick(3)]).tanh(),
    "a threshold": lambda x, pick: x.sin().clamp(max=0.2 * pick(3)).exp().tanh(),
    "a value to fill in": lambda x, pick: x.sin().masked_fill(x > 0, 0.3 * pick(3)).exp().tanh(),
    "an exponent": lambda x, pick: (x.sin().abs() ** (1 + pick(3))).tanh(),
    "how many are taken": lambda x, pick: x.sin() * x.topk(1 + pick(3), -1).values.sum(-1, keepdim=True).tanh(),
    "an equation": lambda x, pick: torch.einsum(("...i,...j->...i", "...i,...j->...j")[pick(2)], x.sin(), x).tanh(),
    "a size": lambda x, pick: F.interpolate(x.sin(), size=x.shape[-1] // (1 + pick(2))).tanh().mean(-1, True) * x,
    "how many chunks": lambda x, pick: torch.cat([p.softmax(-1) for p in x.chunk(1 << pick(3), -1)], -1) * x,
    "what is transposed": lambda x, pick: (x.sin().transpose(-1, -2).tanh().mT if pick(2) else x.cos()) * x,
    "a dtype": lambda x, pick: x.to((torch.float32, torch.float64)[pick(2)]).sin().tanh().to(x.dtype) * x,
    "where gradients stop": lambda x, pick: (x.sin().detach() if pick(2) else x.sin()).tanh() * x,
    "the width of noise": lambda x, pick: (x + torch.randn_like(x) * 0.1 * pick(3)).sin().tanh(),
    "an item that is written": lambda x, pick: x.sin().index_fill(-1, torch.tensor([pick(4)]), 0.0).tanh(),
    "keywords": lambda x, pick: (
        torch.sum(x.exp().clamp(max=4), **({"dim": -1, "keepdim": True} if pick(2) else {})) * x
    ),
    "a stride": lambda x, pick: x.sin().tanh()[..., :: 1 + pick(2)].mean(-1, keepdim=True) * x,
    "a window": lambda x, pick: F.avg_pool1d(x.sin(), 1 + 2 * pick(2), 1, pick(1)).mean(-1, True).tanh() * x,
}


GLOBAL = {"now": 0}


class Shared:
    """State in a class."""

    now = 0


class Holder(nn.Module):
    """Everything that a module's Python code may read; ``now`` is what changes between steps."""

    def __init__(self):
        super().__init__()
        self.attribute = 0
        self.config = types.SimpleNamespace(now=0)
        self.table = {"deep": {"now": 0}}
        self.listed = [0]
        self.array = np.zeros(1, dtype=np.int64)
        self.functions = [torch.tanh, torch.sigmoid, F.silu]
        self.function = torch.tanh
        self.endless = itertools.cycle([0, 1, 2, 1])
        self.own_random = random.Random(0)
        self.seed = 0
        self.collected = []
        self.calls = 0
        self.called = [0]
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mask", torch.ones(1))
        self.weights = nn.ParameterList(nn.Parameter(torch.full((1,), 0.5 + i)) for i in range(3))

    @property
    def generator(self):
        self.seed += 1
        return torch.Generator().manual_seed(self.seed)

    def set(self, now):
        self.attribute = self.config.now = self.table["deep"]["now"] = self.listed[0] = Shared.now = GLOBAL["now"] = now
        self.array[0] = now
        self.function = self.functions[now]
        self.scale = torch.tensor(1.0 + now)
        os.environ["PLIMSOLL_TEST_STATE"] = str(now)


def _counting(holder):
    holder.calls += 1
    return holder.calls % 3


def _counting_in_a_list(holder):
    holder.called[0] += 1
    return holder.called[0] % 3


def _counting_in_a_global(holder):
    GLOBAL["calls"] = GLOBAL.get("calls", 0) + 1
    return GLOBAL["calls"] % 3


PLACES = {
    "an attribute": lambda holder: holder.attribute,
    "a config object": lambda holder: holder.config.now,
    "a nested dict": lambda holder: holder.table["deep"]["now"],
    "a list": lambda holder: holder.listed[0],
    "an array of numpy's": lambda holder: int(holder.array[0]),
    "a class": lambda holder: Shared.now,
    "a global": lambda holder: GLOBAL["now"],
    "the environment": lambda holder: int(os.environ["PLIMSOLL_TEST_STATE"]),
    "a function in an attribute": lambda holder: holder.functions.index(holder.function),
    "an iterator": lambda holder: next(holder.endless),
    "a counter in an attribute": _counting,
    "a counter in a list": _counting_in_a_list,
    "a counter in a global": _counting_in_a_global,
    "Python's random": lambda holder: random.randrange(3),
    "numpy's random": lambda holder: int(np.random.randint(3)),
    "a random of its own": lambda holder: holder.own_random.randrange(3),
}


def _replaced_within(holder, x):
    y = (x * holder.mask).sin()
    holder.mask = holder.mask * 0.9
    return (y + holder.mask).tanh()


def _threshold_in_numpy(holder, x):
    where = x.detach().numpy() > float(holder.array[0]) / 4
    return (x * torch.from_numpy(where.astype(np.float32))).sin().tanh()


def _read_and_drawn(holder, x):
    noise = torch.rand(x.shape[-1:], generator=holder.generator)
    holder.collected.append(x.mean())
    return (x * noise).sin().tanh() if float(x.sum()) > -1e9 else x


WAYS = {
    "a threshold that numpy compares": _threshold_in_numpy,
    "a list that becomes a tensor, beside a value read": lambda holder, x: (
        (x.sin() + torch.tensor([float(v) for v in holder.listed]) * float(holder.scale.item())).tanh().exp()
    ),
    "draws of its own, beside a value read": _read_and_drawn,
    "a replaced buffer": lambda holder, x: (x * holder.scale).sin().tanh(),
    "a buffer that forward replaces": _replaced_within,
    "which of three weights": lambda holder, x: (x.sin() * holder.weights[holder.listed[0]]).tanh(),
    "which function": lambda holder, x: holder.function(x.sin()) * x,
    "a value read from a tensor": lambda holder, x: (x * holder.scale.item()).sin().tanh(),
    "a value read from a tensor, and Python's random": lambda holder, x: (
        (x * (1 + random.random())).sin().tanh() if holder.scale.item() > 1.5 else x.cos().tanh()
    ),
}


class Changing(nn.Module):
    """Does something else in every step: ``way`` says what, the holder what is now."""

    def __init__(self, way):
        super().__init__()
        self.holder = Holder()
        self.way = way

    def forward(self, x):
        return self.way(self.holder, x)


def _step(shape):
    rows, columns, _ = shape

    def step(model, index):
        random.seed(index)
        np.random.seed(index)
        for module in model.modules():
            if isinstance(module, Holder):
                module.set((index * 7 // 4) % 3)
        loss = weigh(model(batch(index, rows, columns, 8)))
        for module in model.modules():
            if isinstance(module, Holder):
                module.set((index + 1) % 3)  # for the step that comes
        loss.backward()
        return loss, torch.tensor([len(m.collected) + m.seed for m in model.modules() if isinstance(m, Holder)])

    return step


def _run(way, shape):
    """The same steps on two equal models, one of them managed: what differs, and in which steps calls kept everything."""
    torch.manual_seed(0)
    width = shape[-1]
    plain = Stack(*(Block(Changing(way), width) for _ in range(2)), width=width)
    managed = copy.deepcopy(plain)
    GLOBAL.clear()
    expected = train(plain, _step(shape), STEPS)
    GLOBAL.clear()
    kept = []

    def watched_step(model, index):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = _step(shape)(model, index)
        said = [str(warning.message) for warning in caught if "kept all its activations" in str(warning.message)]
        assert all(f" at {__file__}:" in text for text in said)
        kept.extend(index for _ in said)
        return made

    with manage(managed):
        found = train(managed, watched_step, STEPS)
    return differences(expected, found), set(kept)


def _of_kind(kind, pick):
    return lambda holder, x: KINDS[kind](x, lambda count: pick(holder) % count)


@pytest.mark.parametrize("kind", some(KINDS, 8))
def test_whatever_a_state_of_the_host_decides_gradients_are_right(kind):
    # One of both places by turns: the next test goes through all of them.
    turn = list(KINDS).index(kind)
    shapes, places = SHAPES, ("a nested dict", "Python's random")
    if not FULL:
        shapes, places = SHAPES[len(kind) % 3 :][:1], places[turn % 2 :][:1]
    for shape, place in itertools.product(shapes, places):
        wrong, kept = _run(_of_kind(kind, PLACES[place]), shape)
        assert wrong == []
        assert len(kept) <= 1


@pytest.mark.parametrize("place", some(PLACES, 3))
def test_wherever_the_state_is_gradients_are_right(place):
    for kind in ("a width", "a scale", "which of two tensors"):
        wrong, kept = _run(_of_kind(kind, PLACES[place]), SHAPES[0])
        assert wrong == []
        assert len(kept) <= 1


@pytest.mark.parametrize("way", some(WAYS, 5))
def test_tensors_and_functions_that_change_places_keep_gradients_right(way):
    wrong, kept = _run(WAYS[way], SHAPES[0])
    assert wrong == []
    assert len(kept) <= 1
