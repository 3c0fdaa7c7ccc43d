"""A model and a batch in, the explanation of their step's peak out: watched as it is, or simulated under a strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plimsoll.analysis.explain.changing import Changes, Choose, Subject
from plimsoll.analysis.explain.places import by_place, recomputed_by_place
from plimsoll.analysis.explain.why import judge
from plimsoll.analysis.verify.saved_hooks import switched_off, watched
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.explained import Change, Explanation, RecomputedPart, Unsupported
from plimsoll.artifacts.plan import Holder, Peak, Plan, TimelinePoint
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.trace import Trace
from plimsoll.artifacts.watched import WatchedStep
from plimsoll.errors import InvalidOption, InvalidStrategy
from plimsoll.planning.costing.devices import Device, find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.describe import (
    classes_at_peak,
    describe_peak,
    describe_timeline,
    forward_end,
    holders_at,
    rebuilt_parts,
)
from plimsoll.planning.simulate import Simulation, choices_of, run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import check_strategy, codecs_of_strategy, strategy_choices
from plimsoll.session.manage import refuse_other_model
from plimsoll.session.options import as_patterns
from plimsoll.session.rendezvous.world import refuse_several_ranks
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.recorder.calling import Loss
from plimsoll.tracing.trace import Context, watch
from plimsoll.tracing.trace import trace as trace_step

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
    """Say where the peak of a training step is, who holds it, and what would lower it, by how much.

    Without a ``strategy`` the step is run once as it is, with whatever it does to save memory (``torch.utils.checkpoint``,
    selective checkpointing, offloading contexts, nothing), and once with that switched off. With one, the step is traced
    and the strategy simulated. What would lower the peak is found by replaying the step's events with the change, not by
    a rule. Model, gradients, buffers, optimizer and random state are left as they were.

    Args:
        model: any eager PyTorch model, on its device (or on the meta device), in the mode in which it trains.
        batch: a tensor (one argument), a tuple (positional) or a dict (keywords).
        strategy: ``none``, ``full``, ``every:k``, ``sqrt``, ``input-only``, ``selective:…``, or a plan for this model that
            keeps and recomputes.
        loss: from the model's output to a scalar; by default ``output.loss``, or the output itself if it is a scalar.
        optimizer: with it its state and its step belong to the step.
        regions: module paths by which memory is summed up; by default the repeated blocks.
        device_profile: explain for a device that is not here, from the catalogue (``"H100-SXM"``).
        context: called before every step for a context to run it in, such as ``torch.autograd.graph.save_on_cpu``.
        progress: told the stage and the share done.

    Returns:
        An explanation: printable, savable; its ``changes`` are ranked by what they take off the peak.

    Raises:
        InvalidStrategy: no such strategy, or one that compresses or offloads.
        InvalidOption: ``context`` is a context itself, not what makes one.
        PlanMismatch: the plan is for another model. Others as named in ``errors``: InvalidModel, InvalidBatch, InvalidLoss,
        InvalidRegions, UnknownDevice, TracingFailed.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
        >>> explanation = explain(model, torch.randn(32, 64), loss=lambda y: y.square().mean())
        >>> explanation.peak.bytes > explanation.resident_bytes
        True

    Known weakness: compiled regions are seen as single ops, and memory that libraries take past torch's allocator is not seen.
    """
    refuse_several_ranks(model, "explain")
    _check_kinds(strategy, context)
    task = TrainingTask.read(model, batch, loss=loss, optimizer=optimizer)
    device = None if device_profile is None else find_device(device_profile)
    step = _Step(task, as_patterns(regions), device, context, progress or silent)
    if strategy is None:
        return step.as_it_is()
    return step.under(strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A step as people see it."""

    peak: Peak
    classes: dict[str, int]
    resident_bytes: int
    resident: tuple[Holder, ...]
    timeline: tuple[TimelinePoint, ...]


