"""A solved plan in; the same plan run once and measured, or a tighter one where the measured peak was over the budget, out.

The bound certifies the model of the machine, not the machine. So the plan runs: the recording step and a steady one. What
the measured peak exceeds the budget by is taken off the budget, and the plan is solved again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Category
from plimsoll.recording.calling import Loss
from plimsoll.recording.untouched import untouched
from plimsoll.runtime.apply import apply_plan
from plimsoll.units import format_bytes
from plimsoll.verification.step import TrainingStep

MAX_ATTEMPTS = 6


def confirmed(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan,
    *,
    resolve: Callable[[int], Plan],
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    progress: Callable[[str, float], None],
) -> Plan:
    """Run the plan and solve again with what it exceeds the budget by, until it keeps to it.

    Args:
        model: runs the step.
        args: positional arguments of its call.
        kwargs: keyword arguments of its call.
        plan: the plan as solved, with a budget.
        resolve: solves again with so many bytes taken off the budget; raises ``BudgetBelowFloor`` where that is too many.
        loss: makes a scalar of the output.
        optimizer: whose state counts.
        progress: told the stage and the share done.
    """
    assert plan.budget_bytes is not None
    excess_bytes = 0
    for attempt in range(MAX_ATTEMPTS):
        progress("running the plan once", attempt / MAX_ATTEMPTS)
        measured_bytes = measure_peak(model, args, kwargs, plan, loss=loss, optimizer=optimizer)
        over_bytes = measured_bytes - plan.budget_bytes
        if over_bytes <= 0:
            return _with_note(plan, f"run once: the measured peak was {format_bytes(measured_bytes)}")
        # Plans are discrete: less than what this one was off by may give the same plan again.
        excess_bytes = max(excess_bytes + over_bytes, measured_bytes - plan.predicted_peak_bytes)
        progress("solving again", (attempt + 0.5) / MAX_ATTEMPTS)
        plan = resolve(excess_bytes)
        assert plan.budget_bytes is not None
    return _with_note(
        plan,
        f"after {MAX_ATTEMPTS} rounds the measured peak still exceeded the budget; verify it before you rely on it",
    )


def measure_peak(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan,
    *,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
) -> int:
    """The larger peak of the recording step and a steady one; optimizer state that is not there yet is added."""
    with untouched(model):
        step = TrainingStep(model, args, kwargs, loss=loss, optimizer=optimizer)
        with apply_plan(model, plan):
            recording = step.measure_peak()
            steady = step.measure_peak()
    absent_bytes = step.absent_state_bytes(plan.classes.get(Category.OPTIMIZER_STATE, 0))
    return max(recording.peak_bytes, steady.peak_bytes) + absent_bytes


def _with_note(plan: Plan, note: str) -> Plan:
    return msgspec.structs.replace(plan, notes=(*plan.notes, note))
