"""Two traces of one model in, the first thing in which their steps differ besides sizes out: nothing, if only sizes do.

Traces with the same structure run the same ops in the same order on the same storages with the same lives, so that one can be
made of the others by changing numbers. Where a step branches on its batch (masks that are built for more than one example, a
dimension of size one that needs no copy) the structures differ, and that batch has to be traced by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from plimsoll.artifacts.region import RegionGraph
from plimsoll.artifacts.trace import RegionCall, Trace, TraceOp


def find_difference(one: Trace, other: Trace) -> str:
    """What is different, in words; empty if only sizes are."""
    if len(one.ops) != len(other.ops):
        return f"{len(one.ops)} ops against {len(other.ops)}{_first_op(one, other)}"
    for tick, (mine, theirs) in enumerate(zip(one.ops, other.ops, strict=True)):
        if msgspec.structs.replace(mine, cost_key="") != msgspec.structs.replace(theirs, cost_key=""):
            return f"op {tick} is {_name(mine)} against {_name(theirs)}"
        if not _same_spec(one, mine.cost_key, other, theirs.cost_key):
            return f"op {tick}, {mine.name} in {mine.module}, computes in another dtype"
    if _without_bytes(one.storages) != _without_bytes(other.storages):
        return f"{len(one.storages)} storages against {len(other.storages)}, or other lives of them"
    if one.parameters != other.parameters:
        return "other parameters"
    if len(one.regions) != len(other.regions):
        return f"{len(one.regions)} regions against {len(other.regions)}"
    for mine_region, their_region in zip(one.regions, other.regions, strict=True):
        if _bare_region(mine_region) != _bare_region(their_region):
            return f"the graph of {mine_region.name or 'the model'} saves or reads other tensors"
    return ""


def _first_op(one: Trace, other: Trace) -> str:
    pairs = zip(one.ops, other.ops, strict=False)
    first = next(((a, b) for a, b in pairs if (a.name, a.module) != (b.name, b.module)), None)
    return "" if first is None else f", first {_name(first[0])} against {_name(first[1])}"


def _name(op: TraceOp) -> str:
    return f"{op.name} in {op.module}" if op.module else op.name


def _same_spec(one: Trace, key: str, other: Trace, other_key: str) -> bool:
    mine, theirs = one.specs.get(key), other.specs.get(other_key)
    if mine is None or theirs is None:
        return mine is theirs
    return (mine.name, mine.dtype, mine.group) == (theirs.name, theirs.dtype, theirs.group)


def _without_bytes(sized: Sequence[Any]) -> list[Any]:
    return [msgspec.structs.replace(each, bytes=0) for each in sized]


def _bare_region(region: RegionCall) -> tuple[object, ...]:
    """A region call without sizes."""
    graph: RegionGraph = region.graph
    ops = [msgspec.structs.replace(op, cost_key="") for op in graph.ops]
    bare = (_without_bytes(graph.values), ops, graph.slots, graph.outputs, graph.backward_order)
    return (region.name, region.call, region.forward, region.backward, region.obstacle, bare)
