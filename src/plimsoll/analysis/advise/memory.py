"""Classifies the memory of the unmanaged peak, lists remedies, and finds out whether attention saves its matrix.

A fused attention kernel (flash, memory-efficient, cuDNN) saves per-row sums and rebuilds the matrix in its own backward. So a
plan that recomputes its output runs the product once more in addition. Attention that is written as separate ops saves the
softmax of every score, whose bytes grow with the square of the sequence length.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import msgspec

from plimsoll.artifacts.advice import Bottleneck, LayerUse, MemoryPart
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Holder, Plan
from plimsoll.artifacts.region import RegionGraph
from plimsoll.artifacts.trace import Category, Phase, Trace
from plimsoll.units import format_bytes

LITTLE = 0.1
"""If recomputation can remove less than this share of the peak, activation management is not recommended."""
_LARGE = 0.25
"""Remedies are listed for a group that holds at least this share of the peak."""
_NOTHING = 0.005
"""If recomputation can remove less than this share, the summary says that it cannot lower the peak."""
_WORTH_CHUNKING = 0.05
"""The chunked loss is listed as a remedy if it lowers the peak by more than this share."""
_RANKS = 8
"""The number of ranks in the example of sharding."""
_CHUNKS = 8
"""The number of chunks in the example of a chunked loss."""

_PARAMETERS, _GRADIENTS, _OPTIMIZER = "parameters", "gradients", "optimizer state"
_OTHER_STATE = "buffers and batch"
_LAYERS, _ELSEWHERE = "activations of the layers", "activations elsewhere"
_HEAD, _TEMPORARIES = "head and loss", "temporaries"
STATE, ACTIVATIONS = "state", "activations"
GROUPS = {
    _PARAMETERS: STATE,
    _GRADIENTS: STATE,
    _OPTIMIZER: STATE,
    _OTHER_STATE: STATE,
    _LAYERS: ACTIVATIONS,
    _ELSEWHERE: ACTIVATIONS,
    _HEAD: _HEAD,
    _TEMPORARIES: _TEMPORARIES,
}
"""The group of every part of the peak."""
FUSED = "scaled_dot_product"
_SOFTMAX = ("_softmax", "_safe_softmax", "softmax")
_PRODUCTS = ("bmm", "mm", "matmul", "baddbmm", "addmm")
_FURTHEST = 5
"""The most ops from the softmax to the product with the values, counting the product (dropout, casts, copies between)."""


def find_bottleneck(trace: Trace, unmanaged: Plan, *, chunked_peak_bytes: int | None = None) -> Bottleneck:
    """Split the unmanaged peak into parts, and name the largest group.

    ``head and loss`` are the tensors that are made between the end of the last layer's forward and the start of backward
    through the layers: logits, the loss, and their gradients. ``unmanaged`` is the plan ``none``; its floor is the smallest
    peak that recomputation reaches. ``chunked_peak_bytes`` is ``None`` if no head was found whose loss can be chunked.
    """
    peak = unmanaged.baseline_peak
    places = _places(trace)
    holders: dict[str, list[Holder]] = {name: [] for name in GROUPS}
    for holder in peak.holders:
        holders[_STATE_LABELS.get(holder.label) or places.get(holder.label, _TEMPORARIES)].append(holder)
    parts = tuple(
        MemoryPart(
            name=name,
            bytes=sum(h.bytes for h in found),
            share=sum(h.bytes for h in found) / peak.bytes if peak.bytes else 0.0,
            largest="" if GROUPS[name] == STATE or not found else found[0].label,
        )
        for name, found in holders.items()
    )
    groups = _group_bytes(parts)
    part = max(groups, key=lambda name: groups[name])
    found = Bottleneck(
        part=part,
        peak_bytes=peak.bytes,
        floor_bytes=unmanaged.floor_bytes,
        moment=peak.moment,
        parts=parts,
        summary="",
    )
    reach = (
        f"recomputation can lower it to {format_bytes(unmanaged.floor_bytes)}, by {found.reachable_share:.0%} at most"
        if found.reachable_share >= _NOTHING
        else "recomputation cannot lower it"
    )
    share = groups[part] / peak.bytes if peak.bytes else 0.0
    name = "state (parameters, gradients, optimizer)" if part == STATE else part
    summary = (
        f"the largest part of the unmanaged peak of {format_bytes(peak.bytes)} is {name}: "
        f"{format_bytes(groups[part])}, {share:.0%} ({peak.moment}); {reach}"
    )
    return msgspec.structs.replace(found, summary=summary, remedies=_remedies(found, groups, chunked_peak_bytes))


def _group_bytes(parts: tuple[MemoryPart, ...]) -> dict[str, int]:
    """Bytes per group: state, activations, head and loss, temporaries."""
    groups = dict.fromkeys(GROUPS.values(), 0)
    for part in parts:
        groups[GROUPS[part.name]] += part.bytes
    return groups


_STATE_LABELS = {
    "parameters": _PARAMETERS,
    "gradients": _GRADIENTS,
    "optimizer state": _OPTIMIZER,
    "buffers": _OTHER_STATE,
}
"""A peak's labels for memory that stays allocated during the whole step."""


