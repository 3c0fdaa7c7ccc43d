"""Describes a simulated step for users and for other tools.

For users: the tensors that hold memory at the peak, bytes by category, the timeline, and the memory of replays (the
recomputation of dropped values). For the simulated allocator: all allocations and releases, one by one.

Within an instant events happen in this order: ended buffers are released; new buffers are allocated; replays run, and each of
their buffers is allocated and released individually. So the highest sum of an instant, after the releases, is the byte count
of the simulator. (It is less if two unlinked regions replay before the same op, because the simulator adds the two up.)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from plimsoll.artifacts.explained import RecomputedPart
from plimsoll.artifacts.memory_use import COMMUNICATION_STREAM, DEFAULT_STREAM, AllocationEvent
from plimsoll.artifacts.naming import plain_name, plain_place
from plimsoll.artifacts.plan import Holder, Peak, TimelinePoint
from plimsoll.artifacts.trace import Category, Phase, Storage, Trace
from plimsoll.planning.replay import Replay
from plimsoll.planning.simulate import Simulation, StepReplays
from plimsoll.planning.step import Ints, Span, StepIndex
from plimsoll.units import format_bytes

_STATE_LABELS = {
    Category.PARAMETER: "parameters",
    Category.BUFFER: "buffers",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER_STATE: Category.OPTIMIZER_STATE.value,
}
_LET_GO, _ALLOCATED, _REPLAYED = range(3)
_Entry = tuple[int, int, AllocationEvent]
_AT_START = {
    Category.PARAMETER: 0,
    Category.BUFFER: 1,
    Category.OPTIMIZER_STATE: 2,
    Category.GRADIENT: 3,
    Category.INPUT: 4,
}


def describe_peak(simulation: Simulation) -> Peak:
    """Return the peak of a simulated step: its moment, its bytes, and the tensors or groups that take them, largest first."""
    index, instant = simulation.index, simulation.peak_instant
    replays = StepReplays(index, simulation.choices, instant)
    bytes_of: dict[str, int] = {}

    def add(label: str, size: int) -> None:
        bytes_of[label] = bytes_of.get(label, 0) + size

    for span, size, label in replays.extras():
        if _contains([span], instant):
            add(label, size)
    for outcome in replays.outcomes:
        for label, size in outcome.live:
            add(label, size)
    for storage in index.trace.storages:
        if replays.is_alive(storage.id, instant):
            # State that stays for the whole step is one holder per category; activations and temporaries are named singly.
            add(_STATE_LABELS.get(storage.category) or storage.label or storage.category.value, storage.bytes)
    if index.waiting and instant < index.last_wait:
        add(
            f"{index.waiting:.3g} other micro-batch{'es' if index.waiting > 1 else ''} in flight",
            waiting_bytes(simulation),
        )
    workspace = int(index.workspace[instant])
    if workspace:
        add(f"workspace of {index.trace.ops[instant // 2].name}", workspace)
    if index.loss_bytes and instant == index.handover:
        add("loss outside of the model", index.loss_bytes)
    holders = sorted((Holder(label=k, bytes=v) for k, v in bytes_of.items() if v), key=lambda h: (-h.bytes, h.label))
    return Peak(moment=_name_instant(index.trace, instant), bytes=simulation.peak_bytes, holders=tuple(holders))


def describe_largest_change(before: Simulation, after: Simulation) -> str:
    """Return a text that names the largest group of values that ``after`` recomputes, compresses or offloads and ``before``
    keeps.

    A group has the values of one name in all regions: ``recompute gelu in 2 more blocks, 8.0 MiB``. The text is empty if no
    value has changed in this way.
    """
    index = after.index
    bytes_of: Counter[tuple[str, str]] = Counter()
    regions: dict[tuple[str, str], set[int]] = {}
    for view, earlier, choice in zip(index.views, before.choices, after.choices, strict=True):
        for value in view.decided:
            form = choice.forms.get(value)
            was_same = value not in earlier.kept and earlier.forms.get(value) == form
            if value not in choice.kept and not was_same:
                entry = view.graph.values[value]
                verb = "recompute" if form is None else view.form(value, form).decision.value.lower()
                bytes_of[verb, entry.name] += index.trace.storages[entry.storage].bytes
                regions.setdefault((verb, entry.name), set()).add(view.call.index)
    if not bytes_of:
        return ""
    (verb, name), size = bytes_of.most_common(1)[0]
    count = len(regions[verb, name])
    return f"{verb} {plain_name(name)} in {count} more block{'s' if count > 1 else ''}, {format_bytes(size)}"


def waiting_bytes(simulation: Simulation) -> int:
    """Return the bytes that other micro-batches hold on a pipeline stage while they wait for their backward."""
    return int(held_bytes(simulation) * simulation.index.waiting)


def held_bytes(simulation: Simulation) -> int:
    """Return the number of bytes that one micro-batch holds between its forward and its backward."""
    index = simulation.index
    own_bytes = int(simulation.curve[index.handover]) - index.lasting_bytes - index.loss_bytes
    return int(own_bytes // (index.waiting + 1))


def _name_instant(trace: Trace, instant: int) -> str:
    """Return a text that says where in the step an instant lies: ``backward of layers.3.mlp (mm)``."""
    if not trace.ops:
        return "before the first op"
    tick = min(instant // 2, len(trace.ops) - 1)
    op = trace.ops[tick]
    timing = "before " if instant % 2 == 0 and instant // 2 < len(trace.ops) else ""
    if not op.module:
        return f"{op.phase.value} ({timing}{op.name})"
    place = plain_place(op.module, op.name)
    if timing:
        place = place.replace("(", f"({timing}") if "(" in place else f"{place} (before it)"
    return f"{op.phase.value} of {place}"


def category_curves(simulation: Simulation) -> dict[str, Ints]:
    """Return a mapping from each memory category to an array with its bytes at each instant.

    Rebuilt values and copies count as activations, workspaces as temporaries.
    """
    index = simulation.index
    replays = StepReplays(index, simulation.choices)
    change = {category: np.zeros(index.instants + 1, dtype=np.int64) for category in Category}
    for storage in index.trace.storages:
        for start, stop in replays.cover(storage.id):
            change[storage.category][start] += storage.bytes
            change[storage.category][stop] -= storage.bytes
    curves = {category.value: np.cumsum(c)[:-1] for category, c in change.items()}
    curves[Category.TEMPORARY.value] += index.workspace
    others = sum(curve for name, curve in curves.items() if name != Category.ACTIVATION.value)
    curves[Category.ACTIVATION.value] = simulation.curve - others
    return curves


def describe_timeline(
    simulation: Simulation,
    points: int = 400,
    *,
    curves: Mapping[str, Ints] | None = None,
    unmanaged: Simulation | None = None,
) -> tuple[TimelinePoint, ...]:
    """Return the bytes over the step as at most ``points`` points, with the maximum of each stretch. So the peak is included.

    Args:
        simulation: the step under the plan.
        points: the maximum number of points.
        curves: the result of ``category_curves`` for this step, if it is already computed.
        unmanaged: the same step without a plan, for comparison.
    """
    trace = simulation.index.trace
    curves = curves or category_curves(simulation)
    starts = [0.0, *itertools.accumulate(simulation.index.op_seconds(op.cost_key) for op in trace.ops)]
    ticks = max(len(trace.ops), 1)
    stretch = max(-(-ticks // points), 1)
    found = []
    for first in range(0, ticks, stretch):
        last = min(first + stretch, ticks)
        stretch_of_step = slice(2 * first, 2 * last if last < ticks else None)
        part = simulation.curve[stretch_of_step]
        instant = 2 * first + int(np.argmax(part))
        tick = min(instant // 2, ticks - 1)
        found.append(
            TimelinePoint(
                tick=tick,
                moment=_name_instant(trace, instant),
                bytes=int(simulation.curve[instant]),
                by_category={name: int(curve[instant]) for name, curve in curves.items() if curve[instant]},
                unmanaged_seconds=starts[tick],
                unmanaged_bytes=None if unmanaged is None else int(unmanaged.curve[stretch_of_step].max()),
            )
        )
    return tuple(found)


def classes_at_peak(simulation: Simulation, curves: Mapping[str, Ints] | None = None) -> dict[str, int]:
    """Return a mapping from each memory category to its bytes at the peak.

    ``curves`` is the result of ``category_curves`` for this step, if it is already computed.
    """
    curves = curves or category_curves(simulation)
    return {name: int(curve[simulation.peak_instant]) for name, curve in curves.items()}


def holders_at(simulation: Simulation, instant: int) -> tuple[Holder, ...]:
    """Return a list of tensors, or groups of tensors, in memory at an instant, with their bytes, largest first."""
    return describe_peak(dataclasses.replace(simulation, peak_instant=instant)).holders


def forward_end(trace: Trace) -> int:
    """Return the position, in the list of the step's ops, of the first op that does not belong to forward."""
    ticks = (tick for tick, op in enumerate(trace.ops) if op.phase is not Phase.FORWARD)
    return next(ticks, len(trace.ops))


