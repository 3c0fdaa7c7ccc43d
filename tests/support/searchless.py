"""A plan of a step without any search: for tests that need some plan, not a good one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from plimsoll.artifacts.plan import Plan
from plimsoll.planning.choice import Choice
from plimsoll.planning.decisions import decide
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_full, find_extremes
from plimsoll.session.options import PlanOptions
from plimsoll.session.step_planner import trace_and_cost
from plimsoll.session.task import TrainingTask
from steps import Step


def plan_without_search(step: Step, choose: Callable[..., tuple[Choice, ...]] = choose_full, **how: Any) -> Plan:
    """Trace and cost a step as planning does, and write down what ``choose`` takes."""
    model, batch, loss = step
    task = TrainingTask(model=model, batch=batch, loss=loss)
    traced, costs = trace_and_cost(task, PlanOptions(**how))
    extremes = find_extremes(traced, costs)
    index = StepIndex(traced, costs)
    simulation = run_choices(index, choose(index, ""))
    return msgspec.structs.replace(
        extremes.lowest,
        predicted_peak_bytes=simulation.peak_bytes,
        predicted_seconds=simulation.seconds,
        regions=decide(simulation, [0.0] * len(index.views)),
    )
