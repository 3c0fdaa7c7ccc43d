"""Measures several strategies side by side on one model and batch: the verb ``compare``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from plimsoll.analysis.verify.evidence import (
    Apart,
    Depth,
    Evidence,
    collect_evidence,
    compare_with,
    managed_run,
    of_all_ranks,
    read_measurable,
    versions,
)
from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.receipt import finite
from plimsoll.artifacts.trace import Category
from plimsoll.session.agreement import Agreement, agreement_for, described
from plimsoll.session.manage import manage
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.rendezvous.exchange import TIMEOUT_SECONDS
from plimsoll.session.step_planner import StepPlanner, trace_and_cost
from plimsoll.session.tightest_rank import planner_for
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.meters.timing import Timing, paired_ratio, time_in_turns
from plimsoll.tracing.recorder.calling import Loss
from plimsoll.tracing.recorder.untouched import untouched

BASELINE = ""
"""The unmanaged step's name among the timings."""


@dataclass(frozen=True, slots=True)
class PlanMeasurement:
    """What one plan took, and whether it changed anything."""

    peak_bytes: int
    apart: Apart


def compare(
    model: nn.Module,
    batch: Any,
    strategies: Sequence[str] = ("none", "full", "every:2", "sqrt", "selective:attention"),
    *,
    budget: int | str | None = None,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: Sequence[str] | None = None,
    steps: int = 5,
    allow: Collection[str] | str = ("recompute",),
    max_error: float | str = 0.0,
    host_budget: int | str | None = None,
    overrides: Sequence[str] = (),
    link: str | None = None,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
) -> Comparison:
    """Measure strategies side by side on one model and batch: peak, paired step time, gradients.

    Args:
        model: as for ``plimsoll.plan``.
        batch: as for ``plimsoll.plan``.
        strategies: names as in ``plimsoll.plan``.
        budget: goes to ``auto``; the others run as they are.
        loss: as for ``plimsoll.plan``.
        optimizer: as for ``plimsoll.plan``.
        regions: as for ``plimsoll.plan``.
        steps: timed rounds; in each, every strategy runs once. At least one.
        allow: what ``auto`` may do, as for ``plimsoll.plan``, and so for ``max_error``, ``host_budget``, ``overrides`` and
            ``link``.
        max_error: the relative error of the gradient that ``auto`` may cause.
        host_budget: bytes at the other end of the link.
        overrides: decisions by pattern.
        link: ``host`` or ``disk``.
        ranks: as for ``plimsoll.plan``; all ranks get the same comparison, with the largest peaks and the slowest times.
        timeout_seconds: as for ``plimsoll.plan``.
        progress: told the stage and the share done.

    Returns:
        A comparison with one row per strategy; a strategy that does not fit is a row with its status.

    Raises:
        InvalidStrategy: no such strategy. Others as for ``plimsoll.plan``.
    """
    report = progress or silent
    with agreement_for(model, "compare", ranks=ranks, timeout_seconds=timeout_seconds) as agreement:
        task = read_measurable(model, batch, loss, optimizer)
        limit, steps = Budget.read(budget), max(1, steps)
        options = PlanOptions.read(
            strategies=strategies,
            regions=regions,
            allow=allow,
            max_error=max_error,
            host_budget=host_budget,
            overrides=overrides,
            link=link,
        )
        asked = described(steps=steps, has_budget=budget is not None)
        agreement.same("what to compare", {**task.facts(), **options.facts(), **asked})
        task = agreement.patient(task)
        with agreement.stepping():
            traced, costs = trace_and_cost(task, options, part_of(report, 0.0, 0.35))
        step = task.step()
        planner = planner_for(agreement, (traced, costs), options, limit.bytes_on(costs))
        plans = _plan_all(planner, step, part_of(report, 0.35, 0.5))
        with agreement.stepping(), untouched(model):
            baseline_peak_bytes, measured, timings = _measure(step, plans, steps, part_of(report, 0.5, 1.0))
        report("done", 1.0)
        found = Comparison(
            model=traced.model,
            signature=traced.signature,
            device=str(step.device),
            versions=versions(),
            steps=steps,
            baseline_peak_bytes=baseline_peak_bytes,
            measured_baseline_seconds=timings[BASELINE].median_seconds,
            rows=tuple(_row(name, plan, measured.get(name), timings) for name, plan in plans.items()),
        )
        return _merged(agreement, found)