class _Step:
    """One step that is explained."""

    def __init__(
        self,
        task: TrainingTask,
        regions: tuple[str, ...] | None,
        device: Device | None,
        context: Context,
        report: Progress,
    ) -> None:
        self._task = task
        self._regions = regions
        self._device = device
        self._context = context
        self._report = report

    def as_it_is(self) -> Explanation:
        """Explain what the model does by itself."""
        self._report("running the step as it is", 0.0)
        with watched(lambda pack, unpack: (pack, unpack)) as used:
            step = self._watch(self._task.batch)
        simulation = self._simulated(step.trace)
        seen = _look(simulation, step.forward_end, step.regions)
        plain_seen, notes = None, []
        if used:
            self._report("running the step with everything kept", 0.3)
            try:
                plain = self._watch_plain()
                plain_seen = _look(self._simulated(plain.trace), plain.forward_end, plain.regions)
            except torch.OutOfMemoryError:
                notes.append("With everything kept the step does not fit on this device.")
        self._report("replaying it with changes", 0.5)
        changes = self._changes(Subject(step.trace, step, bool(used)))
        return self._explanation(
            step.trace,
            setup=" and ".join(f"{name} ({count} times a step)" for name, count in used.most_common()),
            seen=seen,
            plain=plain_seen,
            recomputed=recomputed_by_place(step),
            changes=changes,
            notes=tuple(notes),
        )

    def under(self, strategy: str | Plan) -> Explanation:
        """Explain a strategy or a plan of Plimsoll's engine."""
        name = strategy.strategy if isinstance(strategy, Plan) else strategy
        _refuse_forms(strategy)
        if isinstance(strategy, Plan):
            refuse_other_model(self._task.model, strategy)
        self._report("tracing the step", 0.0)
        traced = self._traced(self._task.batch)
        index = StepIndex(traced, self._costs(traced))
        choose = _chooser(strategy)
        simulation = run_choices(index, choose(index))
        names = tuple(dict.fromkeys(call.name for call in traced.regions))
        end = forward_end(traced)
        self._report("replaying it with changes", 0.5)
        return self._explanation(
            traced,
            setup=f"strategy {name}, by Plimsoll",
            seen=_look(simulation, end, names),
            plain=_look(self._simulated(traced), end, names),
            recomputed=rebuilt_parts(simulation),
            changes=self._changes(Subject(traced, self._watch_plain(), True, choose)),
            notes=(),
        )

    def _explanation(
        self,
        trace: Trace,
        *,
        setup: str,
        seen: _Seen,
        plain: _Seen | None,
        recomputed: tuple[RecomputedPart, ...],
        changes: tuple[tuple[Change, ...], tuple[Unsupported, ...]],
        notes: tuple[str, ...],
    ) -> Explanation:
        plain_peak = None if plain is None else plain.peak
        plain_resident_bytes = None if plain is None else plain.resident_bytes
        self._report("done", 1.0)
        return Explanation(
            model=trace.model,
            fingerprint=trace.fingerprint,
            signature=trace.signature,
            device=trace.device,
            is_fake=trace.is_fake,
            setup=setup,
            optimizer="" if self._task.optimizer is None else type(self._task.optimizer).__name__,
            verdict=judge(
                setup=setup,
                peak=seen.peak,
                resident_bytes=seen.resident_bytes,
                plain_peak=plain_peak,
                plain_resident_bytes=plain_resident_bytes,
                changes=changes[0],
            ),
            peak=seen.peak,
            classes=seen.classes,
            resident_bytes=seen.resident_bytes,
            resident=seen.resident,
            recomputed=recomputed,
            plain_peak=plain_peak,
            plain_resident_bytes=plain_resident_bytes,
            changes=changes[0],
            unsupported=changes[1],
            timeline=seen.timeline,
            notes=(*trace.notes, *notes),
        )

    def _changes(self, subject: Subject) -> tuple[tuple[Change, ...], tuple[Unsupported, ...]]:
        changes = Changes(
            subject,
            self._costs,
            model=self._task.model,
            batch=self._task.batch,
            optimizer=self._task.optimizer,
            watch=self._watch,
            trace=self._traced,
        )
        return changes.ranked()

    def _watch(self, batch: Any) -> WatchedStep:
        return watch(
            self._task.model,
            batch,
            loss=self._task.loss,
            optimizer=self._task.optimizer,
            regions=self._regions,
            device_name=None if self._device is None else self._device.name,
            context=self._context,
        )

    def _watch_plain(self) -> WatchedStep:
        with switched_off():
            return self._watch(self._task.batch)

    def _traced(self, batch: Any) -> Trace:
        """The plain step with its regions, whatever the model does by itself."""
        with switched_off():
            return trace_step(
                self._task.model,
                batch,
                loss=self._task.loss,
                optimizer=self._task.optimizer,
                regions=self._regions,
                device_name=None if self._device is None else self._device.name,
                repeats=1,
            )

    def _costs(self, trace: Trace) -> Costs:
        """Bytes do not depend on seconds; a roofline's order the timeline."""
        return roofline_costs(trace, self._device or find_device("CPU"))

    def _simulated(self, trace: Trace) -> Simulation:
        index = StepIndex(trace, self._costs(trace))
        return run_choices(index, strategy_choices(index, "none"))


def _look(simulation: Simulation, end: int, regions: Sequence[str]) -> _Seen:
    holders = holders_at(simulation, 2 * end)
    return _Seen(
        peak=describe_peak(simulation),
        classes=classes_at_peak(simulation),
        resident_bytes=sum(holder.bytes for holder in holders),
        resident=by_place(holders, regions),
        timeline=describe_timeline(simulation),
    )


def _chooser(strategy: str | Plan) -> Choose:
    """What decides in any trace of this step."""
    if isinstance(strategy, Plan):
        return lambda index: choices_of(index, strategy.regions)
    return lambda index: strategy_choices(index, strategy)


def _check_kinds(strategy: object, context: object) -> None:
    if strategy is not None and not isinstance(strategy, str | Plan):
        raise InvalidStrategy(
            f"A {type(strategy).__name__} is not a strategy.",
            why="a step is explained as it is, under a named strategy, or under a plan",
            next='leave it out, or pass "full", or a plan for this model',
        )
    if isinstance(strategy, str):
        check_strategy(strategy)
    if not callable(context):
        raise InvalidOption(
            f"context= is a {type(context).__name__}, which cannot be called.",
            why="the step runs several times, each in a context of its own",
            next="pass what makes one: context=torch.autograd.graph.save_on_cpu, or a lambda",
        )


def _refuse_forms(strategy: str | Plan) -> None:
    is_packed = (
        any(region.packed for region in strategy.regions)
        if isinstance(strategy, Plan)
        else bool(codecs_of_strategy(strategy)) or strategy.partition(":")[0] in (*_FORMS, "auto")
    )
    if is_packed:
        name = f"the plan {strategy.strategy!r}" if isinstance(strategy, Plan) else f"the strategy {strategy!r}"
        raise InvalidStrategy(
            f"A step cannot be replayed under {name}.",
            why="what codecs and links take is measured while planning, and auto needs a budget",
            next="plimsoll plan TARGET --strategy or --budget …, and `plimsoll explain plan.json`",
        )
