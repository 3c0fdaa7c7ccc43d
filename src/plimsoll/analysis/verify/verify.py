"""Checks a plan's claims by running the step: the verb ``verify``. It can also check a model's own checkpointing.

The result is a receipt (the evidence for the plan).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from plimsoll.analysis.verify.evidence import (
    Apart,
    Depth,
    Evidence,
    Observed,
    collect_evidence,
    compare_with,
    compiled_rounding,
    consecutive_losses,
    half_the_digits,
    keep_casts,
    make_receipt,
    of_all_ranks,
    read_measurable,
    run_curve,
    run_intermediates,
    time_both,
    torch_errs,
)
from plimsoll.analysis.verify.intermediates import compare_intermediates
from plimsoll.analysis.verify.own import find_written, verify_own
from plimsoll.analysis.verify.revising import Reviser, needs_confirmation
from plimsoll.analysis.verify.tile_rounding import measure_tile_rounding
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of, silent
from plimsoll.artifacts.receipt import Receipt, ReceiptVerdict
from plimsoll.artifacts.trace import Phase
from plimsoll.engine.tiles import in_tiles
from plimsoll.errors import InvalidOption
from plimsoll.session.account import planned_state_bytes
from plimsoll.session.agreement import Agreement, agreement_for, described, plan_facts
from plimsoll.session.manage import check_plan, manage, refuse_other_device, refuse_other_model, refuse_other_signature
from plimsoll.session.options import read_error
from plimsoll.session.rendezvous.exchange import TIMEOUT_SECONDS
from plimsoll.session.task import TrainingTask, compiled_by
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.compiled.units import find_units, in_place
from plimsoll.tracing.optimizer import needs_closure
from plimsoll.tracing.recorder.calling import Context, Loss, check_context, check_devices
from plimsoll.tracing.recorder.untouched import untouched
from plimsoll.units import check_count, format_bytes, format_seconds

_STATE_NOISE = 0.01
"""A share of the plan's bytes. If the bytes of the optimizer state differ from the plan's by less than this share, they count
as planned."""
_SEVERITY = {verdict: index for index, verdict in enumerate(ReceiptVerdict)}
"""A mapping from each verdict to a number, 0 for the worst. A receipt tests verdicts in this order, the order of
``ReceiptVerdict``.
"""


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
    """Check a plan by running the step: compare gradients bit for bit, and peak and seconds with the predictions.

    The step without a plan runs first, twice from the same random state. If the two runs differ, the plan is compared within
    that spread, and the receipt says so. Then the managed step runs. Its gradients, buffers and peak are compared, and every
    tensor that backward unpacks is compared with the tensor that forward saved. Where one differs, the receipt names the region
    (a module that the plan decides about), the value, the op and the likely cause.

    A plan that was made without the device (``device_profile=``) is confirmed here: ops are timed. If the peak is above the
    budget, or if peak or time were predicted wrong, the plan is solved again with measured costs and verified. The receipt's
    ``confirmation`` says what was off, and its ``revised_plan`` is the new plan.

    Without a plan, the model's own way to save memory is verified: ``torch.utils.checkpoint``, selective checkpointing,
    offloading contexts, any saved-tensor hooks, and torch.compile under an ``activation_memory_budget`` below 1. The reference
    is the same step with all of that switched off. In this case the gradient is also compared with the loss: the slope that the
    gradient claims must agree with losses at shifted parameters.

    Model, gradients, buffers, random state and the optimizer are restored. Several ranks verify the same plan together, and
    every rank gets the receipt of the rank with the worst result.

    Args:
        model: as for ``plimsoll.plan``.
        batch: as for ``plimsoll.plan``.
        plan: the plan to check; ``None`` checks the model's own way to save memory.
        loss: as for ``plimsoll.plan``.
        optimizer: as for ``plimsoll.plan``.
        steps: timed runs of each side, interleaved. The losses of the same number of consecutive steps are compared.
        intermediates: patterns of module names, such as ``model.layers.*.mlp``. The modules' outputs, and the gradients with
            respect to these outputs, are compared in both runs.
        curve_steps: the number of training steps whose losses are compared, all on this batch. The steps use ``optimizer``, or
            plain gradient descent if no optimizer is passed. 0 compares no curve.
        context: only without a plan: a function that is called once per step and makes the context that the step runs in, such
            as ``torch.autograd.graph.save_on_cpu``.
        max_error: only without a plan: the relative error of the gradient that you accept, for hooks that compress.
        ranks: as for ``plimsoll.plan``.
        timeout_seconds: as for ``plimsoll.plan``.
        progress: a function that is called with the name of the current stage and the share of the work that is done.

    Returns:
        A receipt: the measurements next to the predictions, a verdict, and an exit code that is 0 if the verdict is a pass.

    Raises:
        PlanMismatch: the plan was made for another model, batch shape, dtype or mode, or for another kind of device.
        PlanNotUsable: the plan does not contain decisions to apply.
        InvalidModel: a plan is already applied to the model; or the model is on the meta device, where nothing can be measured;
            or, without a plan, the model does not save memory by itself.
        InvalidRegions: a pattern of intermediates does not match any module, or its modules return no tensors.
        InvalidBudget: ``max_error`` is not a share.
        InvalidOption: ``context`` does not make a context, or ``context`` or ``max_error`` is passed with a plan; ``steps`` or
            ``curve_steps`` is not a count; the optimizer of a curve needs a closure; a pattern is not text; or, without a plan,
            there are several ranks.
        RanksDiffer, RankFailed, RankMissing: as for ``plimsoll.plan``.

    Example:
        >>> receipt = plimsoll.verify(model, batch, plan)  # doctest: +SKIP
        >>> receipt.verdict  # doctest: +SKIP
        <ReceiptVerdict.VERIFIED: 'VERIFIED'>
    """
    with agreement_for(model, "verify", ranks=ranks, timeout_seconds=timeout_seconds) as agreement:
        if plan is not None:
            check_plan(plan)
        task = read_measurable(
            model, batch, loss, optimizer, compile=None if plan is None else compiled_by(plan, model)
        )
        if plan is not None:
            refuse_other_model(model, plan)
            refuse_other_device(model, plan)
        check_devices(model, *task.call())
        check_count("steps", steps, least=1)
        check_count("curve_steps", curve_steps, least=0)
        check_context(context or contextlib.nullcontext)
        _refuse_closure(optimizer, curve_steps)
        depth = Depth(intermediates=_as_names(intermediates), curve_steps=curve_steps, optimizer=optimizer)
        error = read_error(max_error)
        if plan is None:
            _refuse_own_of_ranks(agreement)
        else:
            refuse_other_signature(task.signature(), plan)
            _refuse_without_effect(context, error)
            agreement.same(
                "what to verify",
                task.facts()
                | plan_facts(plan)
                | described(steps=steps, intermediates=depth.intermediates, curve_steps=curve_steps),
            )
        task = agreement.patient(task)
        report = progress or silent
        made = context or contextlib.nullcontext
        written = find_written(task, made) if plan is None else plan.written
        with untouched(model, written), task.compiled():
            step = task.step(made, written)
            if plan is None:
                return verify_own(step, task.signature(), max_error=error, steps=steps, depth=depth, report=report)
            receipt = _on_this_rank(agreement, task, step, plan, steps=steps, depth=depth, report=report)
            return _worst_receipt(agreement, receipt, plan)


def _on_this_rank(
    agreement: Agreement,
    task: TrainingTask,
    step: TrainingStep,
    plan: Plan,
    *,
    steps: int,
    depth: Depth,
    report: Progress,
) -> Receipt:
    """Verify a plan on this rank, and return the receipt. It has a confirmation if the plan was made without the device.

    If a compiled plan's gradient differs, two causes that do not blame the plan are tested one after the other: kernels that
    round at other places, then a wrong gradient of torch's own compiled step.
    """

    def hold(held: Plan, depth: Depth, report: Progress) -> Receipt:
        with agreement.stepping():
            receipt = _hold_plan(task, step, held, steps=steps, depth=depth, report=report)
        # Ranks decide together, because the steps below contain collectives: all ranks run them, or none does.
        is_equal = receipt.verdict is not ReceiptVerdict.GRADIENTS_DIFFER
        if not held.compiled or agreement.every("equal gradients", holds=is_equal):
            return receipt
        with agreement.stepping():
            allowing = _with_casts_kept(step, task.model, held, receipt)
        if agreement.every("casts", holds=allowing.verdict is not ReceiptVerdict.GRADIENTS_DIFFER):
            return allowing
        with agreement.stepping():
            error = torch_errs(step, find_units(task.model), lambda: manage(task.model, held))
        if not agreement.every("errors of torch", holds=error > 0):
            return allowing
        with agreement.stepping():
            return _hold_plan(task, step, held, steps=steps, depth=depth, report=report, error_of_torch=error)

    if not needs_confirmation(plan):
        return hold(plan, depth, report)
    receipt = hold(plan, depth, part_of(report, 0.0, 0.5))
    reviser = Reviser(task, step, agreement, part_of(report, 0.5, 1.0), lambda revised: hold(revised, Depth(), silent))
    return reviser.confirm(plan, receipt)


def _refuse_own_of_ranks(agreement: Agreement) -> None:
    """Raise if several ranks verify a model's own checkpointing: the slope check and the search for causes run on one."""
    if agreement.size > 1:
        raise InvalidOption(
            f"Without a plan, {agreement.size} ranks cannot verify together.",
            why="gradients are averaged over ranks, so they do not agree with the slope of one rank's loss",
            next="verify the model's own checkpointing in one process, before the model is wrapped; or give a plan",
        )


