"""``plimsoll.explain``: runs a step unchanged, or simulates it under a strategy, and explains its peak.

Memory is summed up by module. One paragraph says when the peak occurs and why it did or did not move.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plimsoll.analysis.explain.changes import Changes, ExplainedStep, PeakSubject
from plimsoll.analysis.explain.parts import parts_of_peak
from plimsoll.analysis.verify.saved_tensors import watched
from plimsoll.artifacts.explained import LEAST_SHARE, Change, Explanation, MemoryPart, RecomputedPart
from plimsoll.artifacts.naming import group_holders, name_largest, region_in_label
from plimsoll.artifacts.plan import Holder, Peak, Plan, TimelinePoint
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.trace import Storage, WatchedStep
from plimsoll.errors import InvalidOption, InvalidStrategy
from plimsoll.planning.choice import Choice
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.describe import (
    describe_peak,
    describe_timeline,
    forward_end,
    holders_at,
    rebuilt_parts,
)
from plimsoll.planning.simulate import Simulation, choices_of, run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import (
    check_strategy,
    choose_none,
    codecs_of_strategy,
    refuse_unknown_ops,
    strategy_choices,
)
from plimsoll.session.compiled import refuse_uncompilable
from plimsoll.session.manage import refuse_optimizer_decisions, refuse_other_model
from plimsoll.session.options import PlanOptions, as_patterns
from plimsoll.session.rendezvous.world import refuse_several_ranks
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.recorder.calling import Context, Loss, check_context
from plimsoll.tracing.torch_internals import existing_ops
from plimsoll.units import format_bytes, format_share

_BETWEEN = "::"
"""The separator between the module and the op in a label of the trace."""
_NOWHERE = "outside of modules"
_MOVED = 0.5
"""A share of the bytes that the set-up (the way of saving memory) frees after forward. If the peak falls by less than this
share of them, it counts as hardly moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakView:
    """Data: the memory of one way to run the step: its peak, and the bytes resident between forward and backward."""

    peak: Peak
    parts: tuple[MemoryPart, ...]
    resident_bytes: int
    resident: tuple[Holder, ...]
    timeline: tuple[TimelinePoint, ...]


def place_of(label: str, regions: Sequence[str]) -> str:
    """Return the place that a label of the trace belongs to: the region (a module that the plan decides about) that contains
    it, else its module, else the label.

    Example:
        >>> place_of("model.layers.0.mlp::mul#0", ["model.layers.0"])
        'model.layers.0'
        >>> place_of("lm_head::mm#0", ["model.layers.0"]), place_of("parameters", [])
        ('lm_head', 'parameters')
    """
    return region_in_label(label, regions) or label.partition(_BETWEEN)[0]


def by_place(holders: Iterable[Holder], regions: Sequence[str]) -> tuple[Holder, ...]:
    """Add up the bytes of tensors that belong to the same place (region or module).

    Return one entry for each place, the largest first.
    """
    bytes_of: Counter[str] = Counter()
    for holder in holders:
        bytes_of[place_of(holder.label, regions)] += holder.bytes
    largest = sorted(bytes_of.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Holder(label=label, bytes=size) for label, size in largest)


def recomputed_by_place(step: WatchedStep) -> tuple[RecomputedPart, ...]:
    """Return one entry for each place (region or module) that recomputes: how many ops ran again, and their memory.

    The memory is the most bytes of results of these ops that were alive at once in backward.
    """
    again = set(step.recomputed)
    ops: Counter[str] = Counter()
    for tick in step.recomputed:
        module = step.trace.ops[tick].module
        ops[place_of(f"{module}{_BETWEEN}", step.regions) if module else _NOWHERE] += 1
    made: dict[str, list[Storage]] = {}
    for storage in step.trace.storages:
        if storage.born in again:
            place = place_of(storage.label, step.regions) if _BETWEEN in storage.label else _NOWHERE
            made.setdefault(place, []).append(storage)
    return tuple(
        RecomputedPart(place=place, most_bytes=_most_at_once(made[place]), ops=count)
        for place, count in ops.items()
        if place in made
    )


