"""Random steps of which several micro-batches are in flight: every one that waits is counted, and the plans stay optimal."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planning.builders import random_stage
from planning.every_choice import assert_best_of, every_simulation
from plimsoll.artifacts.trace import Category
from plimsoll.planning.choice import Choice
from plimsoll.planning.describe import classes_at_peak, describe_peak
from plimsoll.planning.simulate import choices_of, run_choices
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex

STEPS = 24
ENUMERATED_CHOICES = 64


@pytest.mark.parametrize("in_flight", [2, 5])
def test_what_waits_is_what_a_step_alone_holds_between_forward_and_backward(in_flight: int) -> None:
    for seed in range(STEPS):
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


@pytest.mark.parametrize("in_flight", [2, 5])
def test_plans_for_several_micro_batches_fit_are_bounded_and_optimal_where_that_can_be_checked(in_flight: int) -> None:
    checked = 0
    for seed in range(STEPS):
        trace, costs = random_stage(seed)
        planner = Planner(StepIndex(trace, costs, in_flight=in_flight))
        low, high = planner.floor.peak_bytes, planner.baseline.peak_bytes
        budget_bytes = random.Random(seed).randint(int(0.98 * low), max(high, low))
        plan = solve(planner, budget_bytes=budget_bytes, raise_below_floor=False)
        again = run_choices(planner.index, choices_of(planner.index, plan.regions))
        assert again.peak_bytes == plan.predicted_peak_bytes, seed
        assert plan.lower_bound_seconds <= plan.predicted_seconds, seed
        assert plan.in_flight == in_flight, seed
        if plan.status.is_usable:
            assert plan.predicted_peak_bytes <= budget_bytes, seed
        everything = every_simulation(planner.index, ENUMERATED_CHOICES)
        if everything:
            checked += 1
            assert_best_of(plan, everything, budget_bytes)
    assert checked > STEPS // 3
