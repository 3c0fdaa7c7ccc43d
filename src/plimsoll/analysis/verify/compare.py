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
    MemoryBudget,
    collect_evidence,
    compare_with,
    compiled_rounding,
    managed_run,
    of_all_ranks,
    read_measurable,
    read_shares,
    versions,
)
from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.receipt import finite
from plimsoll.artifacts.trace import Category
from plimsoll.planning.strategies import MEMORY_BUDGET
from plimsoll.session.agreement import Agreement, agreement_for, described
from plimsoll.session.compiled import compiled_planner
from plimsoll.session.manage import manage
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.rendezvous.exchange import TIMEOUT_SECONDS
from plimsoll.session.step_planner import StepPlanner
from plimsoll.session.task import TrainingTask
from plimsoll.session.tightest_rank import eager_planner
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.meters.timing import Timing, paired_ratio, time_in_turns
from plimsoll.tracing.recorder.calling import Loss
from plimsoll.tracing.recorder.untouched import untouched
from plimsoll.units import check_count

BASELINE = ""
"""The unmanaged step's name among the timings."""
STRATEGIES = ("none", "full", "every:2", "sqrt", "selective:attention")
_BESIDE = "compared with the same model compiled under torch's default partition"
COMPILED_STRATEGIES = ("none", "full", *(f"{MEMORY_BUDGET}:{share}" for share in ("0.7", "0.5", "0.3", "0")))


@dataclass(frozen=True, slots=True)
class PlanMeasurement:
    """What one plan took, and whether it changed anything."""

    peak_bytes: int
    apart: Apart


