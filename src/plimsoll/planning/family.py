"""Predicts the trace of a model at one batch size from its traces at a few other sizes, exactly.

A *family* is one model's step at many batch sizes; its *members* are the traces that predictions start from. For a traced
batch, the batch's own trace is returned. For other batches, the bytes of each storage and value, and the arithmetic, moved
bytes and workspace of each op, follow from an expression through the traced sizes (see ``expressions``). Ops keep their order
and storages their lives. Cost keys (names of ops with their shapes) contain sizes, so ops of a predicted trace get new keys.

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
    """Predicts the traces of one model's step at many batch sizes.

    Predictions start from its members: the given traces that have the structure of the largest batch's trace. ``strays``
    maps the shape of each other trace to a text that says how this trace differs.
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
        """The batch shapes of the family's members: the traces that have one structure and that predictions start from."""
        return self._shapes

    def covers(self, shape: S) -> bool:
        """Return True if the family (one step at many batch sizes) has a trace for a batch shape: it was traced, or it can be
        predicted, if only roughly.
        """
        return shape in self._traces or (len(self._shapes) > 1 and self.dimensions.can_tell(shape))

    def knows(self, shape: S) -> bool:
        """Return True if the bytes of all storages at a batch shape are exact: traced, or from exact expressions."""
        return shape in self._traces or (self.covers(shape) and self.is_exact)

    @property
    def is_exact(self) -> bool:
        """True if the bytes of all storages can be predicted exactly at each batch shape; False if some are only estimates."""
        return not self._estimates

    def traced(self, shape: S) -> Trace | None:
        """Return the trace that was made at this batch shape; ``None`` if the shape was not traced."""
        return self._traces.get(shape)

    def at(self, shape: S) -> Trace:
        """Return the trace of a batch shape: the trace that was made at this shape, or else a predicted trace."""
        assert self.covers(shape)
        known = self._traces.get(shape)
        return known if known is not None else self.alike(shape)

    def inexact_bytes(self, shape: S) -> int:
        """Return the bytes of all storages whose sizes at a batch shape are only estimates; 0 if all sizes are exact."""
        dimensions = self.dimensions.of(shape)
        return 0 if shape in self._traces else sum(each.at(dimensions) for each in self._estimates)

    @cached_property
    def _estimates(self) -> tuple[Expression, ...]:
        return tuple(each for each in self.storage_sizes() if not each.is_known)

    def storage_sizes(self) -> Iterator[Expression]:
        """Yield, for each storage in the order of the trace, an expression that gives the storage's bytes at any batch shape.

        An expression is a sum of products of the batch's dimensions.
        """
        for each in zip(*(trace.storages for trace in self._members), strict=True):
            yield self._fitter.fit(tuple(storage.bytes for storage in each))

    def workspaces(self) -> Iterator[Expression]:
        """Yield, for each distinct op, an expression that gives the bytes of the op's workspace at any batch shape.

        The op allocates and frees its workspace inside itself. An expression is a sum of products of the batch's dimensions.
        These expressions are often estimates, because kernels choose their block sizes.
        """
        for keys in self._keys:
            yield self._workspace(keys)

    def _workspace(self, keys: tuple[str, ...]) -> Expression:
        return self._fitter.fit(tuple(t.workspaces.get(key, 0) for t, key in zip(self._members, keys, strict=True)))

    def seconds_at(self, shape: S, known: Mapping[S, Costs]) -> Costs:
        """Return the costs of the trace at another batch shape, interpolated between costs measured at traced shapes.

        An op's seconds are assumed to be piecewise linear in its work (arithmetic and moved bytes). Beyond the largest
        measured work they continue with the last slope. ``known`` maps at least one traced shape to its costs.
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
        """Return a mapping that gives each op of the step a unique name, to be the op's cost key in predicted traces.

        The key of the mapping is a tuple with the op's cost key (its name with shapes) in each traced size of the family.
        """
        names: dict[tuple[str, ...], str] = {}
        for together in zip(*map(_costed_ops, self._members), strict=True):
            keys = tuple(op.cost_key for op in together)
            names.setdefault(keys, f"{together[0].name}#{len(names)}")
        return names

    def _number(self, values: Iterable[int], shape: S) -> int:
        """Predict a counted number, such as bytes, at a batch shape from its values at the members' shapes."""
        return self._fitter.fit(tuple(values)).at(self.dimensions.of(shape))

    def _resized(self, sized: Sequence[Sequence[Any]], shape: S) -> tuple[Any, ...]:
        """Return the first member's storages (or values of a region) with their bytes changed to those at a batch shape.

        ``sized`` has, for each member (each trace of the family), its storages (or values) in the same order.
        """
        return tuple(
            msgspec.structs.replace(each[0], bytes=self._number((one.bytes for one in each), shape))
            for each in zip(*sized, strict=True)
        )

    def _spec(self, keys: tuple[str, ...], shape: S) -> OpSpec:
        """Return the specification of an op at a batch shape: its predicted arithmetic and moved bytes.

        ``keys`` are the op's cost keys (ops with their shapes) in all members, the traces of the family.
        """
        specs = [trace.specs[key] for trace, key in zip(self._members, keys, strict=True)]
        if shape in self._shapes:
            return specs[self._shapes.index(shape)]
        return msgspec.structs.replace(
            specs[0],
            flops=self._number((spec.flops for spec in specs), shape),
            moved_bytes=self._number((spec.moved_bytes for spec in specs), shape),
        )

    def alike(self, shape: S) -> Trace:
        """Return the predicted trace of a batch shape, without a check that it can be predicted.

        The trace is right if the step at this shape has the same structure as the family's members (its traces).
        """
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
    """Yield all ops that have seconds of their own in a trace: the ops of the step, then the ops of its regions (module calls).

    Both are needed, because an op of a compiled region may be a part of another kernel in the step.
    """
    yield from trace.ops
    for call in trace.regions:
        yield from call.graph.ops


