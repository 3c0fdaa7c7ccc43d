"""The trial run of a solved plan, and solving again where what it shows is not what was predicted.

The bound certifies the model of the machine, not the machine. So the plan runs: the recording step and a steady one. What
the measured peak exceeds the budget by is taken off the budget, and the plan is solved again. Where values are held in
lossy forms, the gradient of the steady step is compared with the unmanaged one's: if it errs by more than is allowed, or by
so much less that a cheaper plan may do, expectations are scaled to what was measured, and the plan is solved again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import torch

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress
from plimsoll.artifacts.trace import Category
from plimsoll.engine.apply import Handle
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.manage import manage
from plimsoll.session.training_step import TrainingStep, relative_error
from plimsoll.tracing.recorder.untouched import untouched
from plimsoll.units import format_bytes

MAX_ATTEMPTS = 6
_ERROR_MARGIN = 0.95
"""The share of the allowed error that plans aim at once the scale of their expectation is known."""
_WORTH_LOOSENING = 0.7
"""A plan that errs by less than this share of what is allowed may be cheaper."""
_MOST_LOOSENING = 4.0

Gradients = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class TrialRun:
    """What a plan took when it was run: bytes, and the relative error of the gradient (``None``: not compared).

    ``note`` says it where it was not this process alone.
    """

    peak_bytes: int
    fresh_bytes: int
    """The peak where the optimizer's state comes only with the first step, after the plan was recorded."""
    error: float | None
    note: str = ""
    steady_bytes: int = 0
    """The peak of its first micro-batch when everything was recorded, with all of the optimizer's state."""
    recording_bytes: int = 0
    """What the step that records takes more than a steady one."""

    @property
    def told(self) -> str:
        """What it took, as a note of the plan."""
        note = self.note or f"run once: the measured peak was {format_bytes(self.peak_bytes)}"
        return note if self.error is None else f"{note}, the gradient's relative error {self.error:.2%}"


Managing = Callable[[Plan], contextlib.AbstractContextManager[object]]
"""Puts a plan to work for as long as it is entered."""


def run_trial(
    step: TrainingStep, plan: Plan, gradients: Gradients | None = None, managing: Managing | None = None
) -> TrialRun:
    """Run a plan: the larger peak of the recording step and a steady one, and the error beside the unmanaged
    ``gradients``. What is recorded is lost afterwards, unless ``managing`` keeps it, and has kept what such steps record.

    Optimizer state that is not there yet is added to both: it comes with the user's first step, but a training that was
    resumed, or that `verify` runs once more, records with the state there. The model is left as it was.
    """
    error = None
    with untouched(step.model, plan.written), manage(step.model, plan) if managing is None else managing(plan) as work:
        if plan.compiled and isinstance(work, Handle):
            step.run()  # what the compiler takes is not the step's
            work.forget()
        recording = step.measure_peak()
        steady = step.measure_peak() if managing is None else recording
        if gradients is not None and not plan.is_lossless:
            error = relative_error(gradients, step.gradients())
    absent_bytes = step.absent_state_bytes(plan.classes.get(Category.OPTIMIZER_STATE, 0))
    return TrialRun(
        max(recording.peak_bytes, steady.peak_bytes) + absent_bytes,
        max(recording.peak_bytes, steady.peak_bytes + absent_bytes),
        error,
        steady_bytes=steady.first_peak_bytes + absent_bytes,
        recording_bytes=max(0, recording.first_peak_bytes - steady.first_peak_bytes),
    )


Resolving = Callable[[int, float], Plan]
"""Solves again with so many bytes taken off the budget, and with errors expected so many times larger; or raises
``BudgetBelowFloor`` where nothing fits any more."""


def confirmed(
    plan: Plan,
    run: Callable[[Plan], TrialRun],
    resolve: Resolving,
    *,
    max_error: float | None,
    progress: Progress,
) -> Plan:
    """Run the plan and solve again with what was measured, until it keeps to its budget and to its error (``None``:
    any).
    """
    excess_bytes, scale = 0, 1.0
    best: Plan | None = None
    for attempt in range(MAX_ATTEMPTS):
        progress("running the plan once", attempt / MAX_ATTEMPTS)
        measured = run(plan)
        over_bytes = 0 if plan.budget_bytes is None else measured.peak_bytes - plan.budget_bytes
        is_wrong = max_error is not None and measured.error is not None and measured.error > max_error
        if over_bytes <= 0 and not is_wrong:
            if best is None or plan.predicted_seconds < best.predicted_seconds:
                best = _with_measured(plan, measured, scale)
            looser = None if max_error is None else _looser(plan, measured, scale, max_error)
            if looser is None or attempt + 1 == MAX_ATTEMPTS:
                return best
            scale = looser
        elif is_wrong:
            scale = max(scale, _scale_of(plan, measured)) / _ERROR_MARGIN
        if over_bytes > 0:
            # Plans are discrete: less than what this one was off by may give the same plan again.
            excess_bytes = max(excess_bytes + over_bytes, measured.peak_bytes - plan.predicted_peak_bytes)
        progress("solving again", (attempt + 0.5) / MAX_ATTEMPTS)
        try:
            plan = resolve(excess_bytes, scale)
        except BudgetBelowFloor:
            if best is None:
                raise
            return best
        if best is not None and plan.predicted_seconds >= best.predicted_seconds:
            return best
    return best or with_note(
        plan,
        f"after {MAX_ATTEMPTS} rounds the measured peak or error still exceeded what is allowed; verify the plan before you "
        "rely on it",
    )


def error_scale(plan: Plan, run: Callable[[Plan], TrialRun]) -> float:
    """How many times larger than expected the errors of a plan are, run once, with a margin; 1 for a lossless one."""
    if plan.is_lossless or not plan.predicted_error:
        return 1.0
    return _scale_of(plan, run(plan)) / _ERROR_MARGIN


def _looser(plan: Plan, measured: TrialRun, scale: float, max_error: float) -> float | None:
    """The scale at which a cheaper plan may be found; ``None`` if errors are not what holds this plan back."""
    if measured.error is None or not plan.predicted_error:
        return None
    is_binding = plan.predicted_error * scale >= _WORTH_LOOSENING * max_error
    if not is_binding or measured.error >= _WORTH_LOOSENING * max_error:
        return None
    return max(_scale_of(plan, measured) / _ERROR_MARGIN, scale / _MOST_LOOSENING)


def _scale_of(plan: Plan, measured: TrialRun) -> float:
    """How many times larger the measured error is than the expected one."""
    assert measured.error is not None
    if not math.isfinite(measured.error):
        return 2 * _MOST_LOOSENING
    return measured.error / plan.predicted_error


def _with_measured(plan: Plan, measured: TrialRun, scale: float) -> Plan:
    plan = msgspec.structs.replace(plan, measured_error=measured.error, predicted_error=plan.predicted_error * scale)
    return with_note(plan, measured.told)


def with_note(plan: Plan, note: str) -> Plan:
    """The plan with one more note."""
    return msgspec.structs.replace(plan, notes=(*plan.notes, note))
