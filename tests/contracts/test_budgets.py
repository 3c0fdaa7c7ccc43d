"""Budgets between floor and unmanaged peak: kept to by every measured step, predicted closely, and no bit changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import plimsoll
from long_cases import all_but
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import silent
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex
from plimsoll.session.step_planner import trace_and_cost
from plimsoll.session.task import TrainingTask
from plimsoll.session.trial import confirmed, run_trial
from steps import Step, conv_net, gpt2, llama, on, vit

SHARES = (0.10, 0.25, 0.50, 0.75, 0.90)
STRATEGIES = ("full", "selective:mlp", "every:2", "sqrt", "input-only", "selective:attention")
"""A GPU runs all, a CPU the first two."""


@dataclass
class Case:
    """A model, its step, the shares to verify (benchmarks verify all), and how far a predicted peak may be off."""

    build: Callable[[int], Step]
    verified_shares: tuple[float, ...] = (0.10, 0.50)
    tolerance: float = 0.02


CASES = {
    "llama": Case(llama, verified_shares=(0.10, 0.90)),
    "gpt2 with dropout": Case(gpt2),
    "vit with dropout": Case(vit, verified_shares=(0.10, 0.90)),
    "conv net with batch norm": Case(conv_net, tolerance=0.05),
}


class Planned:
    """One step traced once: every budget's plan is solved, run and solved again as ``plimsoll.plan`` does it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        # A GPU hands out 512 bytes at a time: activations have to be large beside that.
        self.model, self.batch, self.loss = on(device, case.build(1 if device.type == "cpu" else 8))
        self.task = TrainingTask(model=self.model, batch=self.batch, loss=self.loss)
        self.trace, self.costs = trace_and_cost(self.task)
        self.planner = Planner(StepIndex(self.trace, self.costs))
        self.limits = self.solve(None)

    def solve(self, budget_bytes: int | None, excess_bytes: int = 0) -> Plan:
        return solve(self.planner, budget_bytes=budget_bytes, excess_bytes=excess_bytes)

    def budget_at(self, share: float) -> int:
        """The budget at a share of the way from the floor to the unmanaged peak."""
        return self.limits.floor_bytes + int(share * (self.limits.baseline_peak_bytes - self.limits.floor_bytes))

    def confirmed(self, budget_bytes: int) -> Plan:
        return confirmed(
            self.solve(budget_bytes),
            functools.partial(run_trial, self.task.step()),
            lambda excess_bytes, _: self.solve(budget_bytes, excess_bytes),
            max_error=0.0,
            progress=silent,
        )


@pytest.fixture(scope="module", params=all_but(CASES, "gpt2 with dropout"))
def planned(request: pytest.FixtureRequest, device: torch.device) -> tuple[Planned, Case]:
    case = CASES[request.param]
    return Planned(case, device), case


def test_every_budget_is_kept_and_no_bit_changes(planned: tuple[Planned, Case]):
    step, case = planned
    assert not broken(step, case, {share: step.confirmed(step.budget_at(share)) for share in case.verified_shares})


def test_every_strategy_keeps_its_promise_and_every_bit(planned: tuple[Planned, Case], device: torch.device):
    step, case = planned
    asked = STRATEGIES[: 2 if device.type == "cpu" else None]
    assert not broken(step, case, {name: solve(step.planner, budget_bytes=None, strategy=name) for name in asked})


def broken(step: Planned, case: Case, plans: dict[Any, Plan]) -> list[str]:
    """Plans that change a bit, take more than they may, or take other than predicted."""
    wrong = []
    for name, plan in plans.items():
        receipt = plimsoll.verify(step.model, step.batch, plan, loss=step.loss, steps=1)
        error = abs(plan.predicted_peak_bytes / receipt.measured_peak_bytes - 1)
        if not receipt.verdict.is_pass or not receipt.is_bit_equal or error > case.tolerance:
            wrong.append(f"{name}: {receipt.verdict}, predicted peak off by {error:.1%}")
    return wrong


def test_predicted_seconds_do_not_rise_with_the_budget(planned: tuple[Planned, Case]):
    step, _ = planned
    plans = [step.solve(step.budget_at(share)) for share in (0.0, *SHARES, 1.0)]
    seconds = [plan.predicted_seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in plans)
    assert all(plan.lower_bound_seconds <= plan.predicted_seconds for plan in plans)
