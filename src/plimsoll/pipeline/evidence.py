"""Claims against measurement: one plan verified, or several strategies side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.trace import Category
from plimsoll.measuring.timing import Interval, Timing, paired_ratio, time_in_turns
from plimsoll.pipeline.matching import refuse_other_model, refuse_other_signature
from plimsoll.pipeline.plans import resolve_budget, trace_and_cost
from plimsoll.planning.solve import Planner, solve
from plimsoll.recording.calling import Loss, check_devices, split_batch
from plimsoll.recording.untouched import untouched
from plimsoll.runtime.apply import Handle, apply_plan
from plimsoll.units import parse_bytes
from plimsoll.verification.compare_tensors import mismatches
from plimsoll.verification.step import TrainingStep
from plimsoll.verification.verify import collect_evidence, verify_plan, versions

Progress = Callable[[str, float], None]


def verify(
    model: nn.Module,
    batch: Any,
    plan: Plan,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 5,
    progress: Progress | None = None,
) -> Receipt:
    """Hold a plan's claims against evidence: gradients bit for bit, peak and seconds predicted and measured.

    The unmanaged step runs first, twice from the same random state: a model that differs from itself is compared within
    that spread, and the receipt says so. Model, gradients, buffers and random state are left as they were; the optimizer
    never steps.

    Args:
        model, batch, loss, optimizer: as for ``plimsoll.plan``.
        plan: the plan to check.
        steps: timed runs of each side, interleaved; as many consecutive losses are compared.
        progress: told the stage and the share done.

    Returns:
        A receipt with a verdict and an exit code.

    Raises:
        PlanMismatch: the plan was made for another model, batch shape, dtype or mode.
        PlanNotUsable: there is nothing to apply.

    Example:
        >>> receipt = plimsoll.verify(model, batch, plan)  # doctest: +SKIP
        >>> receipt.verdict  # doctest: +SKIP
        <Verdict.VERIFIED: 'VERIFIED'>
    """
    refuse_other_model(model, plan)
    args, kwargs = split_batch(batch)
    check_devices(model, args, kwargs)
    refuse_other_signature(model, args, kwargs, plan, loss)
    with untouched(model):
        step = TrainingStep(model, args, kwargs, loss=loss, optimizer=optimizer)
        return verify_plan(step, plan, lambda: apply_plan(model, plan), steps=steps, progress=progress)


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
    progress: Progress | None = None,
) -> Comparison:
    """Measure strategies side by side on one model and batch: peak, paired step time, gradients.

    Args:
        model, batch, budget, loss, optimizer, regions: as for ``plimsoll.plan``; ``budget`` goes to ``auto``.
        strategies: names as in ``plimsoll.plan``.
        steps: timed rounds; in each, every strategy runs once.
        progress: told the stage and the share done.

    Returns:
        A comparison with one row per strategy; a strategy that does not fit is a row with its status.

    Raises:
        InvalidStrategy: no such strategy.
    """
    report = progress or (lambda stage, share: None)
    args, kwargs = split_batch(batch)
    traced, costs = trace_and_cost(
        model, batch, loss=loss, optimizer=optimizer, regions=regions, progress=lambda s, x: report(s, 0.4 * x)
    )
    asked_bytes = None if budget is None or budget == "auto" else parse_bytes(budget)
    budget_bytes = resolve_budget(budget, asked_bytes, costs)
    planner = Planner(traced, costs)
    plans: dict[str, Plan] = {}
    for name in strategies:
        report(f"planning {name}", 0.4)
        plans[name] = solve(
            traced,
            costs,
            budget_bytes=budget_bytes if name == "auto" else None,
            strategy=name,
            raise_below_floor=False,
            planner=planner,
        )
    usable = [name for name in strategies if plans[name].status.is_usable]
    with untouched(model):
        step = TrainingStep(model, args, kwargs, loss=loss, optimizer=optimizer)
        report("running the unmanaged step", 0.5)
        evidence = collect_evidence(step)
        baseline_peak_bytes = step.measure_peak().peak_bytes
        measured: dict[str, tuple[int, bool]] = {}
        handles: dict[str, Handle] = {}
        with contextlib.ExitStack() as stack:
            for name in usable:
                report(f"running {name}", 0.6)
                handle = handles[name] = apply_plan(model, plans[name])
                stack.callback(handle.remove)
                step.run()
                is_equal = not mismatches(evidence.gradients, step.gradients(), evidence.spread) and not mismatches(
                    evidence.buffers, step.buffers(), evidence.spread
                )
                peak_bytes = step.measure_peak().peak_bytes
                state_bytes = plans[name].classes.get(Category.OPTIMIZER_STATE, 0)
                measured[name] = (peak_bytes + step.absent_state_bytes(state_bytes), is_equal)
                handle.pause()
            report("timing in turns", 0.7)
            timings = time_in_turns(
                {"": step.run, **{name: _managed_run(step, handles[name]) for name in usable}},
                device=step.device,
                rounds=steps,
            )
        step.clear_gradients()
    report("done", 1.0)
    return Comparison(
        model=traced.model,
        signature=traced.signature,
        device=str(step.device),
        versions=versions(),
        steps=steps,
        baseline_peak_bytes=baseline_peak_bytes,
        measured_baseline_seconds=timings[""].median_seconds,
        rows=tuple(_row(name, plans[name], measured.get(name), timings) for name in strategies),
    )


def _managed_run(step: TrainingStep, handle: Handle) -> Callable[[], object]:
    def run() -> None:
        handle.resume()
        try:
            step.run()
        finally:
            handle.pause()

    return run


def _row(name: str, plan: Plan, measured: tuple[int, bool] | None, timings: dict[str, Timing]) -> ComparisonRow:
    ratio: Interval | None = paired_ratio(timings[name], timings[""]) if name in timings else None
    return ComparisonRow(
        strategy=name,
        status=plan.status,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=None if measured is None else measured[0],
        predicted_seconds=plan.predicted_seconds,
        measured_seconds=timings[name].median_seconds if name in timings else None,
        measured_ratio=None if ratio is None else ratio.median,
        measured_ratio_low=None if ratio is None else ratio.low,
        measured_ratio_high=None if ratio is None else ratio.high,
        is_bit_equal=None if measured is None else measured[1],
        note="" if plan.status.is_usable else plan.status.advice,
    )
