"""When calls of a region need not be compared, and what ends that."""

from __future__ import annotations

import contextlib
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

import plimsoll.engine.constancy
from contracts.harness import Block, Stack, batch, manage, weigh
from plimsoll.engine.constancy import COMPARED_EVERY


@pytest.fixture(autouse=True)
def _proofs_begin_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plimsoll.engine.constancy, "CALLS_BEFORE", 0)


class Scaled(nn.Module):
    """Multiplies by what ``read`` finds in every call."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x):
        return (x * self.read(self)).sin().tanh()


def _stack(read):
    torch.manual_seed(0)
    return Stack(Block(Scaled(read), 8), Block(Scaled(read), 8), width=8)


def _step(model, index=0):
    weigh(model(batch(index, 4, 16, 8))).backward()


def _steps(model, count):
    for index in range(count):
        _step(model, index)


def _proofs(handle):
    return [service.constancy for region in handle.regions.values() for service in region.services.values()]


def _after(read, steps=6):
    """The proofs of a model after some steps."""
    model = _stack(read)
    with manage(model) as handle:
        for index in range(steps):
            _step(model, index)
        return _proofs(handle)


def test_a_model_without_state_is_proved_constant():
    assert all(proof.is_proved for proof in _after(lambda module: 0.5))


class _Hidden(threading.local):
    value = 0.5


HIDDEN = _Hidden()
RANDOM = np.random.default_rng(0)
FACTORS = iter([0.5] * 1000)
BY_NAME = types.SimpleNamespace(factor_now=0.5)


@contextlib.contextmanager
def _managed():
    yield 0.5


def _within_a_context(module):
    with _managed() as factor:
        return factor


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda module: HIDDEN.value, "hide its state"),
        (lambda module: float(RANDOM.random()) * 0 + 0.5, "Generator"),
        (lambda module: next(FACTORS), "list_iterator"),
        (lambda module: getattr(BY_NAME, f"factor_{'now'}"), "makes a string"),
        (lambda module: vars(BY_NAME)["factor_now"], "vars"),
        (lambda module: BY_NAME.__dict__["factor_now"], "all attributes"),
        (lambda module: globals()["BY_NAME"].factor_now, "globals"),
        (lambda module: eval("0.5"), "eval"),
        (_within_a_context, "_managed"),
    ],
    ids=[
        "a thread's own",
        "numpy's generator",
        "an iterator",
        "a made name",
        "vars",
        "__dict__",
        "globals",
        "eval",
        "with",
    ],
)
def test_code_whose_state_python_does_not_show_is_always_compared(read, reason):
    for proof in _after(read):
        assert not proof.is_proved
        assert reason in proof.reason


def test_code_that_reads_data_is_always_compared():
    assert not any(proof.is_proved for proof in _after(lambda module: float(torch.ones(()) / 2)))


def test_a_region_that_is_called_with_an_object_is_always_compared():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, config):
            return (self.linear(x) * config.factor).sin().tanh()

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Reader() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, BY_NAME_FACTOR)
            return x

    model = Root()
    with manage(model) as handle:
        for index in range(6):
            weigh(model(batch(index, 4, 16, 8))).backward()
        assert all("arguments" in proof.reason for proof in _proofs(handle))


BY_NAME_FACTOR = types.SimpleNamespace(factor=0.5)


def test_code_under_a_tracer_of_the_users_is_compared_and_the_tracer_stays():
    model = _stack(lambda module: 0.5)

    def tracer(frame, event, argument):
        return None

    before = sys.gettrace()
    with manage(model) as handle:
        try:
            sys.settrace(tracer)
            for index in range(6):
                _step(model, index)
            assert sys.gettrace() is tracer
        finally:
            sys.settrace(before)
        assert not any(proof.is_proved for proof in _proofs(handle))


def test_no_tracer_is_left_where_a_watched_forward_fails():
    fails = {"now": False}

    def read(module):
        if fails["now"]:
            raise RuntimeError("as the model does")
        return 0.5

    model = _stack(read)
    with manage(model):
        _step(model)
        fails["now"] = True
        with pytest.raises(RuntimeError, match="as the model does"):
            _step(model, 1)
        assert (sys.gettrace(), sys.getprofile()) == (None, None)


def test_a_state_that_changes_in_every_step_is_soon_left_alone():
    state = {"factor": 0.5}
    model = _stack(lambda module: state["factor"] and 0.5)
    with manage(model) as handle:
        for index in range(16):
            state["factor"] = 1.0 + index  # read, but without effect
            _step(model, index)
        assert all("changes all the time" in proof.reason for proof in _proofs(handle))


def test_a_contradiction_ends_the_proof(monkeypatch):
    factors = {"now": 0.5}
    model = _stack(lambda module: factors["now"])
    monkeypatch.setattr("plimsoll.engine.host_state.HostState.holds", lambda self: True)  # blind
    with manage(model, sentinel_every=10**9) as handle:
        for index in range(6):
            _step(model, index)
        assert all(proof.is_proved for proof in _proofs(handle))
        factors["now"] = 0.25
        with pytest.warns(UserWarning, match="kept everything"):
            _steps(model, COMPARED_EVERY)
        assert any("though nothing" in proof.reason for proof in _proofs(handle))
