"""The verbs ``verify`` and ``compare``: claims against measurement, of one plan, or of several strategies side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plimsoll.analysis.verify.evidence import Depth, versions
from plimsoll.analysis.verify.hold_plan import verify_plan
from plimsoll.analysis.verify.merging import merged_comparison, worst_receipt
from plimsoll.analysis.verify.own import verify_own
from plimsoll.analysis.verify.revising import Reviser, needs_confirmation
from plimsoll.analysis.verify.side_by_side import BASELINE, SideBySide, measure_side_by_side
from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.receipt import Receipt, finite
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.session.agreement import Agreement, agreement_for, described, plan_facts
from plimsoll.session.manage import check_plan, manage, refuse_other_device, refuse_other_model, refuse_other_signature
from plimsoll.session.options import Budget, PlanOptions, check_count, read_error
from plimsoll.session.rendezvous.exchange import TIMEOUT_SECONDS
from plimsoll.session.step_planner import StepPlanner, trace_and_cost
from plimsoll.session.task import TrainingTask
from plimsoll.session.tightest_rank import planner_for
from plimsoll.session.training_step import Context, TrainingStep
from plimsoll.tracing.meters.timing import Interval, paired_ratio
from plimsoll.tracing.recorder.calling import Loss, check_devices
from plimsoll.tracing.recorder.untouched import untouched


def verify(
    model: nn.Module,
    batch: Any,
    plan: Plan | None = None,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 5,
    intermediates: Sequence[str] | str = (),
    curve_steps: int = 0,
    context: Context | None = None,
    max_error: float | str = 0.0,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
) -> Receipt:
    """Hold a plan's claims against evidence: gradients bit for bit, peak and seconds predicted and measured.

    The unmanaged step runs first, twice from the same random state: a model that differs from itself is compared within
    that spread, and the receipt says so. Then the managed step: its gradients and buffers, its peak, and, tensor by tensor,
    whether what comes back in backward is what forward saved; where it is not, the receipt names the region, the value,
    the op and the likely cause.

    A plan that was made without the device (``device_profile=``) is confirmed here: ops are timed, and where the peak is above
    the budget, or peak or time were predicted wrong, the plan is solved again with measured costs and verified. The receipt
    says what was off (``confirmation``) and carries the new plan (``revised_plan``).

    Without a plan, what the model does by itself is verified: ``torch.utils.checkpoint``, selective checkpointing,
    offloading contexts, any saved-tensor hooks, and torch.compile under an ``activation_memory_budget`` below 1. The
    reference is the same step with that switched off. There the gradient is also held against the loss itself: the slope
    that it claims, against losses at shifted parameters.

    Model, gradients, buffers, random state and the optimizer are left as they were. On several ranks all verify the same plan
    together, and all get the receipt of the rank where it came off worst.

    Args:
        model: as for ``plimsoll.plan``.
        batch: as for ``plimsoll.plan``.
        plan: the plan to check; ``None``: what the model does by itself.
        loss: as for ``plimsoll.plan``.
        optimizer: as for ``plimsoll.plan``.
        steps: timed runs of each side, interleaved; as many consecutive losses are compared. At least one.
        intermediates: patterns of module names, such as ``model.layers.*.mlp``: their outputs, and the gradients of
            those, are compared in both runs.
        curve_steps: so many training steps, on this batch with ``optimizer`` (else with gradient descent), are compared
            by their losses.
        context: without a plan: makes a context to run a step in, such as ``torch.autograd.graph.save_on_cpu``; it is
            called anew for every step.
        max_error: without a plan: the relative error of the gradient that is fine with you (hooks that compress).
        ranks: as for ``plimsoll.plan``.
        timeout_seconds: as for ``plimsoll.plan``.
        progress: told the stage and the share done.

    Returns:
        A receipt with a verdict and an exit code.

    Raises:
        PlanMismatch: the plan was made for another model, batch shape, dtype or mode, or for another kind of device.
        PlanNotUsable: there is nothing to apply.
        InvalidModel: a plan is at work on it, or it is on the meta device: nothing could be measured; or, without a plan,
            it does nothing by itself.
        InvalidRegions: a pattern of intermediates that matches no module.
        InvalidBudget: ``max_error`` is no share.
        InvalidOption: ``context`` makes none, or has no effect; ``curve_steps`` is no count; a pattern is no text; or,
            without a plan, there are several ranks.
        RanksDiffer, RankFailed, RankMissing: as for ``plimsoll.plan``.

    Example:
        >>> receipt = plimsoll.verify(model, batch, plan)  # doctest: +SKIP
        >>> receipt.verdict  # doctest: +SKIP
        <Verdict.VERIFIED: 'VERIFIED'>
    """
    with agreement_for(model, "verify", ranks=ranks, timeout_seconds=timeout_seconds) as agreement:
        task = _read_measurable(model, batch, loss, optimizer)
        if plan is not None:
            check_plan(plan)
            refuse_other_model(model, plan)
            refuse_other_device(model, plan)
        check_devices(model, *task.call())
        steps = max(1, steps)
        check_count("curve_steps", curve_steps, least=0)
        _check_context(context)
        depth = Depth(intermediates=_as_names(intermediates), curve_steps=curve_steps, optimizer=optimizer)
        error = read_error(max_error)
        if plan is None:
            _refuse_own_of_ranks(agreement)
        else:
            refuse_other_signature(task.signature(), plan)
            _refuse_without_effect(context, error)
            agreement.same(
                "what to verify",
                {
                    **task.facts(),
                    **plan_facts(plan),
                    **described(steps=steps, intermediates=depth.intermediates, curve_steps=curve_steps),
                },
            )
        task = agreement.patient(task)
        with untouched(model):
            step = task.step(context or contextlib.nullcontext)
            if plan is not None:
                job = _Verification(task, step, progress or silent)
                return worst_receipt(agreement, job.receipt(agreement, plan, steps, depth), plan)
            return verify_own(
                step, signature=task.signature(), max_error=error, steps=steps, depth=depth, progress=progress
            )


@dataclass(frozen=True, slots=True)
class _Verification:
    """One step on which a plan is verified."""

    task: TrainingTask
    step: TrainingStep
    report: Progress

    def receipt(self, agreement: Agreement, plan: Plan, steps: int, depth: Depth) -> Receipt:
        """This rank's receipt; where the plan was made without the device, with what the device says."""
        is_made_elsewhere = needs_confirmation(plan)
        shown = part_of(self.report, 0.0, 0.5) if is_made_elsewhere else self.report
        with agreement.stepping():
            receipt = verify_plan(
                self.step, plan, lambda: manage(self.task.model, plan), steps=steps, depth=depth, progress=shown
            )
        if not is_made_elsewhere:
            return receipt
        report = part_of(self.report, 0.5, 1.0)
        reviser = Reviser(self.task, self.step, report, agreement)
        return reviser.confirm(plan, receipt, steps=steps)