def _most_at_once(storages: Iterable[Storage]) -> int:
    changes: Counter[int] = Counter()
    for storage in storages:
        changes[storage.born] += storage.bytes
        changes[storage.dies] -= storage.bytes
    return max(itertools.accumulate(changes[tick] for tick in sorted(changes)), default=0)


def judge(setup: str, seen: PeakView, plain: PeakView | None, changes: Sequence[Change]) -> str:
    """Return a text that says what the set-up (the way of saving memory) does to the peak.

    The text also says when the peak occurs, and which change lowers it most. ``plain`` is the step with everything kept.
    """
    peak = seen.peak
    holders = name_largest(group_holders(peak.holders))
    sentences = []
    if not setup:
        sentences.append(f"The step does not save memory. Its peak is in {peak.moment}: {holders}.")
    elif plain is None:
        sentences.append(f"The peak is in {peak.moment}: {holders}.")
    else:
        sentences.append(_effect(seen, plain))
    helpful = [change for change in changes if change.lowers_bytes > LEAST_SHARE * peak.bytes]
    if helpful:
        best = helpful[0]
        sentences.append(
            f"The best change is {best.name}: it lowers the peak to {format_bytes(best.predicted_peak_bytes)}, "
            f"{format_share(-best.lowers_bytes / peak.bytes)}."
        )
    else:
        sentences.append("None of the changes that were tried lowers the peak.")
    return " ".join(sentences)


def _effect(seen: PeakView, plain: PeakView) -> str:
    peak, plain_peak = seen.peak, plain.peak
    holders = name_largest(group_holders(peak.holders))
    freed_bytes, lowered_bytes = plain.resident_bytes - seen.resident_bytes, plain_peak.bytes - peak.bytes
    after = f"from {format_bytes(plain.resident_bytes)} to {format_bytes(seen.resident_bytes)}"
    share = format_share(peak.bytes / plain_peak.bytes - 1)
    then = f"from {format_bytes(plain_peak.bytes)} to {format_bytes(peak.bytes)} ({share})"
    if freed_bytes <= 0:
        return (
            f"The set-up does not lower the bytes resident after forward ({after}). The peak goes {then}; it is in "
            f"{peak.moment}: {holders}."
        )
    if lowered_bytes < _MOVED * freed_bytes:
        return (
            f"The set-up lowers the bytes resident after forward {after}, but the peak only {then}. The peak is in "
            f"{peak.moment}, where these tensors exist at the same time: {holders}."
        )
    return (
        f"The set-up lowers the bytes resident after forward {after}, and the peak {then}. The peak is in {peak.moment}: "
        f"{holders}."
    )


_FORMS = ("offload", "hybrid")


