"""Prepares a traced step for planning: the bytes that no decision changes, at each instant, and what each region may decide.

A region is a module that Plimsoll manages, a value one version of one of its tensors' storages, and a slot one tensor that
autograd saved for backward. For each saved value a plan decides to keep, recompute, compress or offload it.

Time in this module is counted in *instants*, two per tick (position among the ops). Instant ``2t`` lies before op ``t`` runs:
slots are packed, unpacked and released there, and replays run there. Instant ``2t + 1`` is while op ``t`` runs. A storage with
life ``[born, dies)`` is alive during the instants ``[2 born + 1, 2 dies)``.

The *fixed* bytes are the bytes that no decision changes: lives of the trace, workspaces, slots that must be kept, and every
slot until its region's forward ends (the engine keeps real tensors until then).

In a pipeline a stage runs the step of one micro-batch while others *wait* between their forward and their backward. With at
most ``in_flight`` micro-batches, all but one wait. The *handover* is the moment when forward has ended and backward has not
begun. Each waiting micro-batch holds the tensors alive at the handover, except those that all micro-batches share (alive before
the step, and not an input). All micro-batches take the same choices, so together they hold a multiple of one micro-batch's
bytes. When the optimizer runs, no micro-batch waits.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.forms import Form, Forms, ValueForms
from plimsoll.artifacts.region import SMALL_BUFFER_BYTES, Origin, RegionGraph, Slot
from plimsoll.artifacts.trace import Category, Phase, RegionCall, Storage, Trace
from plimsoll.planning.replay_schedule import can_rebuild

Ints = npt.NDArray[np.int64]
Span = tuple[int, int]
"""A time range in the step: the first instant in it, and the first instant after it. An instant is a moment before or during an
op."""


@dataclass(frozen=True, slots=True)
class RegionView:
    """Data: one call of one region (module call), and which decisions are possible for its values. Numbers of values are ids in
    its graph.

    ``saved`` are the values that autograd saves in slots (saved tensors) that Plimsoll manages, each once, in the order of
    saving. Of these, ``droppable`` values may be recomputed, ``movable`` values must be held but may be held in another form
    (compressed or offloaded), and ``forced`` values are always kept. ``forms`` maps saved values and inputs to their possible
    forms, ``pins`` maps values to the user's decisions. ``copied`` are inputs that no slot holds, and small buffers: a recipe
    (the ops that rebuild a value) that needs such a value copies it when the region begins, or holds it without a copy if it
    is in ``steady``. ``resident`` are parameters and buffers, which are in memory anyway; ``free`` are those that no recipe
    copies. ``slots_of`` maps each saved value to its slots.
    """

    call: RegionCall
    saved: tuple[int, ...]
    droppable: tuple[int, ...]
    movable: tuple[int, ...]
    forms: dict[int, ValueForms]
    copied: frozenset[int]
    steady: frozenset[int]
    resident: frozenset[int]
    free: frozenset[int]
    slots_of: dict[int, tuple[Slot, ...]]
    pins: dict[int, str] = field(default_factory=dict)

    @property
    def graph(self) -> RegionGraph:
        """The graph of this module call: its ops, its values and the tensors that autograd saved."""
        return self.call.graph

    @property
    def forced(self) -> frozenset[int]:
        """The saved values that are always kept, because no decision about them is possible."""
        return frozenset(self.saved) - frozenset(self.decided)

    @property
    def decided(self) -> tuple[int, ...]:
        """The saved values about which a decision is made: the droppable and the movable ones."""
        return self.droppable + self.movable

    @property
    def everything(self) -> frozenset[int]:
        """The ids of the values that a region keeps if it keeps as much as possible: all values a plan may decide about."""
        return frozenset(self.decided)

    @property
    def nothing(self) -> frozenset[int]:
        """The ids of the values that are kept if the region recomputes as much as possible.

        They are the movable values, which cannot be recomputed but may be compressed or offloaded.
        """
        return frozenset(self.movable)

    def form(self, value: int, name: str) -> Form:
        """Return the form with this name that a value may take. A form is a codec's payload, or a transfer over a link (to host
        memory or disk).
        """
        return next(form for form in self.forms[value].forms if form.name == name)

    def sensitivity(self, value: int) -> float:
        """Return the relative error of the gradient, divided by the relative error in a value that causes it.

        It is infinite if it was not measured.
        """
        entry = self.forms.get(value)
        return math.inf if entry is None else entry.sensitivity

    @property
    def leaves(self) -> frozenset[int]:
        """The ids of the values that backward can read under any plan, and that recomputation can start from.

        They are values always kept, inputs, parameters and buffers.
        """
        return self.forced | self.copied | self.free


@dataclass(frozen=True, slots=True)
class Transfers:
    """Data: a schedule of transfers over a link, used instead of Plimsoll's own schedule to simulate other frameworks.

    ``spans`` maps (region, value) to two instants: when the device frees the value, and when the device allocates room for the
    value again. A value that is read between the two instants is brought back when it is read. ``waiting_seconds`` maps each
    region to the seconds that its transfers add to the step.
    """

    spans: Mapping[tuple[int, int], Span]
    waiting_seconds: Mapping[int, float]


class StepIndex:
    """The facts about one traced step that do not depend on a plan: lives of storages, fixed bytes, possible decisions, costs.

    All simulations of the step share them. The object does not change once built, except for its caches.
    """

    def __init__(
        self,
        trace: Trace,
        costs: Costs,
        forms: Forms | None = None,
        *,
        may_recompute: bool = True,
        in_flight: float = 1,
        loss_share: float = 0.0,
    ) -> None:
        """Prepare a step.

        Args:
            trace: the traced step.
            costs: the seconds of its ops.
            forms: the compressed and offloaded forms that plans may use.
            may_recompute: whether plans may recompute values.
            in_flight: how many micro-batches are between forward and backward at the same time. It may be a fraction, where
                micro-batches that wait in other stages of a rank count as a part of one.
            loss_share: bytes that a loss outside of the model takes between forward and backward, as a share of
                ``between_bytes``.
        """
        self.trace = trace
        self.waiting = in_flight - 1
        self._loss_share = loss_share
        self.costs = costs
        self.forms = forms or Forms()
        self.instants = 2 * len(trace.ops) + 2
        shared = _saved_by_several(trace)
        self.views = tuple(
            _view(trace, call, self.forms.of(call.name, call.call), shared, may_recompute=may_recompute)
            for call in trace.regions
        )
        self.base_seconds = sum(self.op_seconds(op.cost_key) for op in trace.ops)
        self.forced_spans = self._forced_spans()
        self._covered: dict[int, list[Span]] = {}
        self.replays: dict[Any, Any] = {}
        """The cache of the module ``simulate``: maps (region, choice) to the replay, the recomputation of that region."""
        self.transfers: Transfers | None = None
        """The schedule of transfers to simulate; ``None`` for Plimsoll's own schedule, which has one window per transfer."""

    def scheduled(self, transfers: Transfers | None) -> StepIndex:
        """Return a copy of the step whose transfers over the link follow the given schedule.

        ``None`` means Plimsoll's own schedule.
        """
        other = copy.copy(self)
        other.transfers, other.replays = transfers, {}
        return other

    def op_seconds(self, cost_key: str) -> float:
        """Return the measured or predicted seconds of the op with this cost key (an op with its shapes); 0 if the costs do not
        contain the key.
        """
        cost = self.costs.ops.get(cost_key)
        return 0.0 if cost is None else cost.seconds

    def replay_seconds(self, cost_key: str) -> float:
        """Return the seconds that it takes to run the op with this cost key again in backward.

        Plimsoll's own work for a recomputed op is included.
        """
        own = 0.0 if cost_key in self._kernels else self.costs.replay_seconds
        return self.op_seconds(cost_key) + own

    @cached_property
    def _kernels(self) -> frozenset[str]:
        """The cost keys (names of ops with their shapes) in compiled regions. Compiled code recomputes them itself, without
        Plimsoll's time per op.
        """
        return frozenset(op.cost_key for view in self.views if view.call.is_compiled for op in view.graph.ops)

    @cached_property
    def compiled_together(self) -> tuple[tuple[int, ...], ...]:
        """A tuple for each compiled region that the step calls several times, with the positions of these calls in ``views``.

        All calls of a compiled region run the same code, so they must take the same choice (what to keep or recompute).
        """
        calls: defaultdict[str, list[int]] = defaultdict(list)
        for at, view in enumerate(self.views):
            if view.call.is_compiled:
                calls[view.call.name].append(at)
        return tuple(tuple(places) for places in calls.values() if len(places) > 1)

    def life(self, storage: int) -> Span:
        """Return two instants: the first at which a storage is alive, and the first at which the storage is not alive any more.

        The time when only saved tensors of regions hold the storage does not count.
        """
        entry = self.trace.storages[storage]
        return max(2 * entry.born + 1, 0), min(max(2 * entry.dies + entry.is_overwritten, 0), self.instants)

    def covered(self, storage: int) -> list[Span]:
        """Return the spans of instants at which a storage is alive under any plan.

        They are the storage's own life, and the time while saved tensors must hold it.
        """
        if storage not in self._covered:
            forced = self.forced_spans.get(storage, ())
            self._covered[storage] = merge([self.life(storage), *((start, stop) for _, start, stop in forced)])
        return self._covered[storage]

    def neighbour(self, region: int) -> RegionCall | None:
        """Return the region whose compute hides the transfers of ``region``; or ``None``.

        It is the next region call, if its backward ends before the backward of ``region`` starts. Each transfer has one window:
        the next call's forward, or its backward. So the bytes at each instant do not depend on the link's speed, and the cost
        of a region's choice does not depend on other regions (docs/project/design/one-window-per-transfer.md).
        """
        if region + 1 >= len(self.views):
            return None
        call, after = self.views[region].call, self.views[region + 1].call
        is_between = after.forward[0] >= call.forward[1] and 0 <= after.backward[0] <= after.backward[1]
        return after if is_between and after.backward[1] <= call.backward[0] else None

    def transfer_windows(self, call: RegionCall, after: RegionCall) -> tuple[float, float]:
        """Return two numbers: the seconds of compute that hide transfers from the device, and those that hide transfers back.

        ``after`` is the region after ``call``; its compute hides the transfers of ``call``.
        """
        before = self.seconds_before
        out_window = before[after.forward[1]] - before[call.forward[1]]
        in_window = before[call.backward[0]] - before[after.backward[0]]
        return float(out_window), float(in_window)

    @cached_property
    def seconds_before(self) -> npt.NDArray[np.float64]:
        """An array with, for each op of the step, the seconds of all ops that run before it."""
        return np.cumsum([0.0, *(self.op_seconds(op.cost_key) for op in self.trace.ops)])

    @cached_property
    def workspace(self) -> Ints:
        """An array with, for each instant, the bytes that the op running then allocates and frees inside itself."""
        curve = np.zeros(self.instants, dtype=np.int64)
        for tick, op in enumerate(self.trace.ops):
            curve[2 * tick + 1] = self.trace.workspaces.get(op.cost_key, 0)
        return curve

    @cached_property
    def handover(self) -> int:
        """The instant between forward and backward: forward has ended, and backward has not begun."""
        backward = (tick for tick, op in enumerate(self.trace.ops) if op.phase is not Phase.FORWARD)
        return 2 * next(backward, len(self.trace.ops))

    @cached_property
    def last_wait(self) -> int:
        """The first instant at which no other micro-batch waits for its backward: the optimizer's step begins."""
        steps = (tick for tick, op in enumerate(self.trace.ops) if op.phase is Phase.OPTIMIZER)
        return 2 * next(steps, len(self.trace.ops) + 1)

    def waits(self, held_bytes: int) -> Ints:
        """Return an array with, for each instant, the bytes that all waiting micro-batches hold together.

        A micro-batch waits between its forward and its backward; each holds ``held_bytes``.
        """
        curve = np.zeros(self.instants, dtype=np.int64)
        curve[: self.last_wait] = self.waiting * held_bytes
        return curve

    @cached_property
    def lasting(self) -> tuple[Storage, ...]:
        """The storages that all micro-batches share: allocated before the step, not inputs, and alive at the handover."""
        return tuple(
            storage
            for storage in self.trace.storages
            if storage.born < 0
            and storage.category is not Category.INPUT
            and any(start <= self.handover < stop for start, stop in self.covered(storage.id))
        )

    @property
    def lasting_bytes(self) -> int:
        """The total bytes of the storages that all micro-batches share, such as parameters."""
        return sum(storage.bytes for storage in self.lasting)

    @cached_property
    def fixed(self) -> Ints:
        """An array with, for each instant, the bytes that are in memory under any plan. Waiting micro-batches are included."""
        alone = self._fixed_alone()
        curve = alone + self.waits(int(alone[self.handover]) - self.lasting_bytes)
        curve[self.handover] += self.loss_bytes
        return curve

    @cached_property
    def loss_bytes(self) -> int:
        """The bytes that a loss outside of the traced model takes between forward and backward."""
        return round(self._loss_share * self.between_bytes)

    @cached_property
    def between_bytes(self) -> int:
        """The bytes that one micro-batch holds between forward and backward under any plan: inputs, outputs, other tensors."""
        return int(self._fixed_alone()[self.handover]) - self.lasting_bytes

    def _fixed_alone(self) -> Ints:
        """Return an array with, for each instant, the bytes that one micro-batch has in memory under any plan."""
        change = np.zeros(self.instants + 1, dtype=np.int64)
        for storage in self.trace.storages:
            for start, stop in self.covered(storage.id):
                change[start] += storage.bytes
                change[stop] -= storage.bytes
        return np.cumsum(change)[:-1] + self.workspace

    def _forced_spans(self) -> dict[int, list[tuple[int, int, int]]]:
        """Return a mapping from each storage to a list of (region, start, stop), one entry for each saved tensor (slot).

        From instant ``start`` to ``stop`` the slot holds the storage whatever is decided.
        """
        spans: dict[int, list[tuple[int, int, int]]] = {}
        for view in self.views:
            decided = frozenset(view.decided)
            for value, slots in view.slots_of.items():
                for slot in slots:
                    stop = slot_stop(self.trace, slot)
                    if value in decided:
                        exit_ = 2 * slot.packed if view.call.is_compiled else 2 * view.call.forward[1]
                        stop = min(stop, exit_)
                    spans.setdefault(view.graph.values[value].storage, []).append(
                        (view.call.index, 2 * slot.packed, stop)
                    )
        return spans


