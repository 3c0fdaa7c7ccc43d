"""A trace and its costs in, the plan that recomputes all it can out, without any search: for a step that is only watched."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.planning.decisions import decide
from plimsoll.planning.describe import classes_at_peak, describe_peak
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_full, choose_none


@dataclass(frozen=True, slots=True)
class Extremes:
    """The step as it is, in bytes at its peak, and the plan that recomputes everything."""

    unmanaged_peak_bytes: int
    lowest: Plan


def find_extremes(trace: Trace, costs: Costs) -> Extremes:
    """Simulate a step without a plan and with everything recomputed; its bound is left at zero."""
    index = StepIndex(trace, costs)
    baseline, full = run_choices(index, choose_none(index, "")), run_choices(index, choose_full(index, ""))
    plan = Plan(
        status=Status.FEASIBLE,
        strategy="full",
        model=trace.model,
        fingerprint=trace.fingerprint,
        signature=trace.signature,
        device=trace.device,
        cost_source=costs.source,
        cost_device=costs.device,
        budget_bytes=None,
        floor_bytes=full.peak_bytes,
        baseline_peak_bytes=baseline.peak_bytes,
        baseline_seconds=baseline.seconds,
        predicted_peak_bytes=full.peak_bytes,
        predicted_seconds=full.seconds,
        lower_bound_seconds=0.0,
        gap_of_overhead=1.0,
        gap_of_step=full.seconds / baseline.seconds if baseline.seconds else 0.0,
        price_seconds_per_byte=0.0,
        regions=decide(full, [0.0] * len(index.views)),
        peak=describe_peak(full),
        baseline_peak=describe_peak(baseline),
        classes=classes_at_peak(full),
    )
    return Extremes(baseline.peak_bytes, plan)
