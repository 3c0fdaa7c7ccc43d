"""Predicts the trace of a model at one batch size from its traces at a few other sizes, exactly.

For a traced batch, its own trace is returned. For others, the bytes of every storage and value, and the arithmetic, moved bytes
and workspace of every op, follow from an expression through the traced sizes (see ``expressions``). Ops keep their order and
storages their lives. Cost keys contain sizes, so the ops of a predicted trace get new keys.

Only traces of the same structure can be used: the same ops in the same order on the same storages with the same lives, so that
they differ only in numbers. A step may branch on its batch (a mask built only for more than one example, a dimension of size
one that does not need a copy). Then the structures differ, and that batch has to be traced by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, Generic, TypeVar

import msgspec

from plimsoll.artifacts.costs import Costs, OpCost
from plimsoll.artifacts.region import RegionGraph, RegionOp
from plimsoll.artifacts.trace import Category, OpSpec, RegionCall, Storage, Trace, TraceOp
from plimsoll.planning.expressions import Dimensions, Expression, Fitter, Sizes, same_structure

S = TypeVar("S", bound=Sizes)


class Family(Generic[S]):
    """One model at many sizes of its batch.

    The members are the traces with the structure of the largest batch; ``strays`` says how every other trace differs.
    """

    def __init__(self, traces: Mapping[S, Trace]) -> None:
        assert traces, "a family has at least one trace"
        self._traces = dict(traces)
        self.strays: dict[S, str] = {}
        largest = max(traces, key=lambda shape: (prod(shape), shape))
        for shape in sorted(traces):
            if difference := stray_because((shape, traces[shape]), (largest, traces[largest])):
                self.strays[shape] = difference
        self._shapes = tuple(shape for shape in sorted(traces) if shape not in self.strays)
        self._members = _with_equal_buffers([traces[shape] for shape in self._shapes])
        self._traces |= zip(self._shapes, self._members, strict=True)
        self.dimensions = Dimensions(self._shapes)
        self._fitter = Fitter(self.dimensions.points)
        self._keys = self._name_ops()

    @property
    def shapes(self) -> tuple[S, ...]:
        """The traced shapes that share one structure."""
        return self._shapes

    def covers(self, shape: S) -> bool:
        """True if a shape was traced, or its trace can be predicted, even if only by estimates."""
        return shape in self._traces or (len(self._shapes) > 1 and self.dimensions.can_tell(shape))

    def knows(self, shape: S) -> bool:
        """True if every storage size at a shape is exact."""
        return shape in self._traces or (self.covers(shape) and self.is_exact)

    @property
    def is_exact(self) -> bool:
        """True if every storage size follows exactly from the dimensions."""
        return not self._estimates

    def traced(self, shape: S) -> Trace | None:
        """The trace made at this shape; None if the shape was not traced."""
        return self._traces.get(shape)

    def at(self, shape: S) -> Trace:
        """The trace of a shape: its own trace if it was traced, else a predicted one."""
        assert self.covers(shape)
        known = self._traces.get(shape)
        return known if known is not None else self.alike(shape)

    def inexact_bytes(self, shape: S) -> int:
        """Bytes of storages at a shape whose sizes are estimates."""
        dimensions = self.dimensions.of(shape)
        return 0 if shape in self._traces else sum(each.at(dimensions) for each in self._estimates)

    @cached_property
    def _estimates(self) -> tuple[Expression, ...]:
        return tuple(each for each in self.storage_sizes() if not each.is_known)

    def storage_sizes(self) -> Iterator[Expression]:
        """The expression of every storage's bytes."""
        for each in zip(*(trace.storages for trace in self._members), strict=True):
            yield self._fitter.fit(tuple(storage.bytes for storage in each))

    def workspaces(self) -> Iterator[Expression]:
        """For every kind of operation, the bytes that it allocates and frees internally.

        They are often estimates, because kernels choose their block sizes.
        """
        for keys in self._keys:
            yield self._workspace(keys)

    def _workspace(self, keys: tuple[str, ...]) -> Expression:
        return self._fitter.fit(tuple(t.workspaces.get(key, 0) for t, key in zip(self._members, keys, strict=True)))

    def seconds_at(self, shape: S, known: Mapping[S, Costs]) -> Costs:
        """Costs of the trace at another shape, interpolated between costs that were measured at traced shapes.

        An op's seconds are assumed to be piecewise linear in its work (arithmetic and moved bytes). Beyond the largest
        measured work they continue with the last slope. ``known`` are the costs by traced shape, at least one.
        """
        measured = [(place, known[s]) for place, s in enumerate(self._shapes) if s in known]
        assert measured, "there are no costs to interpolate between"
        suffix = _suffix(shape)
        ops: dict[str, OpCost] = {}
        for keys, name in self._keys.items():
            work = _work(self._spec(keys, shape))
            samples = []
            for place, costs in measured:
                spec, cost = self._members[place].specs.get(keys[place]), costs.ops.get(keys[place])
                if spec is not None and cost is not None:
                    samples.append((_work(spec), cost.seconds))
            if samples:
                key = keys[self._shapes.index(shape)] if shape in self._shapes else name + suffix
                ops[key] = OpCost(seconds=_interpolate(samples, work))
        nearest = min((place for place, _ in measured), key=lambda place: abs(prod(self._shapes[place]) - prod(shape)))
        return msgspec.structs.replace(known[self._shapes[nearest]], ops=ops)

    def _name_ops(self) -> dict[tuple[str, ...], str]:
        """A name for every combination of the cost keys of one op in all members."""
        names: dict[tuple[str, ...], str] = {}
        for together in zip(*map(_costed_ops, self._members), strict=True):
            keys = tuple(op.cost_key for op in together)
            names.setdefault(keys, f"{together[0].name}#{len(names)}")
        return names

    def _number(self, values: Iterable[int], shape: S) -> int:
        """Predict a number at a shape from its values at the members' shapes."""
        return self._fitter.fit(tuple(values)).at(self.dimensions.of(shape))

    def _resized(self, sized: Sequence[Sequence[Any]], shape: S) -> tuple[Any, ...]:
        """Storages or values of the first member, with their bytes at a shape."""
        return tuple(
            msgspec.structs.replace(each[0], bytes=self._number((one.bytes for one in each), shape))
            for each in zip(*sized, strict=True)
        )

    def _spec(self, keys: tuple[str, ...], shape: S) -> OpSpec:
        specs = [trace.specs[key] for trace, key in zip(self._members, keys, strict=True)]
        if shape in self._shapes:
            return specs[self._shapes.index(shape)]
        return msgspec.structs.replace(
            specs[0],
            flops=self._number((spec.flops for spec in specs), shape),
            moved_bytes=self._number((spec.moved_bytes for spec in specs), shape),
        )

    def alike(self, shape: S) -> Trace:
        """The predicted trace of a shape, if its step has the members' structure."""
        first, suffix = self._members[0], _suffix(shape)
        names = {keys: name + suffix for keys, name in self._keys.items()}
        dimensions = self.dimensions.of(shape)
        workspaces = {name: self._workspace(keys).at(dimensions) for keys, name in names.items()}
        return msgspec.structs.replace(
            first,
            signature=f"a micro-batch of {shape}, not traced but predicted from {', '.join(map(str, self._shapes))}",
            ops=_renamed([trace.ops for trace in self._members], names),
            specs={name: self._spec(keys, shape) for keys, name in names.items() if keys[0] in first.specs},
            storages=self._resized([trace.storages for trace in self._members], shape),
            regions=tuple(
                self._region(each, shape, names) for each in zip(*(t.regions for t in self._members), strict=True)
            ),
            timings={},
            workspaces={name: size for name, size in workspaces.items() if size},
        )

    def _region(self, calls: tuple[RegionCall, ...], shape: S, names: Mapping[tuple[str, ...], str]) -> RegionCall:
        graphs: list[RegionGraph] = [call.graph for call in calls]
        graph = msgspec.structs.replace(
            graphs[0],
            values=self._resized([each.values for each in graphs], shape),
            ops=_renamed([each.ops for each in graphs], names),
        )
        kind = hashlib.sha256(f"{[call.kind for call in calls]}{shape}".encode()).hexdigest()[:16]
        return msgspec.structs.replace(calls[0], kind=kind, graph=graph)


