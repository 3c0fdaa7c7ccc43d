"""A backward in two halves, as zero-bubble pipelines run it: gradients are equal, and nothing is rebuilt twice."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

import plimsoll
from plimsoll.artifacts.plan import Plan
from plimsoll.engine.apply import apply_plan
from plimsoll.engine.replay import CallReplay
from plimsoll.tracing.meters.memory import PeakMeter
from ranks.pipeline_scenarios import PARTS, Gpt2Part

SIZE = (2, 24, 32)


@pytest.fixture(params=PARTS)
def stage(request: pytest.FixtureRequest) -> nn.Module:
    """The middle of a pipeline: hidden states in, hidden states out, with dropout and without."""
    torch.manual_seed(0)
    return PARTS[request.param](1, 3, 4)


def plan_for(stage: nn.Module) -> Plan:
    return plan_of("gpt2" if isinstance(stage, Gpt2Part) else "llama")


@functools.cache
def plan_of(family: str) -> Plan:
    hidden = torch.randn(*SIZE, requires_grad=True)
    return plimsoll.plan(PARTS[family](1, 3, 4), hidden, loss=torch.sum, strategy="full")


class Flight:
    """Micro-batches of one stage, each with its own input, dropout and incoming gradient."""

    def __init__(self, stage: nn.Module) -> None:
        self.stage = stage
        self.gradients: list[torch.Tensor] = []

    def forward(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(number)
        hidden = torch.randn(*SIZE, requires_grad=True)
        return hidden, self.stage(hidden)

    def first_half(self, hidden: torch.Tensor, out: torch.Tensor) -> list[dict[str, Any]]:
        gradients, groups = stage_backward_input([out], [torch.ones(*SIZE)], [hidden], self.stage.parameters())
        self.gradients += [gradient for gradient in gradients if gradient is not None]
        return groups

    def run_halves(self, count: int, *, ahead: int) -> list[torch.Tensor]:
        """Second halves wait behind ``ahead`` further micro-batches."""
        waiting = []
        for number in range(count):
            waiting.append(self.first_half(*self.forward(number)))
            if len(waiting) > ahead:
                stage_backward_weight(self.stage.parameters(), waiting.pop(0))
        for groups in waiting:
            stage_backward_weight(self.stage.parameters(), groups)
        return self._collect()

    def run_whole(self, count: int) -> list[torch.Tensor]:
        for number in range(count):
            hidden, out = self.forward(number)
            (gradient,) = stage_backward((out,), (torch.ones(*SIZE),), [hidden])
            assert gradient is not None
            self.gradients.append(gradient)
        return self._collect()

    def _collect(self) -> list[torch.Tensor]:
        found = [*self.gradients, *(p.grad for p in self.stage.parameters() if p.grad is not None)]
        self.stage.zero_grad()
        self.gradients = []
        return found


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[int, int]]]:
    """How often each slot of each call was rebuilt; replays are kept, so that ids stay their own."""
    counts: Counter[tuple[int, int]] = Counter()
    replays: list[CallReplay] = []
    original = CallReplay.run

    def run(self: CallReplay, slot: int, leaves: Any) -> Any:
        if self not in replays:
            replays.append(self)
        counts[replays.index(self), slot] += 1
        return original(self, slot, leaves)

    monkeypatch.setattr(CallReplay, "run", run)
    yield counts
    replays.clear()


@pytest.mark.parametrize("ahead", [0, 2])
def test_gradients_of_two_halves_are_those_without_a_plan(stage: nn.Module, ahead: int):
    plain = Flight(stage).run_halves(4, ahead=ahead)
    with apply_plan(stage, plan_for(stage), splits_backward=True):
        assert equal(Flight(stage).run_halves(4, ahead=ahead), plain)
        assert equal(Flight(stage).run_halves(4, ahead=ahead), plain)


def test_after_the_first_micro_batch_no_slot_is_rebuilt_twice(stage: nn.Module, rebuilt: Counter[tuple[int, int]]):
    flight = Flight(stage)
    with apply_plan(stage, plan_for(stage), splits_backward=True):
        flight.run_halves(1, ahead=0)
        assert max(rebuilt.values()) == 2, "the first micro-batch shows what both halves read"
        rebuilt.clear()
        flight.run_halves(3, ahead=1)
        assert rebuilt
        assert set(rebuilt.values()) == {1}


def test_no_op_of_a_recipe_runs_in_the_second_half(stage: nn.Module):
    flight = Flight(stage)
    with apply_plan(stage, plan_for(stage), splits_backward=True):
        flight.run_halves(1, ahead=0)
        managed = _ops_of_second_half(flight)
    assert managed == _ops_of_second_half(flight)


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # what is held is an alias: autograd makes another one of it
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _ops_of_second_half(flight: Flight) -> Counter[str]:
    groups = flight.first_half(*flight.forward(7))
    with _Ops() as ops:
        stage_backward_weight(flight.stage.parameters(), groups)
    flight._collect()
    return ops.counts


def test_what_is_held_between_the_halves_is_let_go_by_the_second(stage: nn.Module):
    flight = Flight(stage)
    with apply_plan(stage, plan_for(stage), splits_backward=True):
        flight.run_halves(2, ahead=1)
        flight.run_halves(1, ahead=0)  # gradients are there from here on
        gc.collect()
        with PeakMeter() as meter:
            flight.run_halves(3, ahead=2)
            gc.collect()
        assert meter.resident_bytes <= 0


def test_a_graph_that_is_kept_for_a_second_backward_holds_nothing_more_unless_asked(
    stage: nn.Module, rebuilt: Counter[tuple[int, int]]
):
    with apply_plan(stage, plan_for(stage)):
        for _ in range(2):
            rebuilt.clear()
            _, out = Flight(stage).forward(0)
            out.sum().backward(retain_graph=True)
            first = [p.grad.clone() for p in stage.parameters() if p.grad is not None]
            stage.zero_grad()
            out.sum().backward()
            assert equal(first, [p.grad for p in stage.parameters() if p.grad is not None])
            assert set(rebuilt.values()) == {2}
            stage.zero_grad()