def explain(
    model: nn.Module,
    batch: Any,
    strategy: str | Plan | None = None,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: Sequence[str] | None = None,
    device_profile: str | None = None,
    context: Context = contextlib.nullcontext,
    progress: Progress | None = None,
) -> Explanation:
    """Find the peak of a training step, the tensors that hold it, and the changes that would lower it, with bytes.

    Without a ``strategy``, the step is run once with the model's own way to save memory (``torch.utils.checkpoint``, selective
    checkpointing, offloading contexts), and once with that switched off. With a ``strategy``, the step is traced and the
    strategy is simulated. The effect of a change on the peak comes from a replay of the step's events with the change, not from
    a rule. Model, gradients, buffers, optimizer and random state are restored.

    Args:
        model: any PyTorch model, on its device (or on the meta device), in its training mode. It may be eager, or compiled by
            torch.compile; then its compiled parts are explained as kernels, compared with the same step op by op.
        batch: a tensor (one argument), a tuple (positional) or a dict (keywords).
        strategy: ``none``, ``full``, ``every:k``, ``sqrt``, ``input-only``, ``selective:…``, or a plan for this model that only
            keeps and recomputes, without tiles.
        loss: from the model's output to a scalar; by default ``output.loss``, or the output itself if it is a scalar.
        optimizer: if passed, its state and its update are part of the step.
        regions: module paths; memory is summed up per region. By default the repeated blocks.
        device_profile: explain for a device from the catalogue (``"H100-SXM"``) that is not in this machine.
        context: only without a strategy: called before every step for a context to run it in, such as
            ``torch.autograd.graph.save_on_cpu``.
        progress: called with the stage and the share done.

    Returns:
        An explanation that can be printed and saved. Its ``changes`` are ranked by the bytes that they take off the peak.

    Raises:
        InvalidStrategy: the strategy is unknown, or it compresses, offloads or runs modules in tiles.
        InvalidOption: ``context`` is a context itself, not a function that makes one, or it is passed with a strategy or for a
            compiled model.
        PlanMismatch: the plan is for another model.
        PlanNotUsable: the plan offloads optimizer state, or steps parameters in backward.
        PlimsollError: the arguments do not make a step (InvalidModel, InvalidBatch, InvalidLoss, InvalidRegions, UnknownDevice,
            TracingFailed).

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
        >>> explanation = explain(model, torch.randn(32, 64), loss=lambda y: y.square().mean())
        >>> explanation.peak.bytes > explanation.resident_bytes
        True

    Known weakness: memory that libraries allocate without torch's allocator is not counted.
    """
    refuse_several_ranks(model, "explain")
    _check_kind(strategy)
    check_context(context)
    task = TrainingTask.read(model, batch, loss=loss, optimizer=optimizer)
    device = None if device_profile is None else find_device(device_profile)
    step = ExplainedStep(task=task, regions=as_patterns(regions), device=device, context=context)
    report = progress or silent
    if context is not contextlib.nullcontext and (strategy is not None or task.units):
        raise InvalidOption(
            "context= does not have an effect on a step that is replayed.",
            why="the step is replayed under the strategy"
            if strategy is not None
            else "the replayed step is compiled code",
            next="leave context= out"
            + ("" if strategy is None else ", or leave strategy out to explain the step in this context"),
        )
    if task.units:
        strategies = strategy.strategy if isinstance(strategy, Plan) else strategy
        refuse_uncompilable(PlanOptions.read(device_profile=device_profile), strategies or "none")
    explanation = _as_it_is(step, report) if strategy is None and not task.units else _under(strategy, step, report)
    report("done", 1.0)
    return explanation


def _as_it_is(step: ExplainedStep, report: Progress) -> Explanation:
    """Return the explanation of the step as the user runs it, with the model's own way to save memory."""
    report("running the unchanged step", 0.0)
    with watched(lambda pack, unpack: (pack, unpack)) as used:
        seen = step.watch(step.task.batch)
    plain: PeakView | None = None
    notes: tuple[str, ...] = ()
    if used:
        report("running the step with everything kept", 0.3)
        try:
            plain = _look_at_run(step, step.watch_plain())
        except torch.OutOfMemoryError:
            notes = ("With everything kept, the step does not fit on this device.",)
    report("replaying it with changes", 0.5)
    return _explanation(
        step,
        PeakSubject(seen.trace, seen, is_managed=bool(used)),
        setup=" and ".join(f"{name} ({count} times a step)" for name, count in used.most_common()),
        seen=_look_at_run(step, seen),
        plain=plain,
        recomputed=recomputed_by_place(seen),
        notes=notes,
    )


def _under(asked: str | Plan | None, step: ExplainedStep, report: Progress) -> Explanation:
    """Return the explanation of the step under a strategy or a plan of Plimsoll.

    For a compiled model without a strategy (``asked`` is ``None``), explain the compiled step and compare it with the same step
    run op by op.
    """
    strategy = "none" if asked is None else asked
    name = strategy.strategy if isinstance(strategy, Plan) else strategy
    _refuse_forms(strategy)
    if isinstance(strategy, Plan):
        refuse_optimizer_decisions(strategy, "explain")
        refuse_other_model(step.task.model, strategy)

    def choose(index: StepIndex) -> Sequence[Choice]:
        """Return the strategy's choices (what each region keeps and recomputes) for a trace of this step.

        The trace may have been changed, such as by chunking the loss.
        """
        return choices_of(index, strategy.regions) if isinstance(strategy, Plan) else strategy_choices(index, strategy)

    report("tracing the step", 0.0)
    plain_step = step.watch_plain()
    traced = step.trace(step.task.batch)
    index = step.index(traced)
    simulation, keeping = run_choices(index, choose(index)), run_choices(index, choose_none(index, ""))
    names = tuple(dict.fromkeys(call.name for call in traced.regions))
    end = forward_end(traced)
    report("replaying it with changes", 0.5)
    return _explanation(
        step,
        PeakSubject(traced, plain_step, is_managed=asked is not None, choose=choose),
        setup="torch.compile's default partition" if asked is None else f"strategy {name}, by Plimsoll",
        seen=_look(simulation, end, names),
        plain=_look_at_run(step, plain_step) if asked is None else _look(keeping, end, names),
        recomputed=rebuilt_parts(simulation),
    )