def _costed_ops(trace: Trace) -> Iterator[TraceOp | RegionOp]:
    """All ops of the step and of its regions: an op of a compiled region may be part of another kernel in the step."""
    yield from trace.ops
    for call in trace.regions:
        yield from call.graph.ops


def _renamed(ops: Sequence[Sequence[Any]], names: Mapping[tuple[str, ...], str]) -> tuple[Any, ...]:
    """Ops of the first member with new cost keys."""
    return tuple(
        msgspec.structs.replace(each[0], cost_key=names[tuple(op.cost_key for op in each)])
        for each in zip(*ops, strict=True)
    )


def _suffix(shape: Sizes) -> str:
    return f"@{'x'.join(map(str, shape))}"


def _work(spec: OpSpec) -> int:
    """The work of an op as one number that grows with its shape."""
    return spec.flops + spec.moved_bytes


def _interpolate(samples: list[tuple[int, float]], work: int) -> float:
    """Piecewise linear between samples of (work, seconds) and beyond them; never negative, and never falling past the last."""
    points: dict[int, float] = {}
    for each, seconds in sorted(samples):
        points[each] = max(points.get(each, 0.0), seconds)
    works = list(points)
    if len(works) == 1:
        return points[works[0]] * (work / works[0] if works[0] else 1.0)
    place = next((i for i, each in enumerate(works[1:], 1) if work <= each), len(works) - 1)
    low, high = works[place - 1], works[place]
    slope = (points[high] - points[low]) / (high - low)
    if work > high:
        slope = max(slope, 0.0)
    return max(points[high] + slope * (work - high), 0.0)


