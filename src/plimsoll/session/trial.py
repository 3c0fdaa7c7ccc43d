"""Tries a solved plan in a real step, and solves again if the measurement contradicts the prediction.

The solver's bound holds for a model of the machine, not for the machine. So the plan runs twice: in the step that records it,
and in a steady step. If the measured peak exceeds the budget, the overshoot is subtracted from the budget, and the plan is
solved again. If lossy forms (codecs or offload) are used, the gradient of the steady step is compared with the unmanaged
(without a plan) gradient. If its error exceeds the allowed error, or is far enough below it that a cheaper plan may exist, the
expected errors are scaled to the measurement, and the plan is solved again.
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
from plimsoll.engine.apply import Handle
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.account import planned_state_bytes
from plimsoll.session.manage import manage
from plimsoll.session.training_step import TrainingStep, relative_error
from plimsoll.tracing.recorder.untouched import untouched
from plimsoll.units import format_bytes

MAX_ATTEMPTS = 6
"""Run at most this many plans one after the other. In most cases the first one fits; budgets within a percent of the floor (the
lowest reachable peak) need more.
"""
_ERROR_MARGIN = 0.95
"""Once the measured errors are known, plans aim at this share of the allowed error."""
_WORTH_LOOSENING = 0.7
"""If a plan's error is below this share of the allowed error, look for a cheaper plan."""
_MOST_LOOSENING = 4.0
"""One attempt divides the expected errors by at most this number."""

Gradients = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class TrialRun:
    """The measurement of a plan that was run, as data: bytes, and the relative error of the gradient (``None`` if it was not
    compared).

    ``note`` describes the run if other ranks took part.
    """

    peak_bytes: int
    fresh_bytes: int
    """The peak of a training that starts with this plan, in bytes. When it records the plan, the optimizer's state does not
    exist yet.
    """
    error: float | None
    note: str = ""
    steady_bytes: int = 0
    """The peak of the first micro-batch of the step after the step that records the plan, with all of the optimizer's state."""
    recording_bytes: int = 0
    """The peak of the step that recorded the plan, minus the peak of the step after it."""
    taken_bytes: int = 0
    """The peak of the run itself, with the optimizer state that existed then."""
    beside_bytes: int = 0
    """The part of ``peak_bytes`` that this run of the plan did not contain. The training loop was measured to need it."""

    @property
    def told(self) -> str:
        """The measurement as a sentence, to be added to the plan as a note."""
        added = f", with {format_bytes(self.beside_bytes)} that the training loop needs" if self.beside_bytes else ""
        note = self.note or f"run once: the measured peak was {format_bytes(self.peak_bytes)}{added}"
        return note if self.error is None else f"{note}, the gradient's relative error {self.error:.2%}"


Managing = Callable[[Plan], contextlib.AbstractContextManager[object]]
"""A function from a plan to a context that applies the plan to the model."""


def run_trial(
    step: TrainingStep, plan: Plan, gradients: Gradients | None = None, managing: Managing | None = None
) -> TrialRun:
    """Run a plan and return its peaks (first step and later steps) and its error compared with the unmanaged (without a
    plan) ``gradients``.

    What the plan records is discarded, unless ``managing`` is given. A ``managing`` context keeps records, also those of
    earlier steps, so its single run is steady already.

    Optimizer state that does not exist yet is added to both peaks. It is made in the user's first step, but a training that
    resumes, or that `verify` repeats, records the plan when the state exists. The model is restored afterwards.
    """
    error = None
    with untouched(step.model, plan.written), manage(step.model, plan) if managing is None else managing(plan) as work:
        if plan.compiled and isinstance(work, Handle):
            step.run()  # compile first: the compiler's memory does not belong to the step
            work.forget()
        recording = step.measure_peak(plan.backward_steps)
        steady = step.measure_peak(plan.backward_steps) if managing is None else recording
        if gradients is not None and not plan.is_lossless:
            if plan.backward_steps is not None:
                step.run()  # the measured steps have freed their gradients
            error = relative_error(gradients, step.gradients())
    # Add state that does not exist yet to the first step too: a resumed training, or `verify`, records the plan when the
    # state exists. When it was added to the steady step alone, 5 of 8 plans were up to 1% over their budget there.
    absent_bytes = step.absent_state_bytes(planned_state_bytes(plan), plan.state)
    taken_bytes = max(recording.peak_bytes, steady.peak_bytes)
    return TrialRun(
        taken_bytes + absent_bytes,
        max(recording.peak_bytes, steady.peak_bytes + absent_bytes),
        error,
        steady_bytes=steady.first_peak_bytes + absent_bytes,
        recording_bytes=max(0, recording.first_peak_bytes - steady.first_peak_bytes),
        taken_bytes=taken_bytes,
    )


Resolving = Callable[[int, float], Plan]
"""A function that solves the plan again. It gets the bytes to subtract from the budget, and the factor that scales expected
errors. It raises ``BudgetBelowFloor`` if no plan fits any more.
"""


def confirmed(
    plan: Plan,
    run: Callable[[Plan], TrialRun],
    resolve: Resolving,
    *,
    max_error: float | None,
    progress: Progress,
) -> Plan:
    """Run the plan. If its peak exceeds its budget, or its error exceeds ``max_error``, solve again with the measurement, and
    run the new plan. Return the fastest plan that kept to both limits. A ``max_error`` of ``None`` allows any error.
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
            # Plans are discrete: subtracting only the overshoot may select the same plan again. So subtract the plan's whole
            # error if that is more.
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
        f"after {MAX_ATTEMPTS} attempts, the measured peak or error was still above its limit; verify the plan before you rely "
        "on it",
    )


def error_scale(plan: Plan, run: Callable[[Plan], TrialRun]) -> float:
    """Run a plan once and return the measured error as a multiple of the expected error, with a margin. The result is 1 for a
    lossless plan.
    """
    if plan.is_lossless or not plan.predicted_error:
        return 1.0
    return _scale_of(plan, run(plan)) / _ERROR_MARGIN


def _looser(plan: Plan, measured: TrialRun, scale: float, max_error: float) -> float | None:
    """Return a smaller scale of errors, so that solving may find a cheaper plan. Return None if the allowed error does not
    limit this plan.
    """
    if measured.error is None or not plan.predicted_error:
        return None
    is_binding = plan.predicted_error * scale >= _WORTH_LOOSENING * max_error
    if not is_binding or measured.error >= _WORTH_LOOSENING * max_error:
        return None
    return max(_scale_of(plan, measured) / _ERROR_MARGIN, scale / _MOST_LOOSENING)


def _scale_of(plan: Plan, measured: TrialRun) -> float:
    """Return the gradient error that a run of a plan has measured, divided by the error that the plan expected."""
    assert measured.error is not None
    if not math.isfinite(measured.error):
        return 2 * _MOST_LOOSENING
    return measured.error / plan.predicted_error


def _with_measured(plan: Plan, measured: TrialRun, scale: float) -> Plan:
    plan = msgspec.structs.replace(plan, measured_error=measured.error, predicted_error=plan.predicted_error * scale)
    return with_note(plan, measured.told)


def with_note(plan: Plan, note: str) -> Plan:
    """Return the plan with one more note."""
    return msgspec.structs.replace(plan, notes=(*plan.notes, note))