def _refuse_without_effect(context: Context | None, max_error: float) -> None:
    """Raise if ``context`` or ``max_error`` is passed with a plan, which has its own limits: both would be ignored."""
    if context is not None or max_error:
        name = "max_error=" if context is None else "context="
        raise InvalidOption(
            f"{name} does not have an effect if a plan is verified.",
            why="it applies to the model's own checkpointing; a plan already contains its limits",
            next=f"leave {name} out, or leave the plan out",
        )


def _refuse_closure(optimizer: torch.optim.Optimizer | None, curve_steps: int) -> None:
    """Raise if a loss curve is requested with an optimizer whose step runs forward and backward itself."""
    if curve_steps and optimizer is not None and needs_closure(optimizer):
        raise InvalidOption(
            f"curve_steps= cannot use {type(optimizer).__name__}.",
            why="its step runs forward and backward itself, through a closure, and a curve runs each once per step",
            next="leave optimizer= out to use plain gradient descent, or pass curve_steps=0",
        )


def _as_names(intermediates: Sequence[str] | str) -> tuple[str, ...]:
    names = (intermediates,) if isinstance(intermediates, str) else intermediates
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise InvalidOption(
            f"intermediates={intermediates!r} is not a pattern of module names.",
            why="a pattern is a str, and several patterns are a collection of str",
            next='pass intermediates="model.layers.*.mlp", or a list of such patterns',
        )
    return tuple(names)


