"""Plans of one step in, what each of them measures on the model out: peak, equality, paired seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plimsoll.analysis.verify.evidence import Depth, Evidence, collect_evidence
from plimsoll.analysis.verify.mismatches import mismatches
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress
from plimsoll.artifacts.trace import Category
from plimsoll.engine.apply import Handle
from plimsoll.session.manage import manage
from plimsoll.session.training_step import TrainingStep, relative_error
from plimsoll.tracing.meters.timing import Timing, time_in_turns

BASELINE = ""
"""The unmanaged step's name among the timings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one plan took, and whether it changed anything."""

    peak_bytes: int
    is_bit_equal: bool
    gradient_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The unmanaged step and every usable plan, by name; timings include the ``BASELINE``."""

    baseline_peak_bytes: int
    plans: Mapping[str, Measured]
    timings: Mapping[str, Timing]


def measure_side_by_side(step: TrainingStep, plans: Mapping[str, Plan], *, rounds: int, report: Progress) -> SideBySide:
    """Run every plan that can be applied, then time all of them and the unmanaged step in turns.

    Args:
        step: the training step, on the unmanaged model.
        plans: by name.
        rounds: timed runs of each.
        report: told the stage and the share done.
    """
    usable = {name: plan for name, plan in plans.items() if plan.status.is_usable}
    state_bytes = max((plan.classes.get(Category.OPTIMIZER_STATE, 0) for plan in plans.values()), default=0)
    absent_bytes = step.absent_state_bytes(state_bytes)
    report("running the unmanaged step", 0.0)
    evidence = collect_evidence(step, Depth())
    baseline_peak_bytes = step.measure_peak().peak_bytes + absent_bytes
    measured: dict[str, Measured] = {}
    runs: dict[str, Callable[[], object]] = {BASELINE: step.run}
    with contextlib.ExitStack() as stack:
        for position, (name, plan) in enumerate(usable.items()):
            report(f"running {name}", 0.1 + 0.4 * position / len(usable))
            handle = manage(step.model, plan)
            stack.callback(handle.remove)
            measured[name] = _measure(step, evidence, absent_bytes)
            handle.pause()
            runs[name] = _managed_run(step, handle)
        report("timing in turns", 0.5)
        timings = time_in_turns(runs, device=step.device, rounds=rounds)
    step.clear_gradients()
    return SideBySide(baseline_peak_bytes=baseline_peak_bytes, plans=measured, timings=timings)


def _measure(step: TrainingStep, evidence: Evidence, absent_bytes: int) -> Measured:
    """The larger peak of the recording run and a steady one; equal only if both are."""
    peaks, is_equal, error = [], True, 0.0
    for _ in range(2):
        peaks.append(step.measure_peak().peak_bytes + absent_bytes)
        error = max(error, relative_error(evidence.gradients, step.gradients()))
        apart = (
            *mismatches(evidence.gradients, step.gradients(), evidence.spread),
            *mismatches(evidence.buffers, step.buffers(), evidence.spread),
        )
        is_equal = is_equal and all(mismatch.is_within_spread for mismatch in apart)
    return Measured(peak_bytes=max(peaks), is_bit_equal=is_equal, gradient_error=error)


def _managed_run(step: TrainingStep, handle: Handle) -> Callable[[], object]:
    def run() -> None:
        handle.resume()
        try:
            step.run()
        finally:
            handle.pause()

    return run
