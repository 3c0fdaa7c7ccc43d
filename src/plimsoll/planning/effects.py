"""What one choice of one region adds to the step's memory and time; `measuring` finds it.

Regions that are *alike* (same graph, same ticks relative to their forward and backward, same storages held anyway) share
their effects, so a choice of 80 equal blocks is measured once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from plimsoll.planning.choice import Choice
from plimsoll.planning.step import Ints, RegionView, Span, StepIndex, merge, slot_stop


@dataclass(frozen=True, slots=True)
class RegionFrame:
    """The instants of one region: forward ``[entry, exit)``, backward ``[start, stop)`` with what is released late."""

    entry: int
    exit: int
    start: int
    stop: int


class Relief(NamedTuple):
    """Bytes that are not added between forward and backward for a while (negative: added besides).

    Start and stop count from the region's exit, or, with ``is_before_backward``, from the start of its backward: how far
    apart these two are differs between regions that are alike.
    """

    start: int
    stop: int
    size: int
    is_before_backward: bool = False

    def span(self, frame: RegionFrame) -> Span:
        """The instants of one region."""
        origin = frame.start if self.is_before_backward else frame.exit
        return origin + self.start, origin + self.stop


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """What one choice of one region adds to the fixed bytes.

    ``copied_bytes`` from the region's entry on, ``exit_bytes`` more at the last instant of its forward, ``retained_bytes``
    (copies included) between its forward and its backward, less the bytes of each ``relief`` while that storage is alive
    anyway, or while a transfer's source or buffer is there (then they are negative), ``backward`` per instant of its
    backward. ``seconds`` are those of replay and packing, ``squared_error`` and ``link_bytes`` as in a ``Simulation``.
    ``is_additive`` if these figures are exact beside any choices of other regions; otherwise they are no less than what the
    region adds.
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
    """The instants of a region in its step."""
    entry, exit_ = view.call.forward
    start, stop = view.call.backward
    stops = [2 * stop, *(slot_stop(index.trace, slot) for v in view.decided for slot in view.slots_of[v])]
    begin = max(2 * start, 2 * exit_)
    return RegionFrame(2 * entry, 2 * exit_, begin, max(begin, *stops))


def own_cover(index: StepIndex, frame: RegionFrame, storage: int) -> list[Span]:
    """When a storage is alive anyway, from the region's exit to the end of its backward."""
    return merge((max(a, frame.exit), min(b, frame.stop)) for a, b in index.covered(storage))


def is_between(frame: RegionFrame, spans: list[Span]) -> bool:
    """Whether one of the spans covers all the time between forward and backward."""
    return any(a <= frame.exit and b >= frame.start for a, b in spans)


def relief_spans(index: StepIndex, frame: RegionFrame, storage: int) -> list[Span]:
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
        for v in (*view.saved, *sorted(view.steady))
    )
    span = (frame.exit - frame.entry, frame.stop - frame.start)
    forms = (view.call.unpacks_at_once, *view.forms.items())
    return (program(view), forms, _windows(index, view), slots, covers, graph.outputs, span)


def program(view: RegionView) -> Hashable:
    """Equal for regions that run the same ops at the same costs and decide about the same values."""
    return structure(view), tuple(op.cost_key for op in view.graph.ops)


def structure(view: RegionView) -> Hashable:
    """Equal for regions that have the same choices, whatever these cost."""
    graph = view.graph
    ops = tuple((op.reads, op.writes, op.obstacle) for op in graph.ops)
    values = tuple((v.bytes, v.producer, v.origin.value) for v in graph.values)
    saved = tuple(slot.value for slot in graph.slots)
    forms = tuple((value, tuple(form.name for form in entry.forms)) for value, entry in view.forms.items())
    # Overrides belong to it: one block of many may be pinned, and its choices are not those of the others.
    pins = tuple(sorted(view.pins.items()))
    inputs = (view.copied, view.steady, view.free)
    return (view.droppable, view.movable, *inputs, ops, values, saved, graph.backward_order, forms, pins)


def _windows(index: StepIndex, view: RegionView) -> Hashable:
    """Where transfers of this region begin and end, and how much compute hides them."""
    after = index.neighbour(view.call.index)
    if after is None or not any(form.link_bytes for entry in view.forms.values() for form in entry.forms):
        return None
    call = view.call
    ticks = (after.forward[1] - call.forward[1], call.backward[0] - after.backward[0])
    return (ticks, tuple(round(seconds, 9) for seconds in index.transfer_windows(call, after)))


def held_bytes(index: StepIndex, view: RegionView) -> dict[int, int]:
    """Bytes that holding each decided value or copying each input adds between the region's forward and backward.

    An input that is held as it is adds none here: other regions may hold it too.
    """
    frame = frame_of(index, view)
    bytes_ = {}
    for value in view.decided:
        storage = view.graph.values[value].storage
        is_free = is_between(frame, own_cover(index, frame, storage))
        bytes_[value] = 0 if is_free else index.trace.storages[storage].bytes
    return bytes_ | {value: 0 if value in view.steady else view.graph.values[value].bytes for value in view.copied}
