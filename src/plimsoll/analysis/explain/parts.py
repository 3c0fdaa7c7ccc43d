"""Divides the memory of a peak into parts: state, activations, the head with the loss, and temporaries."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.artifacts.explained import MemoryPart
from plimsoll.artifacts.naming import plain_name, region_in_label
from plimsoll.artifacts.plan import Holder, Peak
from plimsoll.artifacts.trace import Category, Storage, Trace
from plimsoll.planning.describe import forward_end

SHARDED = ("parameters", "gradients", "optimizer state")
"""The names of the parts of a peak that sharded data parallelism divides among the ranks."""
STATE = "state"
_OTHER_STATE = "buffers and batch"
_LAYERS, _ELSEWHERE = "activations of the layers", "activations elsewhere"
_HEAD, _TEMPORARIES = "head and loss", "temporaries"
GROUP_OF = {
    **dict.fromkeys((*SHARDED, _OTHER_STATE), STATE),
    **dict.fromkeys((_LAYERS, _ELSEWHERE), "activations"),
    _HEAD: _HEAD,
    _TEMPORARIES: _TEMPORARIES,
}
"""Maps the name of each part of a peak, such as ``gradients``, to the name of its group, such as state."""


def parts_of_peak(trace: Trace, peak: Peak, regions: Sequence[str]) -> tuple[MemoryPart, ...]:
    """Return the bytes of each part at the peak, in the order of ``GROUP_OF``.

    The part ``head and loss`` has the tensors that are made between the end of the last region's forward and the start of
    backward through the regions (modules that the plan decides about): logits, the loss, and their gradients.
    """
    part_of_label = _part_of_label(trace, regions)
    held: dict[str, list[Holder]] = {part: [] for part in GROUP_OF}
    for holder in peak.holders:
        held[part_of_label.get(holder.label, _TEMPORARIES)].append(holder)
    bytes_of = {part: sum(holder.bytes for holder in holders) for part, holders in held.items()}
    return tuple(
        MemoryPart(
            name=part,
            bytes=bytes_of[part],
            share=bytes_of[part] / peak.bytes if peak.bytes else 0.0,
            largest=plain_name(holders[0].label) if holders and GROUP_OF[part] != STATE else "",
        )
        for part, holders in held.items()
    )


def _part_of_label(trace: Trace, regions: Sequence[str]) -> dict[str, str]:
    """Return a mapping from the label of each storage in the trace to the part of memory that it belongs to, such as
    ``gradients``.

    Labels of temporaries may be absent.
    """
    layers = {s.id for s in trace.storages if s.category is Category.ACTIVATION and _is_inside(s.label, regions)}
    start, end = _head_ticks(trace, [trace.storages[at] for at in layers])
    parts = {label: label for label in SHARDED} | {"buffers": _OTHER_STATE}
    for storage in trace.storages:
        if storage.category is Category.INPUT:
            part = _OTHER_STATE
        elif start <= storage.born < end:
            part = _HEAD
        elif storage.category is Category.ACTIVATION:
            part = _LAYERS if storage.id in layers else _ELSEWHERE
        else:
            part = _TEMPORARIES
        parts.setdefault(storage.label, part)
    return parts


def _head_ticks(trace: Trace, layers: Sequence[Storage]) -> tuple[int, int]:
    """Return the range of ops of the head and the loss: the positions of the first op and of the range's end.

    It begins at the end of the regions' forward and ends at the start of the regions' backward. ``layers`` are the regions'
    activations.
    """
    turn, ticks = forward_end(trace), len(trace.ops)
    if trace.regions:
        starts = [call.backward[0] for call in trace.regions if call.backward[0] >= 0]
        return max(call.forward[1] for call in trace.regions), min(starts, default=ticks)
    # A watched step does not list regions. Its ops of backward do not name modules, but backward frees what the regions saved.
    start = 1 + max((storage.born for storage in layers if storage.born < turn), default=-1)
    return start, min((storage.dies for storage in layers if storage.dies > turn), default=ticks)


def _is_inside(label: str, regions: Sequence[str]) -> bool:
    return "" in regions or bool(region_in_label(label, regions))
