"""Random small steps, with several micro-batches in flight too: budgets and bounds hold, what can be enumerated is optimal."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from long_cases import some
from planning.builders import random_stage, random_step
from planning.every_choice import assert_best_of, every_simulation
from plimsoll.artifacts.trace import Category
from plimsoll.planning.choice import Choice
from plimsoll.planning.describe import classes_at_peak, describe_peak
from plimsoll.planning.simulate import choices_of, run_choices
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex

STEPS = 200
BATCH = 50
PIPELINES = 24
ENUMERATED_CHOICES = 64


def check_plan(planner: Planner, seed: int, *, low: int, in_flight: int = 1) -> bool:
    """A plan for a random budget fits and is bounded; whether all choices could be tried, too: then it is the best one."""
    high = planner.baseline.peak_bytes
    budget_bytes = random.Random(seed).randint(low, max(high, low))
    plan = solve(planner, budget_bytes=budget_bytes, raise_below_floor=False)
    again = run_choices(planner.index, choices_of(planner.index, plan.regions))
    assert again.peak_bytes == plan.predicted_peak_bytes, seed
    assert again.seconds == pytest.approx(plan.predicted_seconds), seed
    assert plan.lower_bound_seconds <= plan.predicted_seconds, seed
    assert plan.in_flight == in_flight, seed
    if plan.status.is_usable:
        assert plan.predicted_peak_bytes <= budget_bytes, seed
    everything = every_simulation(planner.index, ENUMERATED_CHOICES)
    if everything:
        assert_best_of(plan, everything, budget_bytes)
    return bool(everything)


@pytest.mark.parametrize("first", some(range(0, STEPS, BATCH), 1))
def test_plans_of_random_steps_fit_are_bounded_and_optimal_where_that_can_be_checked(first: int) -> None:
    checked = 0
    for seed in range(first, first + BATCH):
        planner = Planner(StepIndex(*random_step(seed).finish()))
        dropped = run_choices(planner.index, [Choice(frozenset()) for _ in planner.index.views])
        checked += check_plan(planner, seed, low=int(0.95 * min(dropped.peak_bytes, planner.baseline.peak_bytes)))
    assert checked > BATCH // 3


@pytest.mark.parametrize("in_flight", some([2, 5], 1))
def test_plans_for_several_micro_batches_fit_are_bounded_and_optimal_where_that_can_be_checked(in_flight: int) -> None:
    checked = 0
    for seed in range(PIPELINES):
        planner = Planner(StepIndex(*random_stage(seed), in_flight=in_flight))
        checked += check_plan(planner, seed, low=int(0.98 * planner.floor.peak_bytes), in_flight=in_flight)
    assert checked > PIPELINES // 3


@pytest.mark.parametrize("in_flight", [2, 5])
def test_what_waits_is_what_a_step_alone_holds_between_forward_and_backward(in_flight: int) -> None:
    for seed in range(PIPELINES):
        trace, costs = random_stage(seed)
        draw = random.Random(seed)
        alone, among = StepIndex(trace, costs), StepIndex(trace, costs, in_flight=in_flight)
        choices = [Choice(frozenset(v for v in view.droppable if draw.random() < 0.5)) for view in alone.views]
        one, several = run_choices(alone, choices), run_choices(among, choices)
        lasting = sum(
            storage.bytes
            for storage in trace.storages
            if storage.born < 0 and storage.category is not Category.INPUT and 2 * storage.dies > alone.handover
        )
        waiting = (in_flight - 1) * (int(one.curve[alone.handover]) - lasting)
        is_before_step = np.arange(alone.instants) < among.last_wait
        assert np.array_equal(several.curve, one.curve + waiting * is_before_step), seed
        assert several.seconds == one.seconds, seed
        assert sum(holder.bytes for holder in describe_peak(several).holders) == several.peak_bytes, seed
        assert sum(classes_at_peak(several).values()) == several.peak_bytes, seed


@pytest.mark.parametrize("seed", some(range(20), 10))
def test_seconds_do_not_rise_with_the_budget(seed: int) -> None:
    planner = Planner(StepIndex(*random_step(seed).finish()))
    low, high = planner.floor.peak_bytes, planner.baseline.peak_bytes
    budgets = range(low, high + 1, max((high - low) // 5, 1))
    seconds = [solve(planner, budget_bytes=budget_bytes).predicted_seconds for budget_bytes in budgets]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(seconds))