def _places(trace: Trace) -> dict[str, str]:
    """The part of the peak for each label of a single storage."""
    start = max((call.forward[1] for call in trace.regions), default=0)
    ends = [call.backward[0] for call in trace.regions if call.backward[0] >= 0]
    end = min(ends, default=len(trace.ops))
    places: dict[str, str] = {}
    for storage in trace.storages:
        if storage.category is Category.INPUT:
            part = _OTHER_STATE
        elif storage.region < 0 and start <= storage.born < end:
            part = _HEAD
        elif storage.category is Category.ACTIVATION:
            part = _LAYERS if storage.region >= 0 else _ELSEWHERE
        else:
            part = _TEMPORARIES
        places.setdefault(storage.label, part)
    return places


def _remedies(found: Bottleneck, groups: dict[str, int], chunked_peak_bytes: int | None) -> tuple[str, ...]:
    """Remedies for the groups that activation management does not reduce, with replayed or computed figures."""
    bytes_of = {part.name: part.bytes for part in found.parts}
    lines = []
    state, optimizer = groups[STATE], bytes_of[_OPTIMIZER]
    if state >= _LARGE * found.peak_bytes:
        if optimizer:
            lines.append(
                f"optimizer: its state takes {format_bytes(optimizer)}; with 8 bits per number instead of 32 it would take "
                f"{format_bytes(optimizer / 4)}"
            )
        shared = sum(bytes_of[name] for name in (_PARAMETERS, _GRADIENTS, _OPTIMIZER))
        lines.append(
            f"sharding (FSDP, ZeRO-3): over {_RANKS} ranks {format_bytes(shared)} of parameters, gradients and optimizer "
            f"state become {format_bytes(shared / _RANKS)} each"
        )
    if chunked_peak_bytes is not None and found.peak_bytes - chunked_peak_bytes > _WORTH_CHUNKING * found.peak_bytes:
        lines.append(
            "chunked loss: plimsoll.chunked.chunk_loss(model) never holds all logits, with the same gradients; this step "
            f"replayed with it peaks at {format_bytes(chunked_peak_bytes)} instead of {format_bytes(found.peak_bytes)}"
        )
    elif groups[_HEAD] >= _LARGE * found.peak_bytes:
        lines.append(
            f"chunked loss: logits and loss computed in {_CHUNKS} chunks would hold about "
            f"{format_bytes(groups[_HEAD] / _CHUNKS)} instead of {format_bytes(groups[_HEAD])}"
        )
    if groups[_TEMPORARIES] >= _LARGE * found.peak_bytes:
        largest = next(part.largest for part in found.parts if part.name == _TEMPORARIES)
        where = (
            "the optimizer's step: fused=True, or foreach=False, makes fewer copies"
            if found.moment.startswith(Phase.OPTIMIZER.value)
            else f"of which {largest} is the largest: a fused kernel, or a smaller micro-batch, would hold less"
        )
        lines.append(f"temporaries: {format_bytes(groups[_TEMPORARIES])} {where}")
    return tuple(lines)


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


@dataclass(frozen=True, slots=True)
class AttentionUse:
    """How many fused attention calls forward makes, and how many attention matrices autograd saves, with their bytes."""

    fused_calls: int
    matrices: int
    matrix_bytes: int
    example: str


def find_attention(trace: Trace) -> AttentionUse:
    """Count fused attention and materialised attention matrices over all layers."""
    fused = matrices = matrix_bytes = 0
    example = ""
    for call in trace.regions:
        graph = call.graph
        fused += sum(FUSED in op.name for op in graph.ops)
        saved = {slot.value for slot in graph.slots if slot.is_managed}
        for value in _matrices(graph):
            if value in saved:
                matrices += 1
                matrix_bytes += graph.values[value].bytes
                example = example or f"{call.name}.{graph.values[value].name}"
    return AttentionUse(fused, matrices, matrix_bytes, example)


def _matrices(graph: RegionGraph) -> set[int]:
    """Softmax results that reach a matrix product, and the large values on the way to it, such as dropout's output."""
    found: set[int] = set()
    for op in graph.ops:
        if op.name not in _SOFTMAX:
            continue
        reached, frontier = set(op.writes), set(op.writes)
        for _ in range(_FURTHEST):
            readers = [other for other in graph.ops if frontier & set(other.reads)]
            if any(other.name in _PRODUCTS for other in readers):
                size = graph.values[op.writes[0]].bytes
                found |= {value for value in reached if graph.values[value].bytes >= size // 4}
                break
            frontier = {value for other in readers for value in other.writes}
            reached |= frontier
    return found
