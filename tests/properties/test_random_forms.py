"""Random small steps whose values may take other forms: budgets, limits and bounds hold, what can be enumerated is optimal."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import numpy as np
import pytest

from long_cases import some
from planning.builders import random_step, simulate, transformer
from planning.every_choice import assert_best_of, every_simulation
from planning.form_builders import block_forms, random_choice, random_forms
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.forms import Forms
from plimsoll.artifacts.trace import Trace
from plimsoll.planning import choices as generation
from plimsoll.planning.choice import Limits
from plimsoll.planning.choices import ChoiceSet
from plimsoll.planning.effects import likeness
from plimsoll.planning.frontier import Hull
from plimsoll.planning.measuring import Measuring
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex
from plimsoll.planning.windows import build_windows

STEPS = 40
BATCH = 20
ENUMERATED_CHOICES = 1500
TOLERANCE = 1.002
"""What a plan may be off by, as is stated."""
SEARCHED = 1.05
"""The same, where a search for the choices of large regions is made to do with tiny ones, of which one op is a tenth."""


def random_case(seed: int) -> tuple[Trace, Costs, Forms, Limits]:
    draw = random.Random(f"case {seed}")
    trace, costs = random_step(seed, regions=2 if seed % 2 else 3, ops=4).finish()
    forms = random_forms(trace, costs, seed, share=draw.choice([0.3, 0.6, 1.0]))
    return trace, costs, forms, Limits(draw.choice([0.0, 0.01, 0.05, 0.3]) ** 2, draw.choice([None, None, 0, 5, 20]))


@pytest.mark.parametrize("first", some(range(0, STEPS, BATCH), 1))
def test_plans_keep_to_all_limits_and_are_optimal_where_that_can_be_checked(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = packed = 0
    for seed in range(first, first + BATCH):
        # In every second step the choices are searched for as in large regions, not enumerated.
        monkeypatch.setattr(generation, "_ENUMERATED_CHOICES", 1 if seed % 2 else 512)
        trace, costs, forms, limits = random_case(seed)
        planner = Planner(StepIndex(trace, costs, forms), limits=limits)
        low, high = planner.floor.peak_bytes, planner.baseline.peak_bytes
        budget_bytes = random.Random(seed).randint(int(0.95 * low), high)
        plan = solve(planner, budget_bytes=budget_bytes, raise_below_floor=False)
        simulation = simulate(trace, costs, plan.regions, forms)
        assert simulation.peak_bytes == plan.predicted_peak_bytes, seed
        assert simulation.seconds == pytest.approx(plan.predicted_seconds), seed
        assert math.sqrt(simulation.squared_error) == pytest.approx(plan.predicted_error), seed
        assert simulation.link_bytes == plan.offloaded_bytes, seed
        assert plan.lower_bound_seconds <= plan.predicted_seconds, seed
        assert plan.gap_of_step == pytest.approx(
            (plan.predicted_seconds - plan.lower_bound_seconds) / plan.baseline_seconds
        )
        if plan.status.is_usable:
            packed += any(region.packed for region in plan.regions)
            assert plan.predicted_peak_bytes <= budget_bytes, seed
            assert limits.allow(simulation.squared_error, simulation.link_bytes), seed
            assert (plan.status is Status.OPTIMAL) == (plan.gap_of_step <= 1e-6), seed
        everything = every_simulation(planner.index, ENUMERATED_CHOICES)
        everything = [s for s in everything if limits.allow(s.squared_error, s.link_bytes)]
        checked += bool(everything)
        fitting = [s.seconds for s in everything if s.peak_bytes <= budget_bytes]
        if fitting:
            assert planner.lower_bound_seconds(budget_bytes, None, boundaries=False) <= min(fitting) + 1e-9, seed
            assert planner.lower_bound_seconds(budget_bytes, None, boundaries=True) <= min(fitting) + 1e-9, seed
        if everything and planner.is_complete:
            assert_best_of(plan, everything, budget_bytes)
        elif fitting and plan.status.is_usable:
            assert plan.predicted_seconds <= min(fitting) * SEARCHED, seed
    assert checked > BATCH // 2
    assert packed > BATCH // 8


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 20, 10))
def test_more_of_anything_never_costs_time(first: int) -> None:
    for seed in range(first, first + 10):
        trace, costs, forms, limits = random_case(seed)
        planner = Planner(StepIndex(trace, costs, forms), limits=limits)
        low, high = planner.floor.peak_bytes, planner.baseline.peak_bytes

        def seconds(made: Planner, budget_bytes: int) -> float:
            plan = solve(made, budget_bytes=budget_bytes, raise_below_floor=False)
            return plan.predicted_seconds if plan.status.is_usable else math.inf

        of_budgets = [seconds(planner, int(budget)) for budget in np.linspace(low, high, 4)]
        assert all(b <= a * TOLERANCE for a, b in itertools.pairwise(of_budgets)), seed
        budget_bytes = (low + high) // 2
        before = seconds(planner, budget_bytes)
        wider = [Limits(limits.squared_error * 4, limits.link_bytes), Limits(limits.squared_error, None)]
        assert all(seconds(planner.relimited(limit), budget_bytes) <= before * TOLERANCE for limit in wider), seed
        if forms.link is not None:
            link = msgspec.structs.replace(
                forms.link,
                out_bytes_per_second=4 * forms.link.out_bytes_per_second,
                in_bytes_per_second=4 * forms.link.in_bytes_per_second,
                latency_seconds=0.0,
            )
            faster = Planner(StepIndex(trace, costs, msgspec.structs.replace(forms, link=link)), limits=limits)
            assert seconds(faster, budget_bytes) <= before * TOLERANCE, seed


@pytest.mark.parametrize("unpacks_at_once", [False, True], ids=["one by one", "at once"])
def test_alike_regions_add_what_they_share_where_each_of_them_is(*, unpacks_at_once: bool) -> None:
    trace, costs = transformer(5).finish()
    regions = tuple(msgspec.structs.replace(call, unpacks_at_once=unpacks_at_once) for call in trace.regions)
    trace = msgspec.structs.replace(trace, regions=regions)
    index = StepIndex(trace, costs, block_forms(trace, costs))
    keys = [likeness(index, view) for view in index.views]
    assert [keys.index(key) for key in keys] == [0, 0, 0, 0, 4]
    for seed in range(30):
        draw = random.Random(seed)
        sets = {}
        for view, key in zip(index.views, keys, strict=True):
            if key not in sets:
                effects = tuple(Measuring(index, view).measure([random_choice(draw, view) for _ in range(6)]))
                sets[key] = ChoiceSet(effects, Hull((), ()), is_complete=False)
        windows = build_windows(index, [sets[key] for key in keys])
        picks = [draw.randrange(len(effects)) for effects in windows.effects]
        taken = [effects[pick] for effects, pick in zip(windows.effects, picks, strict=True)]
        simulation = run_choices(index, [effect.choice for effect in taken])
        summed = windows.fixed_bytes + sum(a[:, pick] for a, pick in zip(windows.added_bytes, picks, strict=True))
        assert summed.tolist() == [int(simulation.curve[a:b].max()) for a, b in windows.spans]
        assert simulation.seconds == pytest.approx(index.base_seconds + sum(effect.seconds for effect in taken))
