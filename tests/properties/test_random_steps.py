"""Random small steps: the budget holds, the bound holds, and what can be enumerated is optimal."""

from __future__ import annotations

import itertools
import random

import pytest

from planning.builders import random_step
from planning.every_choice import assert_best_of, every_simulation
from plimsoll.planning.choice import Choice
from plimsoll.planning.simulate import run_choices, simulate
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex

STEPS = 200
BATCH = 50
ENUMERATED_CHOICES = 64


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, STEPS, BATCH))
def test_plans_of_random_steps_fit_are_bounded_and_optimal_where_that_can_be_checked(first: int) -> None:
    checked = 0
    for seed in range(first, first + BATCH):
        trace, costs = random_step(seed).finish()
        index = StepIndex(trace, costs)
        baseline = run_choices(index, [Choice(frozenset(view.droppable)) for view in index.views])
        dropped = run_choices(index, [Choice(frozenset()) for _ in index.views])
        low, high = sorted((baseline.peak_bytes, dropped.peak_bytes))
        budget_bytes = random.Random(seed).randint(int(0.95 * low), high)
        plan = solve(Planner(StepIndex(trace, costs)), budget_bytes=budget_bytes, raise_below_floor=False)
        replayed = simulate(trace, costs, plan.regions)
        assert replayed.peak_bytes == plan.predicted_peak_bytes, seed
        assert replayed.seconds == pytest.approx(plan.predicted_seconds), seed
        assert plan.lower_bound_seconds <= plan.predicted_seconds, seed
        if plan.status.is_usable:
            assert plan.predicted_peak_bytes <= budget_bytes, seed
        everything = every_simulation(index, ENUMERATED_CHOICES)
        if everything:
            checked += 1
            assert_best_of(plan, everything, budget_bytes)
    assert checked > BATCH // 3


@pytest.mark.parametrize("seed", range(20))
def test_seconds_do_not_rise_with_the_budget(seed: int) -> None:
    trace, costs = random_step(seed).finish()
    planner = Planner(StepIndex(trace, costs))
    free = solve(planner, budget_bytes=None)
    budgets = range(
        free.floor_bytes, free.baseline_peak_bytes + 1, max((free.baseline_peak_bytes - free.floor_bytes) // 5, 1)
    )
    seconds = [solve(planner, budget_bytes=budget_bytes).predicted_seconds for budget_bytes in budgets]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(seconds))
