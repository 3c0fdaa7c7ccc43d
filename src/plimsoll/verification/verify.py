"""A model, a batch and a plan in; the receipt that holds its claims against evidence out."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import Mismatch, Receipt, RegionOutcome, finite
from plimsoll.artifacts.trace import Category, Phase
from plimsoll.measuring.timing import Timing, time_in_turns
from plimsoll.units import format_bytes
from plimsoll.verification.compare_tensors import copies, mismatches, relative_error
from plimsoll.verification.step import TrainingStep

Progress = Callable[[str, float], None]

_STATE_NOISE = 0.01
"""State that differs by less than this share is the same state."""


class Managed(Protocol):
    """A plan at work on a model (the runtime's handle)."""

    def remove(self) -> None: ...

    def outcomes(self) -> tuple[RegionOutcome, ...]: ...

    def paused(self) -> contextlib.AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of the unmanaged model: its gradients and buffers after one step, and how far it is from itself."""

    loss: float
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor | None]
    spread: dict[str, float]

    @property
    def is_deterministic(self) -> bool:
        return not self.spread


def collect_evidence(step: TrainingStep) -> Evidence:
    """Run the unmanaged step twice from the same state."""
    loss = step.run()
    gradients, buffers = copies(step.gradients()), copies(step.buffers())
    step.run()
    apart = [*mismatches(gradients, step.gradients(), {}), *mismatches(buffers, step.buffers(), {})]
    spread = {m.name: float("inf") if m.max_absolute_difference is None else m.max_absolute_difference for m in apart}
    return Evidence(loss, gradients, buffers, spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedEvidence:
    """What was seen of the managed model, beside the unmanaged one's losses and seconds taken in turns with it."""

    recording_peak_bytes: int
    steady_peak_bytes: int
    gradient_mismatches: tuple[Mismatch, ...]
    buffer_mismatches: tuple[Mismatch, ...]
    gradient_error: float
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
    progress: Progress | None = None,
) -> Receipt:
    """Compare the managed step with the unmanaged one.

    Args:
        step: the training step, on the unmanaged model.
        plan: the plan to check.
        manage: applies the plan to the step's model.
        steps: timed runs of each side; the losses of as many consecutive steps are compared.
        progress: told the stage and how far it is.
    """
    report = progress or (lambda stage, share: None)
    report("running the unmanaged step twice", 0.0)
    evidence = collect_evidence(step)
    baseline_peaks = step.measure_peak()
    report("running the managed step", 0.3)
    with _managed(manage) as managed:
        seen = _observe(step, managed, evidence, steps, report)
    step.clear_gradients()
    return _receipt(step, plan, evidence, baseline_peaks.peak_bytes, seen, steps)


def _observe(step: TrainingStep, managed: Managed, evidence: Evidence, steps: int, report: Progress) -> ManagedEvidence:
    """Run the managed step: the recording call, steady ones, consecutive losses, seconds in turns."""
    recording = step.measure_peak()
    gradients = mismatches(evidence.gradients, step.gradients(), evidence.spread)
    buffers = mismatches(evidence.buffers, step.buffers(), evidence.spread)
    error = relative_error(evidence.gradients, step.gradients())
    step.run()
    report("measuring the managed step's peak", 0.5)
    steady = step.measure_peak()
    gradients = _merged(gradients, mismatches(evidence.gradients, step.gradients(), evidence.spread))
    buffers = _merged(buffers, mismatches(evidence.buffers, step.buffers(), evidence.spread))
    error = max(error, relative_error(evidence.gradients, step.gradients()))
    outcomes = managed.outcomes()
    plan_losses = _losses(step, steps)
    with managed.paused():
        baseline_losses = _losses(step, steps)
    report("timing both in turns", 0.6)
    baseline, ours = _time(step, managed, steps)
    return ManagedEvidence(
        recording_peak_bytes=recording.peak_bytes,
        steady_peak_bytes=steady.peak_bytes,
        gradient_mismatches=gradients,
        buffer_mismatches=buffers,
        gradient_error=error,
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
        gradient_mismatches=seen.gradient_mismatches,
        compared_buffers=len(evidence.buffers),
        buffer_mismatches=seen.buffer_mismatches,
        is_lossless=plan.is_lossless,
        max_error=plan.max_error,
        predicted_error=plan.predicted_error,
        gradient_error=finite(seen.gradient_error),
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
        regions=seen.outcomes,
        notes=_notes(step, plan, absent_bytes),
    )


def versions() -> dict[str, str]:
    """What the figures were measured with."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "machine": platform.machine()}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


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


def _losses(step: TrainingStep, count: int) -> tuple[float | None, ...]:
    """The losses of consecutive runs: the random state goes on, so dropout draws anew each time."""
    step.rewind()
    return tuple(finite(step.go_on()) for _ in range(count))


def _time(step: TrainingStep, managed: Managed, rounds: int) -> tuple[Timing, Timing]:
    """Paired, interleaved seconds of the unmanaged and the managed step."""

    def plain() -> None:
        with managed.paused():
            step.run()

    timings = time_in_turns({"baseline": plain, "plan": step.run}, device=step.device, rounds=rounds)
    return timings["baseline"], timings["plan"]


def _merged(first: tuple[Mismatch, ...], second: tuple[Mismatch, ...]) -> tuple[Mismatch, ...]:
    """Each tensor once, with the run in which it was further off."""
    worst: dict[str, Mismatch] = {}
    for mismatch in (*first, *second):
        known = worst.get(mismatch.name)
        if known is None or (mismatch.max_absolute_difference or 0.0) > (known.max_absolute_difference or 0.0):
            worst[mismatch.name] = mismatch
    return tuple(worst.values())
