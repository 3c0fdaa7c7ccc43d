"""A model, a batch and a plan in; the receipt that holds its claims against evidence out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from plimsoll.analysis.verify.evidence import (
    Apart,
    Depth,
    Evidence,
    collect_evidence,
    compare_with,
    consecutive_losses,
    run_curve,
    run_intermediates,
    versions,
)
from plimsoll.analysis.verify.intermediates import compare_intermediates
from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.receipt import Intermediate, Receipt, RegionOutcome, finite
from plimsoll.artifacts.trace import Category, Phase
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.meters.timing import Timing, time_in_turns
from plimsoll.units import format_bytes, format_seconds

_STATE_NOISE = 0.01
"""State that differs by less than this share is the same state."""


class Managed(Protocol):
    """A plan at work on a model (the runtime's handle)."""

    def remove(self) -> None: ...

    @property
    def faults(self) -> tuple[Fault, ...]: ...

    @property
    def inspected_tensors(self) -> int: ...

    def outcomes(self) -> tuple[RegionOutcome, ...]: ...

    def inspecting(self) -> contextlib.AbstractContextManager[None]: ...

    def paused(self) -> contextlib.AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedEvidence:
    """What was seen of the managed model, beside the unmanaged one's losses and seconds taken in turns with it."""

    recording_peak_bytes: int
    steady_peak_bytes: int
    apart: Apart
    faults: tuple[Fault, ...]
    compared_tensors: int
    intermediates: tuple[Intermediate, ...]
    curve: tuple[float | None, ...]
    outcomes: tuple[RegionOutcome, ...]
    baseline_losses: tuple[float | None, ...]
    plan_losses: tuple[float | None, ...]
    baseline: Timing
    ours: Timing


def verify_plan(
    step: TrainingStep,
    plan: Plan,
    manage: Callable[[], Managed],
    *,
    steps: int = 5,
    depth: Depth | None = None,
    progress: Progress | None = None,
) -> Receipt:
    """Compare the managed step with the unmanaged one.

    Args:
        step: the training step, on the unmanaged model.
        plan: the plan to check.
        manage: applies the plan to the step's model.
        steps: timed runs of each side; the losses of as many consecutive steps are compared.
        depth: what is compared besides.
        progress: told the stage and how far it is.

    Raises:
        InvalidRegions: a pattern of intermediates that matches no module.
    """
    report = progress or silent
    depth = depth or Depth()
    report("running the unmanaged step twice", 0.0)
    evidence = collect_evidence(step, depth)
    baseline_peaks = step.measure_peak()
    report("running the managed step", 0.3)
    with _managed(manage) as managed:
        seen = _observe(step, managed, evidence, steps, depth, report)
    step.clear_gradients()
    return _receipt(step, plan, evidence, baseline_peaks.peak_bytes, seen, steps)


def _observe(
    step: TrainingStep, managed: Managed, evidence: Evidence, steps: int, depth: Depth, report: Progress
) -> ManagedEvidence:
    """Run the managed step: the recording call, steady ones, an inspected one, consecutive losses, seconds in turns."""
    recording = step.measure_peak()
    apart = compare_with(evidence, step)
    step.run()
    report("measuring the managed step's peak", 0.5)
    steady = step.measure_peak()
    apart = apart.worst(compare_with(evidence, step))
    outcomes = managed.outcomes()
    plan_losses = consecutive_losses(step, steps)
    with managed.paused():
        baseline_losses = consecutive_losses(step, steps)
    curve, intermediates = run_curve(step, depth), run_intermediates(step, depth)
    report("timing both in turns", 0.6)
    baseline, ours = _time(step, managed, steps)
    report("comparing every tensor that comes back", 0.95)
    with managed.inspecting():
        step.run()
    return ManagedEvidence(
        recording_peak_bytes=recording.peak_bytes,
        steady_peak_bytes=steady.peak_bytes,
        apart=apart,
        faults=managed.faults,
        compared_tensors=managed.inspected_tensors,
        intermediates=compare_intermediates(evidence.intermediates, intermediates),
        curve=curve,
        outcomes=outcomes,
        baseline_losses=baseline_losses,
        plan_losses=plan_losses,
        baseline=baseline,
        ours=ours,
    )


def _receipt(
    step: TrainingStep, plan: Plan, evidence: Evidence, baseline_peak_bytes: int, seen: ManagedEvidence, steps: int
) -> Receipt:
    absent_bytes = step.absent_state_bytes(plan.classes.get(Category.OPTIMIZER_STATE, 0))
    return Receipt(
        model=plan.model,
        fingerprint=plan.fingerprint,
        signature=plan.signature,
        device=str(step.device),
        strategy=plan.strategy,
        budget_bytes=plan.budget_bytes,
        versions=versions(),
        steps=steps,
        compared_gradients=sum(gradient is not None for gradient in evidence.gradients.values()),
        gradient_mismatches=seen.apart.gradients,
        compared_buffers=len(evidence.buffers),
        buffer_mismatches=seen.apart.buffers,
        is_lossless=plan.is_lossless,
        max_error=plan.max_error,
        predicted_error=plan.predicted_error,
        gradient_error=finite(seen.apart.error),
        is_deterministic=evidence.is_deterministic,
        baseline_losses=seen.baseline_losses,
        plan_losses=seen.plan_losses,
        predicted_baseline_peak_bytes=plan.baseline_peak_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_baseline_peak_bytes=baseline_peak_bytes + absent_bytes,
        measured_peak_bytes=seen.steady_peak_bytes + absent_bytes,
        measured_recording_peak_bytes=seen.recording_peak_bytes + absent_bytes,
        predicted_baseline_seconds=plan.baseline_seconds,
        predicted_seconds=plan.predicted_seconds,
        measured_baseline_seconds=seen.baseline.median_seconds,
        measured_baseline_spread_seconds=seen.baseline.spread_seconds,
        measured_seconds=seen.ours.median_seconds,
        measured_spread_seconds=seen.ours.spread_seconds,
        faults=seen.faults,
        compared_tensors=seen.compared_tensors,
        intermediates=seen.intermediates,
        baseline_curve=evidence.curve,
        plan_curve=seen.curve,
        regions=seen.outcomes,
        notes=_notes(step, plan, absent_bytes),
    )


def _notes(step: TrainingStep, plan: Plan, absent_bytes: int) -> tuple[str, ...]:
    notes = []
    if absent_bytes:
        notes.append(
            f"measured peaks include {format_bytes(absent_bytes)} of optimizer state, which the plan counts and the "
            "optimizer makes in its first step"
        )
    unplanned_bytes = step.optimizer_bytes() - plan.classes.get(Category.OPTIMIZER_STATE, 0)
    if unplanned_bytes > _STATE_NOISE * step.optimizer_bytes():
        notes.append(
            f"measured peaks include {format_bytes(unplanned_bytes)} of optimizer state that the plan does not count: "
            "it was made without optimizer=, or for another one"
        )
    starts = [point.unmanaged_seconds for point in plan.timeline if point.phase == Phase.OPTIMIZER]
    if starts and starts[0] is not None:
        notes.append(
            f"predicted seconds include {format_seconds(plan.baseline_seconds - starts[0])} of the optimizer's step; measured "
            "ones are those of forward and backward, as verification does not run it"
        )
    if Phase.OPTIMIZER in plan.peak.moment:
        notes.append(
            "the plan's peak is in the optimizer's step, which verification does not run: it is predicted only"
        )
    return tuple(notes)


@contextlib.contextmanager
def _managed(manage: Callable[[], Managed]) -> Iterator[Managed]:
    handle = manage()
    try:
        yield handle
    finally:
        handle.remove()


def _time(step: TrainingStep, managed: Managed, rounds: int) -> tuple[Timing, Timing]:
    """Paired, interleaved seconds of the unmanaged and the managed step."""

    def plain() -> None:
        with managed.paused():
            step.run()

    timings = time_in_turns({"baseline": plain, "plan": step.run}, device=step.device, rounds=rounds)
    return timings["baseline"], timings["plan"]