def stray_because(one: tuple[Sizes, Trace], other: tuple[Sizes, Trace]) -> str:
    """Say why two traces, each with its shape, belong to different families; empty if they belong to the same one."""
    found = "" if one[0] == other[0] else find_difference(one[1], other[1])
    return (
        found
        if found or same_structure(one[0], other[0])
        else "a size is 0 or 1, and such sizes may run other operations"
    )


def find_difference(one: Trace, other: Trace) -> str:
    """Describe the first difference in structure; empty if only sizes differ."""
    if len(one.ops) != len(other.ops):
        return f"{len(one.ops)} ops against {len(other.ops)}{_first_op(one, other)}"
    for tick, (mine, theirs) in enumerate(zip(one.ops, other.ops, strict=True)):
        if msgspec.structs.replace(mine, cost_key="") != msgspec.structs.replace(theirs, cost_key=""):
            return f"op {tick} is {_name(mine)} against {_name(theirs)}"
        if not _same_spec(one, mine.cost_key, other, theirs.cost_key):
            return f"op {tick}, {mine.name} in {mine.module}, computes in another dtype"
    if _bare_storages(one) != _bare_storages(other):
        return f"{len(one.storages)} storages against {len(other.storages)}, or storages with other lifetimes"
    if one.parameters != other.parameters:
        return "the parameters differ"
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


def _with_equal_buffers(members: list[Trace]) -> list[Trace]:
    """Traces of one structure; buffers of collectives live as long in all of them as in the trace that freed them last.

    The backend's threads free these buffers, at moments that differ from run to run.
    """
    last = [max(each.dies for each in together) for together in zip(*(t.storages for t in members), strict=True)]
    found = [tuple(map(_until, trace.storages, last)) for trace in members]
    pairs = zip(members, found, strict=True)
    return [trace if each == trace.storages else msgspec.structs.replace(trace, storages=each) for trace, each in pairs]


def _until(storage: Storage, dies: int) -> Storage:
    """A storage; if it is a collective's buffer, with this end of its life."""
    return msgspec.structs.replace(storage, dies=dies) if storage.category is Category.COMMUNICATION else storage


def _bare_storages(trace: Trace) -> list[Storage]:
    return _without_bytes([_until(storage, 0) for storage in trace.storages])


def _without_bytes(sized: Sequence[Any]) -> list[Any]:
    return [msgspec.structs.replace(each, bytes=0) for each in sized]


def _bare_region(region: RegionCall) -> tuple[object, ...]:
    """A region call without sizes."""
    graph: RegionGraph = region.graph
    ops = [msgspec.structs.replace(op, cost_key="") for op in graph.ops]
    bare = (_without_bytes(graph.values), ops, graph.slots, graph.outputs, graph.backward_order)
    return (region.name, region.call, region.forward, region.backward, region.obstacle, bare)