def boundary_values(index: StepIndex, view: RegionView) -> frozenset[int]:
    """Return the ids of the saved inputs of a region that are not held if a choice drops the region's input.

    An earlier region made these inputs and can rebuild them. The result is empty if several regions made them.
    """
    found: set[int] = set()
    if view.call.is_compiled:
        return (
            frozenset()
        )  # keep one boundary per block: without it every recompute would move to the start of backward
    for value in view.saved:
        entry = view.graph.values[value]
        maker = index.trace.storages[entry.storage].region
        if entry.origin is not Origin.INPUT or maker < 0 or maker == view.call.index:
            continue
        if _can_provide(index.views[maker], entry.storage):
            found.add(value)
    makers = {index.trace.storages[view.graph.values[v].storage].region for v in found}
    return frozenset(found) if len(makers) == 1 else frozenset()


def _can_provide(maker: RegionView, storage: int) -> bool:
    """Return True if region ``maker`` outputs ``storage`` and can rebuild all outputs from values that it always holds."""
    outputs = maker.graph.outputs
    if (
        not maker.droppable
        or maker.call.is_emptied
        or maker.call.is_compiled
        or storage not in {maker.graph.values[v].storage for v in outputs}
    ):
        return False
    return can_rebuild(maker.graph, outputs, maker.leaves | maker.nothing)


