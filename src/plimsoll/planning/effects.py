"""One region and one set of kept values in, what it adds to the step's memory and time out, relative to the region itself.

Regions that are *alike* (same graph, same ticks relative to their forward and backward, same storages held anyway) share
their effects, so a choice of 80 equal blocks is replayed once. The bytes come from ``replay``, the code of the simulator.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from plimsoll.planning.replay import replay
from plimsoll.planning.simulate import Choice, replay_seconds
from plimsoll.planning.step import Ints, RegionView, Span, StepIndex, merge, slot_stop, subtract


@dataclass(frozen=True, slots=True)
class Frame:
    """The instants of one region: forward ``[entry, exit)``, backward ``[start, stop)`` with what is released late."""

    entry: int
    exit: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """What one choice of one region adds to the fixed bytes.

    ``copied_bytes`` from the region's entry on, ``retained_bytes`` (copies included) between its forward and its backward,
    less the bytes of each ``relief`` (start and stop counted from the region's exit) while that storage is alive anyway,
    ``backward`` per instant of its backward. ``seconds`` are those of replay. ``is_additive`` if these figures are exact
    beside any choices of other regions; otherwise they are no less than what the region adds.
    """

    kept: frozenset[int]
    copied_bytes: int
    retained_bytes: int
    relief: tuple[tuple[int, int, int], ...]
    backward: Ints
    seconds: float
    is_additive: bool


def frame_of(index: StepIndex, view: RegionView) -> Frame:
    """The instants of a region in its step."""
    entry, exit_ = view.call.forward
    start, stop = view.call.backward
    stops = [2 * stop, *(slot_stop(index.trace, slot) for v in view.droppable for slot in view.slots_of[v])]
    begin = max(2 * start, 2 * exit_)
    return Frame(2 * entry, 2 * exit_, begin, max(begin, *stops))


def own_cover(index: StepIndex, frame: Frame, storage: int) -> list[Span]:
    """When a storage is alive anyway, from the region's exit to the end of its backward."""
    return merge((max(a, frame.exit), min(b, frame.stop)) for a, b in index.covered(storage))


def is_between(frame: Frame, spans: list[Span]) -> bool:
    """Whether one of the spans covers all the time between forward and backward."""
    return any(a <= frame.exit and b >= frame.start for a, b in spans)


def relief_spans(index: StepIndex, frame: Frame, storage: int) -> list[Span]:
    """When, between forward and backward, a storage that is not alive all that time is alive anyway."""
    covered = own_cover(index, frame, storage)
    return [] if is_between(frame, covered) else merge((a, min(b, frame.start)) for a, b in covered)


def likeness(index: StepIndex, view: RegionView) -> Hashable:
    """Equal for regions whose choices have equal effects."""
    frame = frame_of(index, view)
    graph = view.graph

    def relative(instant: int) -> tuple[str, int]:
        return ("b", instant - frame.start) if instant >= frame.start else ("f", instant - frame.entry)

    slots = tuple(
        (slot.value, slot.index, relative(2 * slot.unpacked), relative(slot_stop(index.trace, slot)))
        for slot in graph.slots
        if slot.is_managed
    )
    covers = tuple(
        tuple((relative(a), relative(b)) for a, b in own_cover(index, frame, graph.values[v].storage))
        for v in view.saved
    )
    keys = tuple((op.cost_key, op.reads, op.writes, op.obstacle) for op in graph.ops)
    values = tuple((v.bytes, v.producer, v.origin.value) for v in graph.values)
    span = (frame.exit - frame.entry, frame.stop - frame.start)
    return (view.droppable, view.copied, slots, covers, keys, values, graph.backward_order, graph.outputs, span)


def held_bytes(index: StepIndex, view: RegionView) -> dict[int, int]:
    """Bytes that holding each droppable value or copying each input adds between the region's forward and backward."""
    frame = frame_of(index, view)
    bytes_ = {}
    for value in view.droppable:
        storage = view.graph.values[value].storage
        is_free = is_between(frame, own_cover(index, frame, storage))
        bytes_[value] = 0 if is_free else view.graph.values[value].bytes
    return bytes_ | {value: view.graph.values[value].bytes for value in view.copied}


def measure_effect(index: StepIndex, view: RegionView, kept: frozenset[int]) -> Effect:
    """Replay one choice of one region alone.

    Raises:
        Unreachable: a dropped value cannot be rebuilt.
    """
    frame = frame_of(index, view)
    region = view.call.index
    outcome = replay(index, {region: kept}, {})
    length = frame.stop - frame.start
    change = np.zeros(length + 1, dtype=np.int64)
    retained = 0
    copied = 0
    is_additive = True
    relief: list[tuple[int, int, int]] = []
    own = {view.graph.values[v].storage for v in view.droppable}
    for storage, spans in outcome.holds.items():
        size = index.trace.storages[storage].bytes
        clipped = merge((max(a, frame.exit), b) for a, b in spans)
        covered = own_cover(index, frame, storage)
        for a, b in subtract(clipped, covered):
            is_additive &= storage in own
            change[min(max(a - frame.start, 0), length)] += size
            change[min(max(b - frame.start, 0), length)] -= size
        if is_between(frame, clipped) and not is_between(frame, covered):
            retained += size
            relief += [(a - frame.exit, b - frame.exit, size) for a, b in relief_spans(index, frame, storage)]
    for (_, b), size, _ in outcome.copies:
        copied += size
        change[0] += size
        change[min(max(b - frame.start, 0), length)] -= size
    curve = np.cumsum(change)[:-1]
    _add_rebuilt(curve, outcome.levels, frame)
    seconds = replay_seconds(index, {region: Choice(kept=kept)}, outcome.ops)
    return Effect(kept, copied, retained + copied, tuple(sorted(relief)), curve, seconds, is_additive)


def _add_rebuilt(curve: Ints, levels: list[tuple[int, int]], frame: Frame) -> None:
    last = dict(levels)
    instants = sorted(last)
    for instant, following in zip(instants, [*instants[1:], frame.stop][: len(instants)], strict=True):
        if last[instant]:
            curve[max(instant - frame.start, 0) : max(following - frame.start, 0)] += last[instant]