def rebuilt_parts(simulation: Simulation) -> tuple[RecomputedPart, ...]:
    """Return one entry for each region (module call) that recomputes, with the most bytes of rebuilt values and the ops that
    run again.

    Regions that are rebuilt together share one entry: one of them drops its input, and the other rebuilds this input. Ops are
    counted, not listed.
    """
    replays = StepReplays(simulation.index, simulation.choices)
    return tuple(
        RecomputedPart(
            place=simulation.index.views[min(chain)].call.name,
            most_bytes=max((bytes_ for _, bytes_ in outcome.levels), default=0),
            ops=len(outcome.ops),
        )
        for chain, outcome in zip(replays.chains, replays.outcomes, strict=True)
        if outcome.ops
    )


def allocation_events(simulation: Simulation) -> tuple[AllocationEvent, ...]:
    """Return all allocations and releases of a simulated step, in order.

    A rebuilt storage is a new block. In a pipeline, waiting micro-batches come first, with one block for each storage that
    they hold. Blocks of zero bytes are left out. Buffers of collectives are on their own stream.

    Args:
        simulation: one step under one plan.

    Example:
        >>> sum(event.bytes for event in allocation_events(simulation))  # doctest: +SKIP
        0
    """
    replays = StepReplays(simulation.index, simulation.choices)
    log = _Log(simulation.index)
    log.storages(replays)
    log.extras(replays)
    log.workspaces()
    for outcome in replays.outcomes:
        log.rebuilt(outcome)
    return log.sorted()


