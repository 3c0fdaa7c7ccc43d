"""Tries single changes to a step and ranks them by the resulting peak, which comes from a replay of the step's events."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils._pytree import tree_leaves, tree_map_only

from plimsoll.analysis.verify.saved_tensors import switched_off
from plimsoll.artifacts.explained import LEAST_SHARE, Change, Unsupported
from plimsoll.artifacts.plan import Peak
from plimsoll.artifacts.trace import Category, Storage, Trace, WatchedStep
from plimsoll.engine.chunked_loss.handle import can_chunk
from plimsoll.errors import PlimsollError
from plimsoll.planning.choice import Choice
from plimsoll.planning.costing.devices import Device, find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.describe import describe_peak
from plimsoll.planning.fixed_parts import notes_about_plans
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.solve import Planner
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_full, choose_none
from plimsoll.planning.what_if import default_rows, find_head, with_chunked_loss
from plimsoll.session.compiled import trace_compiled
from plimsoll.session.options import PlanOptions
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.compiled.units import in_place
from plimsoll.tracing.optimizer import parameter_of_state, parameter_sizes, with_options
from plimsoll.tracing.recorder.calling import Context
from plimsoll.tracing.trace import trace as trace_step
from plimsoll.tracing.trace import watch

_REPLAYED, _MODELLED, _RUN_AGAIN, _PLANNED = "replayed", "modelled", "run again", "planned"
"""The values of ``Change.basis``: words for how the peak of a change was found. ``Change`` explains them."""
Choose = Callable[[StepIndex], Sequence[Choice]]
_BOTH = " and "
_CHUNK_LABEL = "one chunk of logits"
_OPTIMIZER_FORMS: dict[str, dict[str, object]] = {
    "foreach=False": {"foreach": False, "fused": None},
    "fused=True": {"foreach": None, "fused": True},
}
"""Variants of torch's optimizers to try, such as ``foreach=False``. Each name of a variant is mapped to the optimizer's
arguments.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedStep:
    """The user's training step, with the methods that the explanation needs to run, trace and replay the step."""

    task: TrainingTask
    regions: tuple[str, ...] | None
    device: Device | None
    """A device from the catalogue that is not in this machine; ``None`` for the model's own device."""
    context: Context

    def watch(self, batch: Any) -> WatchedStep:
        """Run the step once with the model's own way to save memory, and return the recorded ops and memory.

        Parts that torch.compile compiled run uncompiled, op by op.
        """
        with in_place(self.task.units, lambda _: None):
            return watch(self.task.model, batch, context=self.context, **self._options())

    def watch_plain(self) -> WatchedStep:
        """Run the step once with all saved tensors kept, and return the recorded ops and memory.

        Checkpointing and other saved-tensor hooks are off meanwhile.
        """
        with switched_off():
            return self.watch(self.task.batch)

    def trace(self, batch: Any) -> Trace:
        """Trace the step with its regions (the modules that a plan decides about), without the model's own way to save memory.

        Parts that torch.compile compiled are traced as the kernels that they run.
        """
        with switched_off():
            if self.task.units:
                task = dataclasses.replace(self.task, batch=batch)
                return trace_compiled(task, PlanOptions(regions=self.regions))[0]
            return trace_step(self.task.model, batch, repeats=1, **self._options())

    def _options(self) -> dict[str, Any]:
        task, name = self.task, None if self.device is None else self.device.name
        return {"loss": task.loss, "optimizer": task.optimizer, "regions": self.regions, "device_name": name}

    def index(self, trace: Trace) -> StepIndex:
        """Return a traced step prepared for simulation, with costs of its ops, as the planner uses it.

        Peaks do not depend on exact seconds, so costs from a roofline are enough.
        """
        return StepIndex(trace, roofline_costs(trace, self.device or find_device("CPU")))


@dataclass(frozen=True, slots=True)
class PeakSubject:
    """Data: the step whose peak is to be lowered.

    It has the step's trace, the choices for each region (what it keeps and recomputes), and the recorded run without a plan.
    """

    trace: Trace
    watched: WatchedStep | None = None
    """The recorded run without a plan. If it is absent, each trainable parameter is assumed to get a gradient."""
    is_managed: bool = False
    """Whether the step saves memory already, through the model's own checkpointing or through a plan."""
    choose: Choose | None = None
    """A function that returns the choices (what each region keeps and recomputes) for a trace. ``None`` means that nothing is
    recomputed, and ``trace`` is ``watched.trace``.
    """


