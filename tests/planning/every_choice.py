"""All choices of a region or of a small step: what a solver's answer is compared with."""

from __future__ import annotations

import itertools
import math

import pytest

from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.plan import Plan
from plimsoll.planning.choice import Choice
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.step import RegionView, StepIndex


def region_choices(view: RegionView, at_most: int) -> list[Choice]:
    """Every state of every value that may be decided; nothing if these are too many."""
    options = []
    for value in view.decided:
        forms = view.forms[value].forms if value in view.forms else ()
        options.append(["keep", *(["drop"] if value in view.droppable else []), *(form.name for form in forms)])
    if math.prod(map(len, options)) > at_most:
        return []
    return [
        Choice(
            frozenset(v for v, state in zip(view.decided, taken, strict=True) if state == "keep"),
            frozenset((v, s) for v, s in zip(view.decided, taken, strict=True) if s not in ("keep", "drop")),
        )
        for taken in itertools.product(*options)
    ]


def every_simulation(index: StepIndex, at_most: int) -> list[Simulation]:
    """Every combination of choices; nothing if these are too many."""
    per_region = [region_choices(view, at_most) for view in index.views]
    if not 0 < math.prod(map(len, per_region)) <= at_most:
        return []
    return [run_choices(index, chosen) for chosen in itertools.product(*per_region)]


def assert_best_of(plan: Plan, everything: list[Simulation], budget_bytes: int) -> None:
    """The plan is as good as the best of all simulations within the budget, its floor their smallest peak."""
    fitting = [s.seconds for s in everything if s.peak_bytes <= budget_bytes]
    assert plan.floor_bytes == min(s.peak_bytes for s in everything)
    assert (plan.status is Status.INFEASIBLE) == (not fitting)
    if fitting:
        assert plan.predicted_seconds == pytest.approx(min(fitting))
        assert plan.lower_bound_seconds <= min(fitting) + 1e-9