def _explanation(
    step: ExplainedStep,
    subject: PeakSubject,
    *,
    setup: str,
    seen: PeakView,
    plain: PeakView | None,
    recomputed: tuple[RecomputedPart, ...],
    notes: tuple[str, ...] = (),
) -> Explanation:
    trace = subject.trace
    tried = Changes(step, subject)
    changes, unsupported = tried.ranked()
    return Explanation(
        model=trace.model,
        fingerprint=trace.fingerprint,
        signature=trace.signature,
        device=trace.device,
        is_fake=trace.is_fake,
        setup=setup,
        optimizer="" if step.task.optimizer is None else type(step.task.optimizer).__name__,
        verdict=judge(setup, seen, plain, changes),
        peak=seen.peak,
        parts=seen.parts,
        resident_bytes=seen.resident_bytes,
        resident=seen.resident,
        recomputed=recomputed,
        plain_peak=None if plain is None else plain.peak,
        plain_resident_bytes=None if plain is None else plain.resident_bytes,
        changes=changes,
        unsupported=unsupported,
        timeline=seen.timeline,
        notes=(*trace.notes, *notes, *tried.notes),
    )


def _look_at_run(step: ExplainedStep, run: WatchedStep) -> PeakView:
    index = step.index(run.trace)
    return _look(run_choices(index, choose_none(index, "")), run.forward_end, run.regions)


def _look(simulation: Simulation, end: int, regions: Sequence[str]) -> PeakView:
    holders, peak = holders_at(simulation, 2 * end), describe_peak(simulation)
    return PeakView(
        peak=peak,
        parts=parts_of_peak(simulation.index.trace, peak, regions),
        resident_bytes=sum(holder.bytes for holder in holders),
        resident=by_place(holders, regions),
        timeline=describe_timeline(simulation),
    )


def _check_kind(strategy: object) -> None:
    if strategy is not None and not isinstance(strategy, str | Plan):
        raise InvalidStrategy(
            f"A {type(strategy).__name__} is not a strategy.",
            why="explain shows the unchanged step, or the step under a named strategy or a plan",
            next='leave strategy out, or pass a name such as "full", or a plan for this model',
        )
    if isinstance(strategy, str):
        check_strategy(strategy)
        refuse_unknown_ops(strategy, existing_ops())


def _refuse_forms(strategy: str | Plan) -> None:
    is_packed = (
        any(region.packed for region in strategy.regions)
        if isinstance(strategy, Plan)
        else bool(codecs_of_strategy(strategy)) or strategy.partition(":")[0] in (*_FORMS, "auto")
    )
    name = f"the plan {strategy.strategy!r}" if isinstance(strategy, Plan) else f"the strategy {strategy!r}"
    if isinstance(strategy, Plan) and strategy.tiles:
        raise InvalidStrategy(
            f"A step cannot be replayed under {name}, which runs modules in tiles.",
            why="in the replayed step each module runs as a whole",
            next="save the plan and run `plimsoll explain plan.json`: it shows the plan's peak and what holds it",
        )
    if is_packed:
        raise InvalidStrategy(
            f"A step cannot be replayed under {name}.",
            why="only planning measures the costs of codecs and links, and strategy auto needs a budget",
            next="run `plimsoll plan TARGET --output plan.json` with --strategy or --budget, then `plimsoll explain plan.json`",
        )