def _renamed(ops: Sequence[Sequence[Any]], names: Mapping[tuple[str, ...], str]) -> tuple[Any, ...]:
    """Return the first member's ops with new cost keys (ops with their shapes).

    ``ops`` has the ops of each member (each trace of the family). ``names`` maps an op's cost keys in all members to the new
    key.
    """
    return tuple(
        msgspec.structs.replace(each[0], cost_key=names[tuple(op.cost_key for op in each)])
        for each in zip(*ops, strict=True)
    )


def _suffix(shape: Sizes) -> str:
    return f"@{'x'.join(map(str, shape))}"


def _work(spec: OpSpec) -> int:
    """Return how much an op has to do, as one number: arithmetic plus moved bytes. It grows with the op's shape."""
    return spec.flops + spec.moved_bytes


def _interpolate(samples: list[tuple[int, float]], work: int) -> float:
    """Return the seconds for an amount of work, piecewise linear between samples of (work, seconds) and beyond them.

    The result is never negative. Beyond the last sample, seconds do not fall as work grows.
    """
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
    """Return a text that says why two traces, each given with its batch shape, belong to different families.

    The text is empty if they belong to the same family.
    """
    found = "" if one[0] == other[0] else find_difference(one[1], other[1])
    return (
        found
        if found or same_structure(one[0], other[0])
        else "a size is 0 or 1, and such sizes may run other operations"
    )


def find_difference(one: Trace, other: Trace) -> str:
    """Return a text that describes the first difference in structure between two traces; empty if only sizes differ."""
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
    """Return the same traces, but each buffer of a collective is freed at the same op in all of them.

    It is the op of the trace that freed the buffer last. The reason is that threads of the backend free these buffers, at
    moments that differ from run to run.
    """
    last = [max(each.dies for each in together) for together in zip(*(t.storages for t in members), strict=True)]
    found = [tuple(map(_until, trace.storages, last)) for trace in members]
    pairs = zip(members, found, strict=True)
    return [trace if each == trace.storages else msgspec.structs.replace(trace, storages=each) for trace, each in pairs]


def _until(storage: Storage, dies: int) -> Storage:
    """Return the storage of a collective's buffer with ``dies`` as the end of its life. Return any other storage unchanged."""
    return msgspec.structs.replace(storage, dies=dies) if storage.category is Category.COMMUNICATION else storage


def _bare_storages(trace: Trace) -> list[Storage]:
    return _without_bytes([_until(storage, 0) for storage in trace.storages])


def _without_bytes(sized: Sequence[Any]) -> list[Any]:
    return [msgspec.structs.replace(each, bytes=0) for each in sized]


def _bare_region(region: RegionCall) -> tuple[object, ...]:
    """Return a tuple with everything that defines a region call's structure, without sizes.

    Two region calls (calls of planned modules) have the same structure if their tuples are equal.
    """
    graph: RegionGraph = region.graph
    ops = [msgspec.structs.replace(op, cost_key="") for op in graph.ops]
    bare = (_without_bytes(graph.values), ops, graph.slots, graph.outputs, graph.backward_order)
    return (region.name, region.call, region.forward, region.backward, region.obstacle, bare)