def _hold_plan(
    task: TrainingTask,
    step: TrainingStep,
    plan: Plan,
    *,
    steps: int,
    depth: Depth,
    report: Progress,
    error_of_torch: float = 0.0,
) -> Receipt:
    """Run the step with the plan and without it, and return the receipt that compares the two.

    Args:
        task: the model, batch and loss (``step.model`` may be inside of a wrapper, ``task.model``).
        step: the training step, on the model without a plan.
        plan: the plan to check.
        steps: timed runs of each side. The losses of the same number of consecutive steps are compared.
        depth: further comparisons.
        report: called with the stage and the share done.
        error_of_torch: the gradient error of the compiled step without a plan. If it is not 0, the reference is the uncompiled
            step.
    """
    report("running the unmanaged step twice", 0.0)
    model = task.model
    units = find_units(model)
    # Recipes must give the bits of the step in tiles. How far tiles move the gradients is measured apart.
    with in_place(units, lambda _: None) if error_of_torch else in_tiles(step.model, plan.tiles):
        evidence = collect_evidence(step, depth)
    baseline_peak_bytes = step.measure_peak().peak_bytes
    report("running the managed step", 0.3)
    with manage(model, plan) as handle:
        if plan.compiled:
            step.run()  # compile now: memory that the compiler allocates must not count in the step's peak
            handle.forget()
        recording_peak_bytes, steady_peak_bytes, apart = _recording_and_steady(step, plan, evidence, report)
        outcomes = handle.outcomes()
        plan_losses = consecutive_losses(step, steps)
        with handle.paused(), in_tiles(step.model, plan.tiles):
            baseline_losses = consecutive_losses(step, steps)
        curve, intermediates = run_curve(step, depth), run_intermediates(step, depth)
        report("timing both in turns", 0.6)
        timings = time_both(step, handle.paused, steps)
        report("comparing every tensor that comes back", 0.95)
        with handle.inspecting():
            step.run()
        seen = Observed(
            peak_bytes=steady_peak_bytes,
            apart=apart,
            faults=handle.faults,
            compared_tensors=handle.inspected_tensors,
            intermediates=compare_intermediates(evidence.intermediates, intermediates),
            curve=curve,
            losses=plan_losses,
        )
    rounding = half_the_digits(model) if error_of_torch else 0.0
    if plan.compiled and not error_of_torch:
        rounding = compiled_rounding(step, units, evidence.gradients)
    tile_rounding = measure_tile_rounding(task, step, plan)
    step.clear_gradients()
    absent_bytes = step.absent_state_bytes(planned_state_bytes(plan), plan.state)
    return make_receipt(
        step,
        evidence,
        seen,
        timings,
        **_claims(plan),
        rounding_tolerance=rounding,
        tile_rounding=tile_rounding,
        baseline_losses=baseline_losses,
        measured_baseline_peak_bytes=baseline_peak_bytes + absent_bytes,
        measured_peak_bytes=steady_peak_bytes + absent_bytes,
        # Without absent_bytes: in training, the first step runs before the optimizer has made its state.
        measured_recording_peak_bytes=recording_peak_bytes,
        regions=outcomes,
        notes=(*_notes(step, plan, absent_bytes), *_notes_of_compiled(plan, rounding, error_of_torch)),
    )