def _plan_all(planner: StepPlanner, step: TrainingStep, report: Progress) -> dict[str, Plan]:
    """One plan per strategy; the budget goes to ``auto``."""
    planner.try_forms(lambda: step, report)
    plans: dict[str, Plan] = {}
    for name in planner.options.strategies:
        report(f"planning {name}", 0.8)
        budget_bytes = planner.budget_bytes if name == "auto" else None
        plans[name] = planner.solve(budget_bytes, name, raise_below_floor=False)
    return plans


def _measure(
    step: TrainingStep, plans: Mapping[str, Plan], rounds: int, report: Progress
) -> tuple[int, dict[str, PlanMeasurement], dict[str, Timing]]:
    """Run every plan that can be applied, then time all of them and the unmanaged step in turns.

    Returns the unmanaged step's peak, what was measured of each plan, and timings, the ``BASELINE``'s among them.
    """
    usable = {name: plan for name, plan in plans.items() if plan.status.is_usable}
    state_bytes = max((plan.classes.get(Category.OPTIMIZER_STATE, 0) for plan in plans.values()), default=0)
    absent_bytes = step.absent_state_bytes(state_bytes)
    report("running the unmanaged step", 0.0)
    evidence = collect_evidence(step, Depth())
    baseline_peak_bytes = step.measure_peak().peak_bytes + absent_bytes
    measured: dict[str, PlanMeasurement] = {}
    runs: dict[str, Callable[[], object]] = {BASELINE: step.run}
    with contextlib.ExitStack() as stack:
        for position, (name, plan) in enumerate(usable.items()):
            report(f"running {name}", 0.1 + 0.4 * position / len(usable))
            handle = manage(step.model, plan)
            stack.callback(handle.remove)
            measured[name] = _run_twice(step, evidence, absent_bytes)
            handle.pause()
            runs[name] = managed_run(step, handle)
        report("timing in turns", 0.5)
        timings = time_in_turns(runs, device=step.device, rounds=rounds)
    step.clear_gradients()
    return baseline_peak_bytes, measured, timings


def _run_twice(step: TrainingStep, evidence: Evidence, absent_bytes: int) -> PlanMeasurement:
    """The larger peak of the recording run and a steady one, and what is further off of their gradients and buffers."""
    recording_bytes = step.measure_peak().peak_bytes
    apart = compare_with(evidence, step)
    steady_bytes = step.measure_peak().peak_bytes
    return PlanMeasurement(max(recording_bytes, steady_bytes + absent_bytes), apart.worst(compare_with(evidence, step)))


def _row(name: str, plan: Plan, measured: PlanMeasurement | None, timings: Mapping[str, Timing]) -> ComparisonRow:
    row = ComparisonRow(
        strategy=name,
        status=plan.status,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_seconds=plan.predicted_seconds,
        is_lossless=plan.is_lossless,
        note="" if plan.status.is_usable else plan.status.advice,
    )
    if measured is None:
        return row
    ratio = paired_ratio(timings[name], timings[BASELINE])
    return msgspec.structs.replace(
        row,
        measured_peak_bytes=measured.peak_bytes,
        measured_seconds=timings[name].median_seconds,
        measured_ratio=ratio.median,
        measured_ratio_low=ratio.low,
        measured_ratio_high=ratio.high,
        is_bit_equal=measured.apart.is_within_spread,
        gradient_error=None if plan.is_lossless else finite(measured.apart.error),
    )


def _merged(agreement: Agreement, comparison: Comparison) -> Comparison:
    """The largest peak, the slowest rank's seconds and the largest error of every strategy; equal where it is on all ranks."""
    if agreement.size == 1:
        return comparison
    told = of_all_ranks(agreement, "comparisons", comparison)
    seconds = [each.measured_baseline_seconds for each in told if each.measured_baseline_seconds is not None]
    return msgspec.structs.replace(
        told[0],
        baseline_peak_bytes=max(each.baseline_peak_bytes for each in told),
        measured_baseline_seconds=max(seconds, default=None),
        rows=tuple(_merged_row(rows) for rows in zip(*(each.rows for each in told), strict=True)),
        notes=(*told[0].notes, f"the worst of {agreement.size} ranks: largest peaks, seconds of the slowest"),
    )


def _merged_row(rows: Sequence[ComparisonRow]) -> ComparisonRow:
    slowest = max(rows, key=lambda row: row.measured_seconds or 0.0)
    peaks = [row.measured_peak_bytes for row in rows if row.measured_peak_bytes is not None]
    errors = [row.gradient_error for row in rows if row.gradient_error is not None]
    equal = [row.is_bit_equal for row in rows if row.is_bit_equal is not None]
    return msgspec.structs.replace(
        slowest,
        measured_peak_bytes=max(peaks, default=None),
        gradient_error=max(errors, default=None),
        is_bit_equal=all(equal) if equal else None,
    )
