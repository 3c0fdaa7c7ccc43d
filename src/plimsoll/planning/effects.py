"""Data about what one choice of one region (module call) adds to the step's memory and time; `measuring` computes it.

A choice says which saved values a region keeps, recomputes, compresses or offloads. Two regions are *alike* if they have the
same graph, the same ticks (positions among the ops) relative to their forward and backward, and the same storages alive in any
case. Alike regions share their effects, so a choice of 80 equal blocks is measured once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from plimsoll.planning.choice import Choice
from plimsoll.planning.step import Ints, RegionView, Span, StepIndex, merge, slot_stop


@dataclass(frozen=True, slots=True)
class RegionFrame:
    """Data: when one region runs, in instants: its forward ``[entry, exit)``, and its backward ``[start, stop)``.

    An instant is a moment before or during an op. The backward ends when the last of the region's saved tensors is released,
    which may be late.
    """

    entry: int
    exit: int
    start: int
    stop: int


class Relief(NamedTuple):
    """Data: bytes (``size``) that a choice (what to keep or recompute) does not add for a part of the time between forward and
    backward.

    They are in memory then under any plan. A negative size means that the choice adds more then.

    Start and stop count from the end of the region's forward, or, with ``is_before_backward``, from the start of its backward.
    The time between these two differs between regions that are alike.
    """

    start: int
    stop: int
    size: int
    is_before_backward: bool = False

    def span(self, frame: RegionFrame) -> Span:
        """Return when this relief applies in the step of a given region: the first instant, and the first instant after it.

        A relief is a number of bytes that a choice does not add for a part of the time between forward and backward.
        """
        origin = frame.start if self.is_before_backward else frame.exit
        return origin + self.start, origin + self.stop


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """Data: what one choice of one region adds to the bytes that no decision changes, and to the step's time.

    ``copied_bytes`` are added from the region's first instant on, and ``exit_bytes`` in addition at the last instant of its
    forward. ``retained_bytes`` (copies included) are added between its forward and its backward, and ``backward`` has the bytes
    for each instant of its backward. ``relief`` lists what to subtract from ``retained_bytes`` while a storage is alive anyway;
    its entries are negative while the source or the buffer of a transfer is on the device. ``seconds`` is the time of
    recomputation, encoding, decoding and waiting. ``squared_error`` is the squared relative gradient error, ``link_bytes`` are
    the bytes offloaded. If ``is_additive``, these figures are exact whatever other regions choose; otherwise the region adds at
    most this much.
    """

    choice: Choice
    copied_bytes: int
    exit_bytes: int
    retained_bytes: int
    relief: tuple[Relief, ...]
    backward: Ints
    seconds: float
    is_additive: bool
    squared_error: float = 0.0
    link_bytes: int = 0


def frame_of(index: StepIndex, view: RegionView) -> RegionFrame:
    """Return when a region runs in its step: the instants of the region's forward and backward.

    An instant is a moment before or during an op.
    """
    entry, exit_ = view.call.forward
    start, stop = view.call.backward
    stops = [2 * stop, *(slot_stop(index.trace, slot) for v in view.decided for slot in view.slots_of[v])]
    begin = max(2 * start, 2 * exit_)
    return RegionFrame(2 * entry, 2 * exit_, begin, max(begin, *stops))


def own_cover(index: StepIndex, frame: RegionFrame, storage: int) -> list[Span]:
    """Return the spans of instants at which a storage is alive under any plan, within the time of one region.

    This time is from the end of the region's forward to the end of its backward.
    """
    return merge((max(a, frame.exit), min(b, frame.stop)) for a, b in index.covered(storage))


def is_between(frame: RegionFrame, spans: list[Span]) -> bool:
    """Return True if one of the spans covers all the time between the forward and the backward of a region."""
    return any(a <= frame.exit and b >= frame.start for a, b in spans)


def relief_spans(index: StepIndex, frame: RegionFrame, storage: int) -> list[Span]:
    """Return the spans, between forward and backward of a region, at which a storage is alive under any plan.

    Holding the storage then adds no bytes. The result is empty if the storage is alive all that time.
    """
    covered = own_cover(index, frame, storage)
    return [] if is_between(frame, covered) else merge((a, min(b, frame.start)) for a, b in covered)


def likeness(index: StepIndex, view: RegionView) -> Hashable:
    """Return a key that is equal for two regions if equal choices add equal memory and time in both.

    So the effects of choices have to be measured only once for such regions.
    """
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
        for v in (*view.saved, *sorted(view.steady))
    )
    span = (frame.exit - frame.entry, frame.stop - frame.start)
    forms = (view.call.unpacks_at_once, *view.forms.items())
    return (program(view), forms, _windows(index, view), slots, covers, graph.outputs, span)


def program(view: RegionView) -> Hashable:
    """Return a key that is equal for two regions if they run the same ops at the same costs and decide about equal values."""
    return structure(view), tuple(op.cost_key for op in view.graph.ops)


def structure(view: RegionView) -> Hashable:
    """Return a key that is equal for two regions if they have the same possible choices, whatever the choices cost."""
    graph = view.graph
    ops = tuple((op.reads, op.writes, op.obstacle) for op in graph.ops)
    values = tuple((v.bytes, v.producer, v.origin.value) for v in graph.values)
    saved = tuple(slot.value for slot in graph.slots)
    forms = tuple((value, tuple(form.name for form in entry.forms)) for value, entry in view.forms.items())
    # Overrides are part of the key: a pinned block has other choices than equal blocks without the pin.
    pins = tuple(sorted(view.pins.items()))
    inputs = (view.copied, view.steady, view.free)
    return (view.droppable, view.movable, *inputs, ops, values, saved, graph.backward_order, forms, pins)


def _windows(index: StepIndex, view: RegionView) -> Hashable:
    """Return a key that is equal for regions whose transfers make the step wait equally long.

    It says when transfers over the link to host memory or disk begin and end, and how many seconds of compute hide them.
    ``None`` if the region cannot offload anything.
    """
    after = index.neighbour(view.call.index)
    if after is None or not any(form.link_bytes for entry in view.forms.values() for form in entry.forms):
        return None
    call = view.call
    ticks = (after.forward[1] - call.forward[1], call.backward[0] - after.backward[0])
    return (ticks, tuple(round(seconds, 9) for seconds in index.transfer_windows(call, after)))


def held_bytes(index: StepIndex, view: RegionView) -> dict[int, int]:
    """Return a mapping from each value of a region to the bytes that holding it adds between forward and backward.

    It contains the values that are decided about, and the inputs that would be copied. An input that forward does not write to
    any more adds 0 here: it is held without a copy, and other regions may hold it too.
    """
    frame = frame_of(index, view)
    bytes_ = {}
    for value in view.decided:
        storage = view.graph.values[value].storage
        is_free = is_between(frame, own_cover(index, frame, storage))
        bytes_[value] = 0 if is_free else index.trace.storages[storage].bytes
    return bytes_ | {value: 0 if value in view.steady else view.graph.values[value].bytes for value in view.copied}
