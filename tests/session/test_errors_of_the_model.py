"""Errors that a model or its hooks raise while a call is traced: training goes on as it does without a budget."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll
from long_cases import some
from plimsoll.errors import TracingFailed
from plimsoll.units import MIB
from steps import Stack, mean_square

ROWS, WIDTH, STEPS = 256, 64, 7
ROOMY = 64 * MIB
Hook = Callable[[torch.Tensor], None]


class Skip(Exception):
    """An error of the user's own class."""


class Strict(Stack):
    """Dropout, running statistics, and a check of the input after them."""

    kind: type[Exception] = ValueError

    def __init__(self) -> None:
        super().__init__(3, WIDTH)
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, flag: float = 0.0) -> torch.Tensor:
        x = super().forward(self.statistics(x))
        if flag:
            raise self.kind("a bad batch")
        return x


def facts(model: Any) -> tuple[float, ...]:
    """The random state and the running statistics, as numbers."""
    return torch.rand(1).item(), model.statistics.running_mean.sum().item(), float(model.statistics.num_batches_tracked)


def trained(budget: int | None, bad: tuple[int, ...], rows: Callable[[int], int]) -> list[Any]:
    torch.manual_seed(0)
    model = Strict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = None if budget is None else plimsoll.attach(model, budget, optimizer=optimizer)
    found: list[Any] = []
    for number in range(STEPS):
        batch = torch.randn(rows(number), WIDTH)
        try:
            loss = mean_square(model(batch, flag=1.0) if number in bad else model(batch))
        except Strict.kind as error:
            found.append((str(error), *facts(model)))
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), *facts(model)))
    if handle is not None:
        handle.remove()
    return found


@pytest.mark.parametrize("bad", [(0,), (1,), (4,), (0, 1), (2, 4)])
@pytest.mark.parametrize(
    "rows", some([lambda _: ROWS, lambda number: ROWS + 32 * number], 1), ids=["one shape", "new shapes"]
)
def test_an_error_of_forward_leaves_random_states_and_statistics_as_without_a_budget(
    bad: tuple[int, ...], rows: Callable[[int], int]
):
    assert trained(ROOMY, bad, rows) == trained(None, bad, rows)


@pytest.mark.parametrize("kind", some([Skip, StopIteration, KeyError, torch.OutOfMemoryError], 2))
def test_an_error_may_have_any_class(kind: type[Exception], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Strict, "kind", kind)
    assert trained(ROOMY, (0, 3), lambda _: ROWS) == trained(None, (0, 3), lambda _: ROWS)