def provider_of(index: StepIndex, view: RegionView, linked: frozenset[int]) -> int:
    """Return the position of the region that rebuilds ``linked``, the dropped inputs of ``view``; -1 if none is dropped."""
    if not linked:
        return -1
    return index.trace.storages[view.graph.values[next(iter(linked))].storage].region


def slot_stop(trace: Trace, slot: Slot) -> int:
    """Return the instant at which a slot (a tensor that autograd saved) is released.

    It is the end of the step if the trace did not record a release.
    """
    return 2 * slot.released + slot.is_overwritten if slot.released >= 0 else 2 * len(trace.ops) + 2


def merge(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint, sorted spans (half-open ranges) that cover the same instants as the given spans.

    Example:
        >>> merge([(4, 6), (0, 2), (1, 3), (9, 9)])
        [(0, 3), (4, 6)]
    """
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def subtract(spans: Iterable[Span], covered: Iterable[Span]) -> list[Span]:
    """Return the parts of ``spans`` (half-open ranges) that are outside ``covered``.

    In each of the two lists, the spans have to be disjoint and sorted.

    Example:
        >>> subtract([(0, 10)], [(2, 4), (8, 12)])
        [(0, 2), (4, 8)]
    """
    holes = list(covered)
    rest: list[Span] = []
    for start, stop in spans:
        at = start
        for hole_start, hole_stop in holes:
            if hole_stop <= at or hole_start >= stop:
                continue
            if hole_start > at:
                rest.append((at, hole_start))
            at = max(at, hole_stop)
        if at < stop:
            rest.append((at, stop))
    return rest


def _saved_by_several(trace: Trace) -> frozenset[int]:
    """Return the ids of the storages that more than one region saves for backward."""
    savers: dict[int, set[int]] = {}
    for call in trace.regions:
        for slot in call.graph.slots:
            if slot.is_managed:
                savers.setdefault(call.graph.values[slot.value].storage, set()).add(call.index)
    return frozenset(storage for storage, calls in savers.items() if len(calls) > 1)


def _view(
    trace: Trace, call: RegionCall, forms: dict[str, ValueForms], shared: frozenset[int], *, may_recompute: bool
) -> RegionView:
    """Return what one region may decide: which of its saved values may be recomputed, moved, or must be kept.

    ``forms`` maps names of values to their possible forms (codecs and links). ``shared`` are the storages that several regions
    save.
    """
    graph = call.graph
    slots_of: dict[int, tuple[Slot, ...]] = {}
    for slot in graph.slots:
        if slot.is_managed:
            slots_of[slot.value] = (*slots_of.get(slot.value, ()), slot)
    saved = tuple(slots_of)
    buffers = frozenset(v.id for v in graph.values if v.origin is Origin.BUFFER)
    small = frozenset(v for v in buffers if graph.values[v].bytes <= SMALL_BUFFER_BYTES)
    resident = buffers | {v.id for v in graph.values if v.origin is Origin.PARAMETER}
    free = resident - small
    given = (v.id for v in graph.values if v.producer < 0)
    # A recipe copies a small buffer even if autograd has saved it: autograd would not notice a write through `.data`.
    copied = frozenset(v for v in given if v not in free and (v in small or v not in slots_of))
    droppable: tuple[int, ...] = ()
    if may_recompute and not call.obstacle and call.backward[0] >= 0:
        droppable = _droppable(trace, call, saved, free | copied)
    entries: dict[int, ValueForms] = {}
    if not call.obstacle and call.backward[0] >= 0:
        names = {value: graph.values[value].name for value in (*saved, *copied) if value not in resident}
        entries = {value: forms[name] for value, name in names.items() if name in forms}
    return RegionView(
        call=call,
        saved=saved,
        droppable=droppable,
        movable=tuple(
            value
            for value, entry in entries.items()
            if entry.forms
            and value in slots_of
            and value not in droppable
            and graph.values[value].storage not in shared
        ),
        forms=entries,
        copied=copied,
        steady=frozenset(v for v in copied if graph.values[v].is_steady),
        resident=resident,
        free=free,
        slots_of=slots_of,
    )


def _droppable(trace: Trace, call: RegionCall, saved: tuple[int, ...], given: frozenset[int]) -> tuple[int, ...]:
    """Return the ids of the saved values that a region made and can recompute, if all other saved values are held.

    ``given`` are the values that are in memory anyway.
    """
    graph = call.graph
    own = (
        v
        for v in saved
        if graph.values[v].producer >= 0 and trace.storages[graph.values[v].storage].region == call.index
    )
    held = frozenset(saved) | given
    return tuple(value for value in own if can_rebuild(graph, (value,), held - {value}))
