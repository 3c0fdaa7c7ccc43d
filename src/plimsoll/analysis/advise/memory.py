"""Says what holds the unmanaged peak and what would lower it other than a plan, and measures every layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from plimsoll.artifacts.advice import Bottleneck, LayerUse, MemoryPart
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.explained import Change
from plimsoll.artifacts.plan import Holder, Plan
from plimsoll.artifacts.trace import Category, Phase, Trace
from plimsoll.units import format_bytes

LITTLE = 0.1
"""If recomputation can remove less than this share of the peak, activation management is not recommended."""
_LARGE = 0.25
"""Sharding is a remedy if the state is at least this share of the peak."""
_WORTHWHILE = 0.05
"""A change to the loss or the optimizer is a remedy if it lowers the peak by more than this share."""
_NOTHING = 0.005
"""If recomputation can remove less than this share, the summary says that it cannot lower the peak."""
_RANKS = 8
"""The number of ranks in the example of sharding."""

_SHARDED = ("parameters", "gradients", "optimizer state")
_OTHER_STATE = "buffers and batch"
_LAYERS, _ELSEWHERE = "activations of the layers", "activations elsewhere"
_HEAD, _TEMPORARIES = "head and loss", "temporaries"
_STATE = "state"
_GROUP_OF = {
    **dict.fromkeys((*_SHARDED, _OTHER_STATE), _STATE),
    **dict.fromkeys((_LAYERS, _ELSEWHERE), "activations"),
    _HEAD: _HEAD,
    _TEMPORARIES: _TEMPORARIES,
}
"""The group of every part of the peak."""


def find_bottleneck(trace: Trace, unmanaged: Plan, changes: Sequence[Change] = ()) -> Bottleneck:
    """Split the unmanaged peak into parts, name the largest group, and list remedies that are not plans.

    ``head and loss`` are the tensors that are made between the end of the last layer's forward and the start of backward
    through the layers: logits, the loss, and their gradients. ``unmanaged`` is the plan ``none``; its floor is the smallest
    peak that recomputation reaches. ``changes`` are changes to the loss and the optimizer, with their replayed peaks.
    """
    peak, part_of_label = unmanaged.baseline_peak, _part_of_label(trace)
    held: dict[str, list[Holder]] = {part: [] for part in _GROUP_OF}
    groups = dict.fromkeys(_GROUP_OF.values(), 0)
    for holder in peak.holders:
        part = part_of_label.get(holder.label, _TEMPORARIES)
        held[part].append(holder)
        groups[_GROUP_OF[part]] += holder.bytes
    bytes_of = {part: sum(holder.bytes for holder in holders) for part, holders in held.items()}
    largest = max(groups, key=lambda group: groups[group])
    found = Bottleneck(
        part=largest,
        peak_bytes=peak.bytes,
        floor_bytes=unmanaged.floor_bytes,
        moment=peak.moment,
        parts=tuple(
            MemoryPart(
                name=part,
                bytes=bytes_of[part],
                share=bytes_of[part] / peak.bytes,
                largest=holders[0].label if holders and _GROUP_OF[part] != _STATE else "",
            )
            for part, holders in held.items()
        ),
        summary="",
    )
    name = "state (parameters, gradients, optimizer)" if largest == _STATE else largest
    reach = (
        f"recomputation can lower it to {format_bytes(found.floor_bytes)}, by {found.reachable_share:.0%} at most"
        if found.reachable_share >= _NOTHING
        else "recomputation cannot lower it"
    )
    summary = (
        f"the largest part of the unmanaged peak of {format_bytes(peak.bytes)} is {name}: "
        f"{format_bytes(groups[largest])}, {groups[largest] / peak.bytes:.0%} ({peak.moment}); {reach}"
    )
    remedies = [
        f"{change.name}: {change.how}; this step {change.basis} with it peaks at "
        f"{format_bytes(change.predicted_peak_bytes)} instead of {format_bytes(peak.bytes)}"
        for change in changes
        if change.lowers_bytes > _WORTHWHILE * peak.bytes
    ]
    if groups[_STATE] >= _LARGE * peak.bytes:
        sharded_bytes = sum(bytes_of[part] for part in _SHARDED)
        remedies.append(
            f"sharding (FSDP, ZeRO-3): over {_RANKS} ranks {format_bytes(sharded_bytes)} of parameters, gradients and "
            f"optimizer state become {format_bytes(sharded_bytes / _RANKS)} each"
        )
    return msgspec.structs.replace(found, summary=summary, remedies=tuple(remedies))


def _part_of_label(trace: Trace) -> dict[str, str]:
    """The part of the peak for each label in it, except labels of temporaries."""
    start = max((call.forward[1] for call in trace.regions), default=0)
    end = min((call.backward[0] for call in trace.regions if call.backward[0] >= 0), default=len(trace.ops))
    parts = {label: label for label in _SHARDED} | {"buffers": _OTHER_STATE}
    for storage in trace.storages:
        if storage.category is Category.INPUT:
            part = _OTHER_STATE
        elif storage.region < 0 and start <= storage.born < end:
            part = _HEAD
        elif storage.category is Category.ACTIVATION:
            part = _LAYERS if storage.region >= 0 else _ELSEWHERE
        else:
            part = _TEMPORARIES
        parts.setdefault(storage.label, part)
    return parts


def measure_layers(trace: Trace, costs: Costs, unmanaged: Plan) -> tuple[LayerUse, ...]:
    """For every region call, the bytes that it saves for backward, and the seconds of its forward and backward.

    ``unmanaged`` is the plan ``none``, which keeps everything that autograd saves.
    """
    seconds: defaultdict[tuple[int, Phase], float] = defaultdict(float)
    for op in trace.ops:
        seconds[op.region, op.phase] += costs.seconds_of(op.cost_key)
    return tuple(
        LayerUse(
            name=call.name,
            call=call.call,
            saved_bytes=region.retained_bytes,
            forward_seconds=seconds[call.index, Phase.FORWARD],
            backward_seconds=seconds[call.index, Phase.BACKWARD],
        )
        for call, region in zip(trace.regions, unmanaged.regions, strict=True)
    )