def test_a_call_that_runs_out_of_memory_while_it_is_traced_is_as_without_a_budget_at_any_shape(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(Strict, "kind", torch.OutOfMemoryError)

    def rows(number: int) -> int:
        return ROWS + 32 * number

    assert trained(ROOMY, (0, 1, 3), rows) == trained(None, (0, 1, 3), rows)


SEEN: list[weakref.ref[torch.Tensor]] = []
"""The inputs of a block in each call. A global, because what a closure holds is restored after a trace."""


def test_what_a_trace_that_ran_out_of_memory_has_made_is_gone_when_the_call_runs():
    """The call raises the error of the trace at its end, unless it fails itself."""
    model = Strict()
    SEEN.clear()

    def hook(module: nn.Module, inputs: Any) -> None:
        SEEN.append(weakref.ref(inputs[0]))
        if len(SEEN) == 1:
            raise torch.OutOfMemoryError("in the trace alone")
        assert SEEN[0]() is None

    model.blocks[2].register_forward_pre_hook(hook)
    with plimsoll.attach(model, ROOMY), pytest.raises(torch.OutOfMemoryError, match="in the trace alone") as raised:
        model(torch.randn(ROWS, WIDTH))
    assert any("while attach traced its call" in note for note in raised.value.__notes__)
    assert len(SEEN) == 2


def dead(gradient: torch.Tensor) -> None:
    if not gradient.abs().max() > 0:
        raise RuntimeError("a dead gradient")


def not_finite(gradient: torch.Tensor) -> None:
    if not torch.isfinite(gradient / gradient.norm()).all():
        raise FloatingPointError("not finite")


def singular(gradient: torch.Tensor) -> None:
    torch.linalg.cholesky(gradient.T @ gradient / gradient.norm() ** 2 + 1e-6 * torch.eye(gradient.shape[1]))


class Asserting(torch.autograd.Function):
    """A backward formula that checks what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        if not torch.allclose(y.sum(-1), torch.ones(())):
            raise RuntimeError("not a softmax")
        return y * (gradient - (gradient * y).sum(-1, keepdim=True))


class Asserts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Asserting.apply(x)


def on_weight(hook: Hook) -> Callable[[Any], None]:
    return lambda model: model.blocks[1].up.weight.register_hook(hook)


def on_module(model: Any) -> None:
    model.blocks[1].up.register_full_backward_hook(lambda module, inputs, outputs: dead(inputs[0]))


def in_formula(model: Any) -> None:
    model.blocks.insert(1, Asserts())


@pytest.mark.parametrize(
    "checked",
    some([on_weight(dead), on_weight(not_finite), on_weight(singular), on_module, in_formula], 2),
    ids=["dead", "finite", "cholesky", "module hook", "formula"],
)
def test_hooks_and_formulas_that_check_values_are_traced_with_the_true_ones(
    checked: Callable[[Any], None], caplog: pytest.LogCaptureFixture
):
    def losses(budget: int | None) -> list[float]:
        torch.manual_seed(0)
        model = Stack(3, WIDTH)
        checked(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = None if budget is None else plimsoll.attach(model, budget)
        found = []
        for _ in range(STEPS):
            loss = mean_square(model(torch.randn(ROWS, WIDTH)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        if handle is not None:
            assert handle.plan is not None
            handle.remove()
        return found

    with caplog.at_level(logging.WARNING, logger="plimsoll"):
        assert losses(3 * MIB) == losses(None)
    assert any("reads zeros" in each.getMessage() for each in caplog.records)


def raising_at(*steps: int) -> Callable[[Any], None]:
    """A hook that raises in some of the user's steps: a check that the loop catches."""
    number = -1

    def install(model: Any) -> None:
        def hook(gradient: torch.Tensor) -> None:
            if model.step in steps:
                raise ValueError("in backward")

        model.step = number
        model.blocks[1].up.weight.register_hook(hook)

    return install


def test_an_error_of_backward_that_the_loop_catches_only_delays_the_plan():
    def losses(budget: int | None) -> list[Any]:
        torch.manual_seed(0)
        model: Any = Stack(3, WIDTH)
        raising_at(0, 1)(model)
        handle = None if budget is None else plimsoll.attach(model, budget)
        found: list[Any] = []
        for number in range(STEPS):
            model.step = number
            try:
                loss = mean_square(model(torch.randn(ROWS, WIDTH)))
                loss.backward()
            except ValueError as error:
                found.append(str(error))
            else:
                found.append((loss.item(), torch.rand(1).item()))
            model.zero_grad()
        if handle is not None:
            assert handle.plan is not None
            handle.remove()
        return found

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert losses(ROOMY) == losses(None)
    assert sum("this step is not planned for" in str(each.message) for each in caught) == 2


def test_a_backward_that_fails_in_every_trace_is_an_error_in_the_fourth_call():
    model: Any = Stack(3, WIDTH)
    raising_at(*range(9))(model)
    plimsoll.attach(model, ROOMY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(3):
            model.step = number
            with pytest.raises(ValueError, match="in backward"):
                mean_square(model(torch.randn(ROWS, WIDTH))).backward()
        with pytest.raises(TracingFailed, match="in backward"):
            model(torch.randn(ROWS, WIDTH))