def _recording_and_steady(
    step: TrainingStep, plan: Plan, evidence: Evidence, report: Progress
) -> tuple[int, int, Apart]:
    """Run the plan's first step, which records ops, and a later step. Measure both.

    Return the peak of each in bytes, and for each tensor the larger of its two differences from the step without a plan.
    """

    def measure() -> int:
        peak_bytes = step.measure_peak(plan.backward_steps).peak_bytes
        if plan.backward_steps is not None:
            step.run()  # the measured step has freed its gradients
        return peak_bytes

    recording_peak_bytes = measure()
    apart = compare_with(evidence, step)
    step.run()
    report("measuring the managed step's peak", 0.5)
    steady_peak_bytes = measure()
    return recording_peak_bytes, steady_peak_bytes, apart.worst(compare_with(evidence, step))


def _with_casts_kept(step: TrainingStep, model: nn.Module, plan: Plan, receipt: Receipt) -> Receipt:
    """Return the receipt with more tolerance for rounding, if the gradient differs only because kernels round elsewhere.

    Otherwise return the receipt unchanged.
    """
    found = keep_casts(step, find_units(model), lambda: manage(model, plan))
    step.clear_gradients()
    if not found.allowed:
        return receipt
    allowed = max(receipt.rounding_tolerance, found.allowed)
    return msgspec.structs.replace(receipt, rounding_tolerance=allowed, notes=(*receipt.notes, found.note))