def _refuse_own_of_ranks(agreement: Agreement) -> None:
    """What a model does by itself is verified on one rank: the loss's slope and the search for a cause are not shared."""
    if agreement.size > 1:
        raise InvalidOption(
            f"Without a plan, {agreement.size} ranks cannot verify together.",
            why="the gradients are averaged over ranks, so they are not the slope of any one rank's loss",
            next="verify the model's own checkpointing on one process, before it is wrapped; or name a plan",
        )


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
        task = _read_measurable(model, batch, loss, optimizer)
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
            found = measure_side_by_side(step, plans, rounds=steps, report=part_of(report, 0.5, 1.0))
        report("done", 1.0)
        return merged_comparison(agreement, _comparison(traced, str(step.device), steps, plans, found))


def _plan_all(planner: StepPlanner, step: TrainingStep, report: Progress) -> dict[str, Plan]:
    """One plan per strategy; the budget goes to ``auto``."""
    planner.try_forms(lambda: step, report)
    plans: dict[str, Plan] = {}
    for name in planner.options.strategies:
        report(f"planning {name}", 0.8)
        budget_bytes = planner.budget_bytes if name == "auto" else None
        plans[name] = planner.solve(budget_bytes, name, raise_below_floor=False)
    return plans


def _refuse_without_effect(context: Context | None, max_error: float) -> None:
    """A plan says itself what it is allowed; what would be ignored is refused."""
    if context is not None or max_error:
        name = "max_error=" if context is None else "context="
        raise InvalidOption(
            f"{name} has no effect on a plan.",
            why="it belongs to verifying what a model does by itself; a plan carries its own limits",
            next=f"leave {name} out, or leave the plan out",
        )


def _check_context(context: object) -> None:
    if context is not None and not callable(context):
        raise InvalidOption(
            f"context= is a {type(context).__name__}, which cannot be called.",
            why="every step runs in a context of its own, and one that was left may not be entered again",
            next="context=lambda: ..., or the class itself, as in context=torch.autograd.graph.save_on_cpu",
        )


def _as_names(intermediates: Sequence[str] | str) -> tuple[str, ...]:
    names = (intermediates,) if isinstance(intermediates, str) else intermediates
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise InvalidOption(
            f"intermediates={intermediates!r} names no modules.",
            why="patterns of module names are text",
            next='intermediates="model.layers.*.mlp", or a list of such patterns',
        )
    return tuple(names)


def _read_measurable(
    model: nn.Module, batch: Any, loss: Loss | None, optimizer: torch.optim.Optimizer | None
) -> TrainingTask:
    task = TrainingTask.read(model, batch, loss=loss, optimizer=optimizer)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidModel(
            f"{type(model).__name__} is on the meta device.",
            why="its parameters have no memory, so no step can run and nothing can be measured",
            next="plimsoll.plan works on the meta device; verify and compare on the device itself",
        )
    return task


def _comparison(traced: Trace, device: str, steps: int, plans: dict[str, Plan], found: SideBySide) -> Comparison:
    return Comparison(
        model=traced.model,
        signature=traced.signature,
        device=device,
        versions=versions(),
        steps=steps,
        baseline_peak_bytes=found.baseline_peak_bytes,
        measured_baseline_seconds=found.timings[BASELINE].median_seconds,
        rows=tuple(_row(name, plan, found) for name, plan in plans.items()),
    )


def _row(name: str, plan: Plan, found: SideBySide) -> ComparisonRow:
    measured, timing = found.plans.get(name), found.timings.get(name)
    ratio: Interval | None = None if timing is None else paired_ratio(timing, found.timings[BASELINE])
    return ComparisonRow(
        strategy=name,
        status=plan.status,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=None if measured is None else measured.peak_bytes,
        predicted_seconds=plan.predicted_seconds,
        measured_seconds=None if timing is None else timing.median_seconds,
        measured_ratio=None if ratio is None else ratio.median,
        measured_ratio_low=None if ratio is None else ratio.low,
        measured_ratio_high=None if ratio is None else ratio.high,
        is_bit_equal=None if measured is None else measured.is_bit_equal,
        is_lossless=plan.is_lossless,
        gradient_error=None if measured is None or plan.is_lossless else finite(measured.gradient_error),
        note="" if plan.status.is_usable else plan.status.advice,
    )