def compare(
    model: nn.Module,
    batch: Any,
    strategies: Sequence[str] | str | None = None,
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
    compile: bool | Mapping[str, Any] | None = None,  # noqa: A002 - torch's word
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
) -> Comparison:
    """Measure strategies side by side on one model and batch: peak, paired step time, gradients.

    Args:
        model: as for ``plimsoll.plan``.
        batch: as for ``plimsoll.plan``.
        strategies: names as in ``plimsoll.plan``; for a compiled model also ``memory-budget:SHARE``, torch's own budget of
            so much of the bytes that each graph saves (``memory-budget:0.5``). By default the usual ones, and ``auto`` where
            there is a budget.
        budget: goes to ``auto``; the others run as they are.
        loss: as for ``plimsoll.plan``.
        optimizer: as for ``plimsoll.plan``.
        regions: as for ``plimsoll.plan``.
        steps: timed rounds; in each, every strategy runs once.
        allow: what ``auto`` may do, as for ``plimsoll.plan``, and so for ``max_error``, ``host_budget``, ``overrides`` and
            ``link``.
        max_error: the relative error of the gradient that ``auto`` may cause.
        host_budget: bytes at the other end of the link.
        overrides: decisions by pattern.
        link: ``host`` or ``disk``.
        compile: compare inside of torch.compile, as for ``plimsoll.plan``.
        ranks: as for ``plimsoll.plan``; all ranks get the same comparison, with the largest peaks and the slowest times.
        timeout_seconds: as for ``plimsoll.plan``.
        progress: told the stage and the share done.

    Returns:
        A comparison with one row per strategy; a strategy that does not fit is a row with its status. A compiled model is
        compared with what torch.compile's default partition makes of it.

    Raises:
        InvalidStrategy: no such strategy. Others as for ``plimsoll.plan``.
    """
    report = progress or silent
    with agreement_for(model, "compare", ranks=ranks, timeout_seconds=timeout_seconds) as agreement:
        task = read_measurable(model, batch, loss, optimizer, compile=compile)
        check_count("steps", steps, least=1)
        limit = Budget.read(budget)
        names = _named(strategies, task, has_budget=budget is not None)
        shares = read_shares(names) if task.units else {}
        options = PlanOptions.read(
            strategies=[each for each in names if each not in shares],
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
        with task.compiled():
            planner_of = compiled_planner if task.units else eager_planner
            planner = planner_of(agreement, task, options, limit, part_of(report, 0.0, 0.35))
            plans = _plan_all(planner, task.step(), part_of(report, 0.35, 0.5))
            budgets = {name: MemoryBudget(task.units, share) for name, share in shares.items()}
            with agreement.stepping(), untouched(model, planner.trace.written):
                measured = _measure(task, model, {**plans, **budgets}, steps, part_of(report, 0.5, 1.0))
        report("done", 1.0)
        found = Comparison(
            model=planner.trace.model,
            signature=planner.trace.signature,
            device=str(task.step().device),
            versions=versions(),
            steps=steps,
            baseline_peak_bytes=measured.baseline_peak_bytes,
            measured_baseline_seconds=measured.timings[BASELINE].median_seconds,
            rows=tuple(measured.row(name, plans.get(name)) for name in names),
            notes=(_BESIDE,) if task.units else (),
        )
        return _merged(agreement, found)


def _named(strategies: Sequence[str] | str | None, task: TrainingTask, *, has_budget: bool) -> tuple[str, ...]:
    """The strategies that were asked for, each once; the usual ones by default."""
    if strategies is None:
        strategies = (*(COMPILED_STRATEGIES if task.units else STRATEGIES), *(["auto"] if has_budget else []))
    return (strategies,) if isinstance(strategies, str) else tuple(dict.fromkeys(strategies))


def _plan_all(planner: StepPlanner, step: TrainingStep, report: Progress) -> dict[str, Plan]:
    """One plan per strategy; the budget goes to ``auto``."""
    planner.try_forms(lambda: step, report)
    plans: dict[str, Plan] = {}
    for name in planner.options.strategies:
        report(f"planning {name}", 0.8)
        budget_bytes = planner.budget_bytes if name == "auto" else None
        plans[name] = planner.solve(budget_bytes, name, raise_below_floor=False)
    return plans


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Everything that was run: the unmanaged step's peak, what was seen of each strategy, and the seconds of all."""

    baseline_peak_bytes: int
    by_name: dict[str, PlanMeasurement]
    timings: dict[str, Timing]
    rounding: float
    """The relative error of the gradient that other fusions may make; 0: the same kernels run."""

    def row(self, name: str, plan: Plan | None) -> ComparisonRow:
        """What a strategy's plan predicts, if there is one, beside what was measured."""
        row = ComparisonRow(strategy=name) if plan is None else _predicted(name, plan)
        measured = self.by_name.get(name)
        if measured is None:
            return row
        ratio = paired_ratio(self.timings[name], self.timings[BASELINE])
        is_equal, error = measured.apart.is_within_spread, finite(measured.apart.error)
        return msgspec.structs.replace(
            row,
            measured_peak_bytes=measured.peak_bytes,
            measured_seconds=self.timings[name].median_seconds,
            measured_ratio=ratio.median,
            measured_ratio_low=ratio.low,
            measured_ratio_high=ratio.high,
            is_bit_equal=is_equal,
            is_rounding=not is_equal and error is not None and error <= self.rounding,
            gradient_error=None if row.is_lossless and (is_equal or not self.rounding) else error,
        )


def _predicted(name: str, plan: Plan) -> ComparisonRow:
    return ComparisonRow(
        strategy=name,
        status=plan.status,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_seconds=plan.predicted_seconds,
        is_lossless=plan.is_lossless,
        note="" if plan.status.is_usable else plan.status.advice,
    )


def _measure(
    task: TrainingTask, model: nn.Module, managers: Mapping[str, Plan | MemoryBudget], rounds: int, report: Progress
) -> _Measured:
    """Run every strategy that can be applied, then time all of them and the unmanaged step in turns."""
    step = task.step()
    usable = {name: each for name, each in managers.items() if not isinstance(each, Plan) or each.status.is_usable}
    plans = [each for each in managers.values() if isinstance(each, Plan)]
    absent_bytes = step.absent_state_bytes(
        max((each.classes.get(Category.OPTIMIZER_STATE, 0) for each in plans), default=0)
    )
    report("running the unmanaged step", 0.0)
    evidence = collect_evidence(step, Depth())
    baseline_peak_bytes = step.measure_peak().peak_bytes + absent_bytes
    measured: dict[str, PlanMeasurement] = {}
    runs: dict[str, Callable[[], object]] = {BASELINE: step.run}
    with contextlib.ExitStack() as stack:
        for position, (name, manager) in enumerate(usable.items()):
            report(f"running {name}", 0.1 + 0.4 * position / len(usable))
            handle = manager.resumed() if isinstance(manager, MemoryBudget) else manage(model, manager)
            stack.callback(handle.remove)
            if task.units:
                step.run()  # what the compiler takes is not the step's
            measured[name] = _run_twice(step, evidence, absent_bytes)
            handle.pause()
            runs[name] = managed_run(step, handle)
        report("timing in turns", 0.5)
        timings = time_in_turns(runs, device=step.device, rounds=rounds)
    rounding = compiled_rounding(step, task.units, evidence) if task.units else 0.0
    step.clear_gradients()
    return _Measured(baseline_peak_bytes=baseline_peak_bytes, by_name=measured, timings=timings, rounding=rounding)


def _run_twice(step: TrainingStep, evidence: Evidence, absent_bytes: int) -> PlanMeasurement:
    """The larger peak of the recording run and a steady one, and what is further off of their gradients and buffers."""
    recording_bytes = step.measure_peak().peak_bytes
    apart = compare_with(evidence, step)
    steady_bytes = step.measure_peak().peak_bytes
    return PlanMeasurement(max(recording_bytes, steady_bytes + absent_bytes), apart.worst(compare_with(evidence, step)))


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