def _claims(plan: Plan) -> dict[str, Any]:
    """Return those fields of a plan that its receipt repeats, as keyword arguments for ``make_receipt``."""
    return {
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "signature": plan.signature,
        "strategy": plan.strategy,
        "budget_bytes": plan.budget_bytes,
        "is_lossless": plan.is_lossless,
        "max_error": plan.max_error,
        "predicted_error": plan.predicted_error,
        "predicted_baseline_peak_bytes": plan.baseline_peak_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_baseline_seconds": plan.baseline_seconds,
        "predicted_seconds": plan.predicted_seconds,
    }


def _notes_of_compiled(plan: Plan, rounding: float, error_of_torch: float) -> tuple[str, ...]:
    if not plan.compiled:
        return ()
    beside = "the same model compiled under torch's default partition"
    why = "because other fusions round differently"
    if error_of_torch:
        beside = "the uncompiled model"
        why += (
            f". Without a plan, the compiled model differs from that by {error_of_torch:.1e}: its gradients are wrong"
        )
    return (f"compared with {beside}; if bits differ, a gradient error of {rounding:.1e} is allowed, {why}",)


def _notes(step: TrainingStep, plan: Plan, absent_bytes: int) -> tuple[str, ...]:
    notes = []
    if absent_bytes:
        notes.append(
            f"measured peaks include {format_bytes(absent_bytes)} of optimizer state that does not exist yet: the plan counts "
            "it, and the optimizer makes it in its first step"
        )
    unplanned_bytes = step.optimizer_bytes() - planned_state_bytes(plan)
    if unplanned_bytes > _STATE_NOISE * step.optimizer_bytes():
        notes.append(
            f"measured peaks include {format_bytes(unplanned_bytes)} of optimizer state that the plan does not count: "
            "it was made without optimizer=, or for another optimizer"
        )
    starts = [point.unmanaged_seconds for point in plan.timeline if point.phase == Phase.OPTIMIZER]
    if starts and starts[0] is not None:
        notes.append(
            f"predicted seconds include {format_seconds(plan.baseline_seconds - starts[0])} for the optimizer's step; measured "
            "seconds include only forward and backward, because verification does not run the optimizer"
        )
    if Phase.OPTIMIZER in plan.peak.moment:
        notes.append(
            "the plan's peak is in the optimizer's step, which verification does not run, so this peak is only predicted"
        )
    return tuple(notes)


def _worst_receipt(agreement: Agreement, receipt: Receipt, plan: Plan) -> Receipt:
    """Return the receipt of the rank with the worst verdict, and add a note about all ranks.

    Among ranks with the same verdict, the rank with the least room below its budget counts.
    """
    if agreement.size == 1:
        return receipt
    if str(agreement.rank) in plan.budget_bytes_of_ranks:
        receipt = msgspec.structs.replace(receipt, budget_bytes=plan.budget_bytes_of_ranks[str(agreement.rank)])
    receipts = of_all_ranks(agreement, "receipts", receipt)
    worst = min(
        range(len(receipts)), key=lambda index: (_SEVERITY[receipts[index].verdict], _room_bytes(receipts[index]))
    )
    peaks = [each.measured_peak_bytes or 0 for each in receipts]
    failed = [rank for rank, each in zip(agreement.ranks, receipts, strict=True) if each.exit_code]
    note = (
        f"verified on {agreement.size} ranks; this is the receipt of rank {agreement.ranks[worst]}, the worst. Measured peaks "
        f"are {format_bytes(min(peaks))} to {format_bytes(max(peaks))}"
        + (f"; verification failed on ranks {', '.join(map(str, failed))}" if failed else "")
    )
    return msgspec.structs.replace(receipts[worst], notes=(*receipts[worst].notes, note))


def _room_bytes(receipt: Receipt) -> int:
    peaks = (receipt.measured_peak_bytes or 0, receipt.measured_recording_peak_bytes or 0)
    return (receipt.budget_bytes or 0) - max(peaks)
