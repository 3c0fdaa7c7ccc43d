"""A simulated step in, what people want to see of it out: who holds the peak, bytes by category, the timeline."""

from __future__ import annotations

import itertools

import numpy as np

from plimsoll.artifacts.plan import Holder, Peak, TimelinePoint
from plimsoll.artifacts.trace import Category, Trace
from plimsoll.planning.replay import Replay, replay
from plimsoll.planning.simulate import Simulation, actual_cover, chains, links_of
from plimsoll.planning.step import Ints, Span, merge


def _watch(simulation: Simulation, instant: int) -> tuple[list[Replay], dict[int, frozenset[int]]]:
    index = simulation.index
    linked = links_of(index, simulation.choices)
    return [replay(index, chain, linked, instant) for chain in chains(index, simulation.choices, linked)], linked


def describe_peak(simulation: Simulation) -> Peak:
    """Who is alive at the peak, by label and module, largest first."""
    index, instant = simulation.index, simulation.peak_instant
    replays, linked = _watch(simulation, instant)
    bytes_of: dict[str, int] = {}

    def add(label: str, size: int) -> None:
        bytes_of[label] = bytes_of.get(label, 0) + size

    holds: dict[int, list[Span]] = {}
    for outcome in replays:
        for storage, spans in outcome.holds.items():
            holds.setdefault(storage, []).extend(spans)
        for (start, stop), size, label in (*outcome.copies, *outcome.payloads, *outcome.packing):
            if start <= instant < stop:
                add(label, size)
        for label, size in outcome.live:
            add(label, size)
    for storage_ in index.trace.storages:
        spans = [*actual_cover(index, storage_.id, linked), *holds.get(storage_.id, ())]
        if any(start <= instant < stop for start, stop in spans):
            add(holder_label(storage_.category, storage_.label), storage_.bytes)
    if index.waiting and instant < index.last_wait:
        add(
            f"{index.waiting} other micro-batch{'es' if index.waiting > 1 else ''} in flight", waiting_bytes(simulation)
        )
    workspace = int(index.workspace[instant])
    if workspace:
        add(f"workspace of {index.trace.ops[instant // 2].name}", workspace)
    holders = sorted((Holder(label=k, bytes=v) for k, v in bytes_of.items() if v), key=lambda h: (-h.bytes, h.label))
    return Peak(moment=name_instant(index.trace, instant), bytes=simulation.peak_bytes, holders=tuple(holders))


def waiting_bytes(simulation: Simulation) -> int:
    """What the other micro-batches in flight hold while they wait for their backward."""
    return held_bytes(simulation) * simulation.index.waiting


def held_bytes(simulation: Simulation) -> int:
    """What one micro-batch holds between its forward and its backward."""
    index = simulation.index
    return (int(simulation.curve[index.handover]) - index.lasting_bytes) // (index.waiting + 1)


def holder_label(category: Category, label: str) -> str:
    """State that stays for the whole step is one holder; activations and temporaries are named one by one."""
    if category in (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER_STATE, Category.GRADIENT):
        return {Category.PARAMETER: "parameters", Category.BUFFER: "buffers", Category.GRADIENT: "gradients"}.get(
            category, category.value
        )
    return label or category.value


def name_instant(trace: Trace, instant: int) -> str:
    """Where in the step an instant lies: ``backward of layers.3.mlp (mm)``."""
    if not trace.ops:
        return "before the first op"
    tick = min(instant // 2, len(trace.ops) - 1)
    op = trace.ops[tick]
    place = f" of {op.module}" if op.module else ""
    timing = "before " if instant % 2 == 0 and instant // 2 < len(trace.ops) else ""
    return f"{op.phase.value}{place} ({timing}{op.name})"


def category_curves(simulation: Simulation) -> dict[str, Ints]:
    """Bytes per instant by category: rebuilt values and copies are activations, workspaces temporaries."""
    index = simulation.index
    replays, linked = _watch(simulation, -1)
    change = {category: np.zeros(index.instants + 1, dtype=np.int64) for category in Category}
    holds: dict[int, list[Span]] = {}
    for outcome in replays:
        for storage, spans in outcome.holds.items():
            holds.setdefault(storage, []).extend(spans)
    for storage_ in index.trace.storages:
        spans = merge([*actual_cover(index, storage_.id, linked), *holds.get(storage_.id, ())])
        for start, stop in spans:
            change[storage_.category][start] += storage_.bytes
            change[storage_.category][stop] -= storage_.bytes
    curves = {category.value: np.cumsum(c)[:-1] for category, c in change.items()}
    curves[Category.TEMPORARY.value] += index.workspace
    others = sum(curve for name, curve in curves.items() if name != Category.ACTIVATION.value)
    curves[Category.ACTIVATION.value] = simulation.curve - others
    return curves


def describe_timeline(simulation: Simulation, points: int = 400) -> tuple[TimelinePoint, ...]:
    """The bytes over the step at no more than ``points`` ticks: the highest of each stretch, so the peak is in."""
    trace = simulation.index.trace
    curves = category_curves(simulation)
    starts = [0.0, *itertools.accumulate(simulation.index.op_seconds(op.cost_key) for op in trace.ops)]
    ticks = max(len(trace.ops), 1)
    stretch = max(-(-ticks // points), 1)
    found = []
    for first in range(0, ticks, stretch):
        last = min(first + stretch, ticks)
        part = simulation.curve[2 * first : 2 * last if last < ticks else None]
        instant = 2 * first + int(np.argmax(part))
        tick = min(instant // 2, ticks - 1)
        found.append(
            TimelinePoint(
                tick=tick,
                moment=name_instant(trace, instant),
                bytes=int(simulation.curve[instant]),
                by_category={name: int(curve[instant]) for name, curve in curves.items() if curve[instant]},
                unmanaged_seconds=starts[tick],
            )
        )
    return tuple(found)


def classes_at_peak(simulation: Simulation) -> dict[str, int]:
    """Bytes per memory category at the peak."""
    return {name: int(curve[simulation.peak_instant]) for name, curve in category_curves(simulation).items()}