class Changes:
    """Tries single changes to one step, such as a chunked loss or half the micro-batch, and collects the peak of each."""

    def __init__(self, step: ExplainedStep, subject: PeakSubject) -> None:
        self._step = step
        self._subject = subject
        self._peak_bytes = self._peak(subject.trace).bytes
        self._found: list[Change] = []
        self._unsupported: list[Unsupported] = []
        self.notes: tuple[str, ...] = ()
        """Sentences about what plans of this model keep and which regions (modules that the plan decides about) read values of
        tensors.
        """

    def ranked(self) -> tuple[tuple[Change, ...], tuple[Unsupported, ...]]:
        """Try all changes, and return them with their peaks, the largest reduction of the peak first.

        A second tuple has the changes whose effect cannot be predicted.
        """
        self._chunked_loss()
        self._freed_output()
        self._gradients_set_to_none()
        self._optimizer_forms()
        self._half_batch()
        self._strategies()
        return tuple(sorted(self._found, key=self._rank)), tuple(self._unsupported)

    def of_loss_and_optimizer(self) -> tuple[Change, ...]:
        """Try only the changes to the loss and the optimizer, and return them, the largest reduction of the peak first.

        They are replayed from the trace, so nothing runs.
        """
        self._chunked_loss()
        self._optimizer_forms()
        return tuple(sorted(self._found, key=self._rank))

    def _rank(self, change: Change) -> tuple[int, bool, int, str]:
        """Return a sort key for a tried change: the largest reduction of the peak comes first.

        If two reductions are equal, a single change comes before a pair of changes.
        """
        step_bytes = max(LEAST_SHARE * self._peak_bytes, 1.0)
        return -round(change.lowers_bytes / step_bytes), _BOTH in change.name, -change.lowers_bytes, change.name

    def _add(self, name: str, how: str, peak: Peak, basis: str) -> None:
        is_chunk = any(holder.label == _CHUNK_LABEL for holder in peak.holders)
        self._found.append(
            Change(
                name=name,
                how=how,
                predicted_peak_bytes=peak.bytes,
                lowers_bytes=self._peak_bytes - peak.bytes,
                moment="forward of the chunked loss" if is_chunk else peak.moment,
                basis=basis,
            )
        )

    def _peak(self, trace: Trace) -> Peak:
        """Simulate a changed trace under the same strategy as the original trace, and return the peak."""
        index = self._step.index(trace)
        choose = self._subject.choose
        return describe_peak(run_choices(index, choose_none(index, "") if choose is None else choose(index)))

    def _cannot_tell(self, name: str, why: str) -> None:
        self._unsupported.append(Unsupported(name=name, why=why))

    def _chunked_loss(self) -> None:
        head = find_head(self._subject.trace)
        if head is None:
            self._cannot_tell("chunked loss", "no linear head with a cross-entropy over classes was found in this step")
            return
        peak = self._peak(with_chunked_loss(self._subject.trace, head))
        self._add("chunked loss", f"{self._how_to_chunk}  # {default_rows(head)} of {head.rows} rows", peak, _REPLAYED)

    @property
    def _how_to_chunk(self) -> str:
        """Return the line of code that makes the user's loss be computed in chunks.

        It is ``chunk_loss(model)`` if the model supports it, else the loss function to call where the model computes its loss.
        """
        name = (
            "chunk_loss(model)" if can_chunk(self._step.task.model) else "linear_cross_entropy(hidden, weight, labels)"
        )
        return f"plimsoll.chunked.{name}"

    def _freed_output(self) -> None:
        ends = self._in_subject(lambda watched: watched.output_ends)
        if ends:
            how = "write loss = model(...).loss, so that only the loss is referenced when backward starts"
            trace = with_storages(self._subject.trace, lambda s: replace(s, dies=min(s.dies, ends.get(s.id, s.dies))))
            peak = self._peak(trace)
            self._add("output freed before backward", how, peak, _REPLAYED)

    def _gradients_set_to_none(self) -> None:
        writes = self._in_subject(lambda watched: watched.first_writes)
        if writes:
            births = {storage: tick + 1 for storage, tick in writes.items()}
            trace = with_storages(self._subject.trace, lambda s: replace(s, born=max(s.born, births.get(s.id, s.born))))
            peak = self._peak(trace)
            how = "call optimizer.zero_grad(set_to_none=True) before forward, unless gradients are accumulated"
            self._add("gradients set to None", how, peak, _REPLAYED)

    def _in_subject(self, ticks_of: Callable[[WatchedStep], dict[int, int]]) -> dict[int, int]:
        """Translate a mapping whose keys are storages of the recorded run: return it with storages of the subject as keys.

        Its values are ticks (positions among the ops) of the recorded run. Two storages of the two traces are the same if their
        birth tick, size and label are equal.
        """
        if self._subject.watched is None:
            return {}
        trace, watched, ticks = self._subject.trace, self._subject.watched.trace, ticks_of(self._subject.watched)
        if watched is trace:
            return ticks
        if self._step.task.units:  # kernels have other ticks than ops, and the loss may be inside a kernel
            return {}
        ids = {(s.born, s.bytes, s.label): s.id for s in trace.storages}
        ours = {(s.born, s.bytes, s.label): ticks[s.id] for s in watched.storages if s.id in ticks}
        return {ids[key]: tick for key, tick in ours.items() if key in ids}

    def _optimizer_forms(self) -> None:
        optimizer = self._step.task.optimizer
        if optimizer is None:
            self._cannot_tell(
                "another optimizer", "no optimizer was given, so the peak does not contain its state and its step"
            )
            return
        name = type(optimizer).__name__
        for option, options in _OPTIMIZER_FORMS.items():
            is_known = all(key in optimizer.defaults for key in options)
            if not is_known or all(optimizer.defaults[key] == wish for key, wish in options.items()):
                continue
            try:
                without = frozenset(() if self._subject.watched is None else self._subject.watched.without_gradient)
                trace = with_options(self._subject.trace, optimizer, self._step.task.model, options, without)
            except PlimsollError as error:
                self._cannot_tell(f"optimizer with {option}", error.found)
                continue
            self._add(f"optimizer with {option}", f"{name}(parameters, {option})", self._peak(trace), _REPLAYED)
        if any(s.category is Category.OPTIMIZER_STATE for s in self._subject.trace.storages):
            sizes = parameter_sizes(optimizer, self._step.task.model)
            peak = self._peak(with_eight_bit_state(self._subject.trace, sizes))
            how = "use an 8-bit optimizer (bitsandbytes, torchao): one byte per number, one scale per 256 numbers"
            self._add("optimizer state in 8 bits", how, peak, _MODELLED)

    def _half_batch(self) -> None:
        half = half_of(self._step.task.batch)
        if half is None:
            self._cannot_tell("half the micro-batch", "the first dimension of the batch is missing or smaller than 2")
            return
        try:
            trace = self._step.watch(half).trace if self._subject.choose is None else self._step.trace(half)
        except PlimsollError as error:
            self._cannot_tell("half the micro-batch", error.found)
            return
        self._add(
            "half the micro-batch", "halve the batch, and double the accumulation steps", self._peak(trace), _RUN_AGAIN
        )

    def _strategies(self) -> None:
        """Try Plimsoll's strategies in place of the present way to save memory, and record the peak of each as a change.

        Also try the lowest plan together with the chunked loss.
        """
        try:
            trace = self._subject.trace if self._subject.choose is not None else self._step.trace(self._step.task.batch)
        except PlimsollError as error:
            self._cannot_tell("another strategy", error.found)
            return
        planner = Planner(self._step.index(trace))
        self.notes = notes_about_plans(planner.baseline)
        head = find_head(trace)
        choose = self._subject.choose
        present = None if choose is None else tuple(choose(planner.index))
        named = {"full": choose_full(planner.index, "")}
        if self._subject.is_managed:
            named["none"] = choose_none(planner.index, "")
        for strategy, choices in named.items():
            if tuple(choices) != present:
                peak = describe_peak(run_choices(planner.index, choices))
                self._add(f"strategy {strategy}", f"plimsoll.plan(model, batch, strategy={strategy!r})", peak, _PLANNED)
        floor = planner.floor
        name, how = "strategy auto at its floor", "plimsoll.plan(model, batch, budget=...)"
        self._add(name, how, describe_peak(floor), _PLANNED)
        if head is None:
            return
        chunked = StepIndex(with_chunked_loss(trace, head), planner.index.costs)
        peak = describe_peak(run_choices(chunked, floor.choices))
        if floor.peak_bytes - peak.bytes > LEAST_SHARE * self._peak_bytes:
            self._add(f"chunked loss{_BOTH}{name}", f"{self._how_to_chunk}, then {how}", peak, _PLANNED)