class _Log:
    """Collects the allocations and releases of one simulated step, and sorts them by time.

    Time is the instant (a moment before or during an op) and the order within the instant. Events at the same place stay in the
    order of recording.
    """

    def __init__(self, index: StepIndex) -> None:
        self.index = index
        self.entries: list[_Entry] = []
        self.blocks = 0
        optimizer = (tick for tick, op in enumerate(index.trace.ops) if op.phase is Phase.OPTIMIZER)
        self.optimizer_instant = 2 * next(optimizer, len(index.trace.ops))

    def sorted(self) -> tuple[AllocationEvent, ...]:
        """Return all recorded allocations and releases, ordered by their time in the step."""
        self.entries.sort(key=lambda entry: entry[:2])
        return tuple(event for _, _, event in self.entries)

    def storages(self, replays: StepReplays) -> None:
        """Record the allocation and release of each storage of the trace, parameters first.

        A storage lives as long as the trace holds it or a region holds it for backward.
        """
        for storage in sorted(self.index.trace.storages, key=_place_at_start):
            is_state = storage.born < 0 and storage.category is not Category.INPUT
            is_shared = is_state and _contains(self.index.covered(storage.id), self.index.handover)
            for span in replays.cover(storage.id):
                lasts = is_state and span[1] >= 2 * len(self.index.trace.ops)
                self._span(span, storage.bytes, storage.label, storage.category, lasts=lasts)
                if not is_shared:
                    self._waiting(span, storage.bytes, storage.label, storage.category)

    def extras(self, replays: StepReplays) -> None:
        """Record the memory that the plan itself needs.

        It is needed for copies of inputs, for payloads (what compressed and offloaded values leave on the device), and for
        making payloads.
        """
        for (start, stop), size, label in replays.extras():
            span = (start, max(start, stop))
            self._span(span, size, label, Category.ACTIVATION)
            self._waiting(span, size, label, Category.ACTIVATION)

    def workspaces(self) -> None:
        """Record the workspaces: memory that each op allocates when it begins and frees when it ends."""
        sizes = self.index.trace.workspaces
        for tick, op in enumerate(self.index.trace.ops):
            size = sizes.get(op.cost_key, 0)
            if size:
                self._span((2 * tick + 1, 2 * tick + 2), size, f"workspace of {op.name}", Category.TEMPORARY)

    def rebuilt(self, outcome: Replay) -> None:
        """Record the buffers that one recomputation allocates and releases, in order.

        It may be the recomputation of several regions, if one of them drops an input that another one rebuilds.
        """
        first = self.blocks
        for buffer in outcome.buffers:
            if buffer.bytes:
                rank = _LET_GO if buffer.is_due else _REPLAYED
                self._note(buffer.instant, rank, first + buffer.buffer, buffer.bytes, buffer.label, Category.ACTIVATION)
        self.blocks += 1 + max((buffer.buffer for buffer in outcome.buffers), default=0)

    def _waiting(self, span: Span, size: int, label: str, category: Category) -> None:
        """Record one more copy of a tensor for each micro-batch that waits for its backward.

        This applies only if the tensor is alive between forward and backward (``span``).
        """
        stop = min(self.index.last_wait, self.index.instants)
        if _contains([span], self.index.handover):
            whole = int(self.index.waiting)
            part_bytes = int((self.index.waiting - whole) * size)
            for waiting_bytes in [size] * whole + [part_bytes]:
                self._span((0, stop), waiting_bytes, f"waiting: {label}", category, lasts=stop == self.index.instants)

    def _span(self, span: Span, size: int, label: str, category: Category, *, lasts: bool = False) -> None:
        start, stop = span
        if not size or stop <= start:
            return
        self._note(start, _ALLOCATED, self.blocks, size, label, category, lasts=lasts)
        self._note(stop, _LET_GO, self.blocks, -size, label, category, lasts=lasts)
        self.blocks += 1

    def _note(
        self, instant: int, rank: int, block: int, size: int, label: str, category: Category, *, lasts: bool = False
    ) -> None:
        stream = COMMUNICATION_STREAM if category is Category.COMMUNICATION else DEFAULT_STREAM
        event = AllocationEvent(
            instant=instant,
            block=block,
            bytes=size,
            label=label,
            category=category,
            stream=stream,
            lasts=lasts,
            made=self.optimizer_instant if lasts and category is Category.OPTIMIZER_STATE else instant,
        )
        self.entries.append((instant, rank, event))


def _contains(spans: Sequence[Span], instant: int) -> bool:
    return any(start <= instant < stop for start, stop in spans)


def _place_at_start(storage: Storage) -> tuple[int, int]:
    """Return a sort key for storages.

    Storages from before the step come first, in the order of their allocation by training. The others follow in the order of
    the trace.
    """
    return (_AT_START.get(storage.category, len(_AT_START)) if storage.born < 0 else len(_AT_START), storage.id)
