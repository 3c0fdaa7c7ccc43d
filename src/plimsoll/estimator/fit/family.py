"""Traces of one model at a few shapes in, its trace at any other shape out: bytes and arithmetic as exact polynomials.

Where a shape was traced, that very trace comes back. Elsewhere every size of storages and values, every op's arithmetic, moved
bytes and workspace comes from a polynomial through the traced shapes (see ``polynomial``); ops keep their order, storages
their lives. Cost keys name sizes, so ops of such a trace get keys of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from plimsoll.artifacts.costs import Costs, OpCost
from plimsoll.artifacts.region import RegionGraph
from plimsoll.artifacts.trace import OpSpec, RegionCall, Trace
from plimsoll.estimator.fit.point import Shape
from plimsoll.estimator.fit.polynomial import Fitter, Polynomial
from plimsoll.estimator.fit.structure import find_difference

LEAST_TRACES = 2
LEAST_SEQUENCES = 3
"""Terms in s and in s² cannot be told apart by two sequences."""


class Family:
    """One model at many shapes.

    The members are the traces with the structure of the largest shape; ``strays`` says of every other one what is different.
    """

    def __init__(self, traces: Mapping[Shape, Trace]) -> None:
        assert traces, "a family has at least one trace"
        self._traces = dict(traces)
        self._shapes: tuple[Shape, ...]
        self.strays: dict[Shape, str] = {}
        largest = max(traces, key=lambda shape: (shape.items, shape))
        members = [largest]
        for shape in sorted(traces):
            difference = "" if shape == largest else find_difference(traces[shape], traces[largest])
            if difference:
                self.strays[shape] = difference
            elif shape != largest:
                members.append(shape)
        self._shapes = tuple(sorted(members))
        self._members = [traces[shape] for shape in self._shapes]
        self._fitter = Fitter(self._shapes)
        self._keys = self._name_ops()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The traced shapes that share one structure."""
        return self._shapes

    def covers(self, shape: Shape) -> bool:
        """Whether the trace of a shape is known or follows from those that are."""
        if shape in self._traces:
            return True
        batches, sequences = ({s.batch for s in self._shapes}, {s.sequence for s in self._shapes})
        is_within = len(sequences) >= LEAST_SEQUENCES or shape.sequence in sequences
        return is_within and len(batches) >= LEAST_TRACES and shape.batch >= min(batches)

    def traced(self, shape: Shape) -> Trace | None:
        """The trace that was made at this shape, if one was."""
        return self._traces.get(shape)

    def at(self, shape: Shape) -> Trace:
        """The trace of a shape: the one that was made there, else one of the polynomials'."""
        assert self.covers(shape)
        known = self._traces.get(shape)
        return known if known is not None else self._predict(shape)

    def inexact_bytes(self, shape: Shape) -> int:
        """Bytes of storages whose sizes no polynomial passes through, at a shape: those are estimates."""
        if shape in self._traces:
            return 0
        found = [
            self._fitter.fit(tuple(t.storages[i].bytes for t in self._members))
            for i in range(len(self._members[0].storages))
        ]
        return sum(polynomial.at(shape) for polynomial in found if not polynomial.is_exact)

    @property
    def is_checked(self) -> bool:
        """Whether every size of a storage was determined with a traced shape to spare."""
        count = len(self._members[0].storages)
        return all(self._fitter.fit(tuple(t.storages[i].bytes for t in self._members)).is_checked for i in range(count))

    def seconds_at(self, shape: Shape, known: Mapping[Shape, Costs]) -> Costs:
        """Costs of the trace at an untraced shape, interpolated between costs that were measured at traced ones.

        An op's seconds are taken to be piecewise linear in its work (arithmetic and moved bytes), and to grow on beyond the
        largest measured one as they did before it.

        Args:
            shape: where there is no measurement.
            known: costs by traced shape of this family; at least one.
        """
        measured = [(place, known[s]) for place, s in enumerate(self._shapes) if s in known]
        assert measured, "there is nothing to interpolate between"
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
                ops[name + suffix] = OpCost(seconds=_interpolate(samples, work))
        nearest = min((place for place, _ in measured), key=lambda place: abs(self._shapes[place].items - shape.items))
        return msgspec.structs.replace(known[self._shapes[nearest]], ops=ops)

    def _name_ops(self) -> dict[tuple[str, ...], str]:
        """A name for every combination of cost keys that the members use for one op."""
        names: dict[tuple[str, ...], str] = {}
        for together in zip(*(trace.ops for trace in self._members), strict=True):
            keys = tuple(op.cost_key for op in together)
            names.setdefault(keys, f"{together[0].name}#{len(names)}")
        return names

    def _number(self, values: tuple[int, ...], shape: Shape) -> int:
        return self._polynomial(values).at(shape)

    def _polynomial(self, values: tuple[int, ...]) -> Polynomial:
        return self._fitter.fit(values)

    def _spec(self, keys: tuple[str, ...], shape: Shape) -> OpSpec:
        specs = [trace.specs[key] for trace, key in zip(self._members, keys, strict=True)]
        return msgspec.structs.replace(
            specs[0],
            flops=self._number(tuple(spec.flops for spec in specs), shape),
            moved_bytes=self._number(tuple(spec.moved_bytes for spec in specs), shape),
        )

    def _predict(self, shape: Shape) -> Trace:
        first, suffix = self._members[0], _suffix(shape)
        names = {keys: name + suffix for keys, name in self._keys.items()}
        together = list(zip(*(trace.ops for trace in self._members), strict=True))
        ops = [msgspec.structs.replace(each[0], cost_key=names[tuple(op.cost_key for op in each)]) for each in together]
        storages = [
            msgspec.structs.replace(each[0], bytes=self._number(tuple(s.bytes for s in each), shape))
            for each in zip(*(trace.storages for trace in self._members), strict=True)
        ]
        workspaces = {
            name: self._number(
                tuple(trace.workspaces.get(key, 0) for trace, key in zip(self._members, keys, strict=True)), shape
            )
            for keys, name in names.items()
        }
        return msgspec.structs.replace(
            first,
            signature=f"a micro-batch of {shape}, not traced: it follows from {', '.join(map(str, self._shapes))}",
            ops=tuple(ops),
            specs={name: self._spec(keys, shape) for keys, name in names.items() if keys[0] in first.specs},
            storages=tuple(storages),
            regions=tuple(
                self._region(each, shape, names) for each in zip(*(t.regions for t in self._members), strict=True)
            ),
            timings={},
            workspaces={name: size for name, size in workspaces.items() if size},
        )

    def _region(self, calls: tuple[RegionCall, ...], shape: Shape, names: Mapping[tuple[str, ...], str]) -> RegionCall:
        graphs: list[RegionGraph] = [call.graph for call in calls]
        values = tuple(
            msgspec.structs.replace(each[0], bytes=self._number(tuple(v.bytes for v in each), shape))
            for each in zip(*(graph.values for graph in graphs), strict=True)
        )
        ops = tuple(
            msgspec.structs.replace(each[0], cost_key=names[tuple(op.cost_key for op in each)])
            for each in zip(*(graph.ops for graph in graphs), strict=True)
        )
        kind = hashlib.sha256(f"{[call.kind for call in calls]}{shape}".encode()).hexdigest()[:16]
        return msgspec.structs.replace(
            calls[0], kind=kind, graph=msgspec.structs.replace(graphs[0], values=values, ops=ops)
        )


def _suffix(shape: Shape) -> str:
    return f"@{shape.batch}x{shape.sequence}"


def _work(spec: OpSpec) -> int:
    """How much an op has to do, in one number that grows with its shape."""
    return spec.flops + spec.moved_bytes


def _interpolate(samples: list[tuple[int, float]], work: int) -> float:
    """Piecewise linear between samples of (work, seconds), and on beyond them; never below zero, never falling at the end."""
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