def half_of(batch: Any) -> Any:
    """Return the first half of a batch along its first dimension, or ``None`` if that dimension is missing or smaller than two.

    Example:
        >>> half_of({"x": torch.zeros(4, 3), "scale": torch.zeros(3)})["x"].shape
        torch.Size([2, 3])
    """
    sizes = [tensor.shape[0] for tensor in tree_leaves(batch) if isinstance(tensor, torch.Tensor) and tensor.dim()]
    if not sizes or sizes[0] < 2:
        return None
    size = sizes[0]
    return tree_map_only(torch.Tensor, lambda t: t[: size // 2] if t.dim() and t.shape[0] == size else t, batch)


_EIGHT_BIT_BYTES = 1 + 4 / 256
"""Bytes per number of 8-bit optimizer state: one byte, and one float32 scale per 256 numbers."""
_LEAST_EIGHT_BIT_NUMBERS = 4096
"""8-bit optimizers do not change state tensors with fewer numbers than this."""


def with_storages(trace: Trace, change: Callable[[Storage], Storage]) -> Trace:
    """Return a copy of the trace that has, instead of each storage, the result of ``change`` for this storage."""
    return replace(trace, storages=tuple(map(change, trace.storages)))


def with_eight_bit_state(trace: Trace, sizes: Mapping[str, int]) -> Trace:
    """Return a copy of the trace with the optimizer's state in 8 bits per number, as 8-bit optimizers hold it.

    ``sizes`` maps names of parameters to their numbers of elements. State that takes less than 8 bits for each element of its
    parameter, such as Adafactor's factors, does not change.
    """

    def change(storage: Storage) -> Storage:
        if storage.category is not Category.OPTIMIZER_STATE:
            return storage
        size = sizes.get(parameter_of_state(storage), 0)
        if size < _LEAST_EIGHT_BIT_NUMBERS:
            return storage
        return replace(storage, bytes=min(storage.bytes, int(size * _EIGHT_BIT_BYTES)))

    return with_storages(trace, change)
