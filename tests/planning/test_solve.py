"""Plans under budgets: they fit, they say why, and they fail with the floor in hand."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from planning.builders import OUT, StepBuilder, simulate, transformer
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import BudgetBelowFloor
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex

STEP = transformer(6, width=1024).finish()
PLANNER = Planner(StepIndex(*STEP))
FREE = solve(PLANNER, budget_bytes=None)


def budget_at(share: float) -> int:
    return int(FREE.floor_bytes + share * (FREE.baseline_peak_bytes - FREE.floor_bytes))


@pytest.fixture(scope="module")
def tight() -> Plan:
    return solve(PLANNER, budget_bytes=budget_at(0.3))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_plan_stays_within_its_budget_in_the_simulator(share: float) -> None:
    plan = solve(PLANNER, budget_bytes=budget_at(share))
    assert plan.status.is_usable
    assert simulate(*STEP, plan.regions).peak_bytes == plan.predicted_peak_bytes <= budget_at(share)
    assert plan.baseline_seconds <= plan.lower_bound_seconds <= plan.predicted_seconds
    assert plan.gap_of_step < 0.01


@pytest.mark.parametrize("budget_bytes", [None, FREE.baseline_peak_bytes])
def test_without_scarcity_everything_is_kept(budget_bytes: int | None) -> None:
    plan = solve(PLANNER, budget_bytes=budget_bytes)
    assert plan.status is Status.OPTIMAL
    assert all(region.is_untouched for region in plan.regions)
    assert plan.price_seconds_per_byte == 0.0


def test_the_solver_is_given_bytes_without_rounding() -> None:
    problem = PLANNER.problem
    changes = problem.matrix.toarray()[len(problem.effects) :, : problem.columns]
    assert np.array_equal(
        -changes.cumsum(axis=0) * problem.unit_bytes, np.concatenate(problem.windows.added_bytes, axis=1)
    )


def test_plan_gives_a_reason_in_terms_of_the_price_for_every_value(tight: Plan) -> None:
    assert tight.price_seconds_per_byte > 0
    for region in tight.regions:
        assert all(decision.reason for decision in region.decisions)
    recomputed = [d for r in tight.regions for d in r.decisions if d.decision is Decision.RECOMPUTE]
    assert recomputed
    assert all("recompute costs" in d.reason and "memory is worth" in d.reason for d in recomputed)


def test_replay_seconds_of_values_and_regions_add_up_to_the_overhead(tight: Plan) -> None:
    of_regions = sum(region.replay_seconds for region in tight.regions)
    of_values = sum(decision.seconds for region in tight.regions for decision in region.decisions)
    assert of_regions == pytest.approx(tight.predicted_seconds - tight.baseline_seconds)
    assert of_values == pytest.approx(of_regions)


def test_plan_below_floor_names_the_floor_and_who_holds_it_and_one_at_the_floor_is_met() -> None:
    with pytest.raises(BudgetBelowFloor) as raised:
        solve(PLANNER, budget_bytes=FREE.floor_bytes - 1)
    assert "smallest reachable peak" in raised.value.found
    assert "parameters" in raised.value.why
    assert str(FREE.floor_bytes) in raised.value.next
    plan = solve(PLANNER, budget_bytes=FREE.floor_bytes - 1, raise_below_floor=False)
    assert (plan.status, plan.floor_bytes) == (Status.INFEASIBLE, FREE.floor_bytes)
    assert solve(PLANNER, budget_bytes=FREE.floor_bytes).predicted_peak_bytes == FREE.floor_bytes


def test_measured_excess_is_taken_off_the_budget() -> None:
    plan = solve(PLANNER, budget_bytes=budget_at(0.5), excess_bytes=1000)
    assert plan.predicted_peak_bytes <= budget_at(0.5) - 1000
    assert plan.budget_bytes == budget_at(0.5)


def test_an_excess_that_the_program_does_not_see_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, above = PLANNER.problem.choose, solve(PLANNER, budget_bytes=budget_at(0.55)).predicted_peak_bytes
    expected = solve(PLANNER, budget_bytes=above - 1)
    rungs = [each.seconds for each in PLANNER.ladder if each.peak_bytes < above]
    assert expected.predicted_seconds < min(rungs)
    monkeypatch.setattr(
        PLANNER.problem, "choose", lambda target, gap: choose(budget_at(0.55) if target > above - 30 else target, gap)
    )
    assert solve(PLANNER, budget_bytes=above - 1).predicted_seconds == expected.predicted_seconds


def test_a_named_strategy_above_the_budget_points_to_auto() -> None:
    with pytest.raises(BudgetBelowFloor) as raised:
        solve(PLANNER, budget_bytes=budget_at(0.5), strategy="none")
    assert "auto" in raised.value.next


def test_frontier_falls_from_floor_to_unmanaged_peak() -> None:
    points = FREE.frontier
    assert points[0].peak_bytes == FREE.floor_bytes
    assert points[-1].peak_bytes == FREE.baseline_peak_bytes
    assert all(a.peak_bytes < b.peak_bytes and a.step_seconds > b.step_seconds for a, b in itertools.pairwise(points))


def test_plans_are_the_same_every_time(tight: Plan) -> None:
    again = solve(Planner(StepIndex(*STEP)), budget_bytes=budget_at(0.3))
    assert msgspec.structs.replace(again, solve_seconds=0.0) == msgspec.structs.replace(tight, solve_seconds=0.0)


def test_a_peak_that_no_decision_reaches_is_explained() -> None:
    step = StepBuilder()
    one_hot = step.op("one_hot", size=5000, module="embedding")
    x = step.op("mm", one_hot, size=10, module="embedding")
    for block in range(3):
        with step.region(f"blocks.{block}", x) as region:
            a = step.op("up", x, size=50, saves=(x,), module="up")
            x = step.op("down", a, size=10, saves=(a, OUT), module="down")
            region.outputs = (x,)
    step.op("loss", x, size=1, module="loss")
    plan = solve(Planner(StepIndex(*step.finish())), budget_bytes=None, strategy="full")
    assert plan.predicted_peak_bytes == plan.baseline_peak_bytes
    assert any("resident after forward" in note and "one_hot" in note for note in plan.notes)


def test_a_step_without_regions_keeps_everything() -> None:
    step = StepBuilder()
    x = step.op("source", size=10)
    step.op("loss", x, size=1, saves=(x,))
    plan = solve(Planner(StepIndex(*step.finish())), budget_bytes=None)
    assert plan.status is Status.OPTIMAL
    assert plan.regions == ()
    with pytest.raises(BudgetBelowFloor):
        solve(Planner(StepIndex(*step.finish())), budget_bytes=1)
