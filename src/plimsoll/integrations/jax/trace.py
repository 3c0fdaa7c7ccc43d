"""Describes a function of jax and its gradient as a traced step, so that the planner for PyTorch can decide about its values.

A region is a part that a plan manages. In a region that is the body of a loop, a storage has the bytes of all iterations, and a
value has the bytes of one iteration: held values are stacked, but a recomputed value exists once at a time. Arguments and their
gradients count 0 bytes in the trace, because XLA counts them apart from temporaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plimsoll.artifacts.costs import Costs, OpCost
from plimsoll.artifacts.region import Origin, RegionGraph, RegionOp, Slot, Value
from plimsoll.artifacts.trace import Category, OpSpec, Phase, RegionCall, Storage, Trace, TraceOp
from plimsoll.integrations.jax.program import ArrayProgram, is_complex
from plimsoll.integrations.jax.reading import is_shape_only
from plimsoll.integrations.jax.regions import Region
from plimsoll.integrations.jax.seconds import Clock
from plimsoll.integrations.search import TracedStep
from plimsoll.planning.choices import prices_of
from plimsoll.planning.cut import Network, Offers, solve_cuts
from plimsoll.planning.step import StepIndex

_PRICES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0, 1024.0, 4096.0])
"""Prices of memory at which to search for values that are worth holding. They are multiples of the time that holding a byte
takes.
"""
_EFFECTS = ("callback", "print", "infeed", "outfeed")
_INSIDE = -1
"""The number for everything that jax itself holds of a region. It is used instead of the number of one value."""
INSIDE = "inside"
"""The name in plans for everything that jax itself holds of a region (a part that a plan manages).

It is used where single values cannot be named: a loop inside of a loop is one operation, and its derivative reads values that
are made inside.
"""


def value_name(region: Region, value: int) -> str:
    """Return the name under which plans list a value of a region (a part of the function that a plan manages)."""
    if value == _INSIDE:
        return INSIDE
    for node in region.part.nodes:
        if value in node.writes:
            return f"{value}.{node.scope.rpartition('/')[2] + '/' if node.scope else ''}{node.name}"
    return f"{value}.input"


def trace_step(
    program: ArrayProgram, regions: Sequence[Region], clock: Clock, *, model: str, signature: str
) -> TracedStep:
    """Return the traced step of a function and its gradient.

    Args:
        program: the function.
        regions: all regions of the function, in order.
        clock: gives the seconds of operations.
        model: the function's name.
        signature: the shapes of the function's arguments, as text.
    """
    seconds: dict[str, float] = {}
    candidates: dict[str, frozenset[int]] = {}
    for region in regions:
        if region.kind not in candidates:
            candidates[region.kind] = _worth_holding(program, region, clock)
    builder = _Builder(program, clock, seconds)
    builder.build(regions, candidates)
    return TracedStep(builder.trace(model, signature, regions), builder.costs(), clock.store_seconds_per_byte)


def obstacle_of(region: Region) -> str:
    """Return why a region (a part of the function that a plan manages) cannot run again, or an empty text if it can."""
    for node in region.part.nodes:
        if any(word in node.name for word in _EFFECTS):
            return f"{node.name} has a side effect, and recomputing would repeat it"
        if node.name in ("checkpoint", "remat2"):
            return "the function itself uses jax.checkpoint here"
    return ""


def _worth_holding(program: ArrayProgram, region: Region, clock: Clock) -> frozenset[int]:
    """Return the values of a region that are worth holding at some price of memory.

    These are the values that some minimum cut holds, at the price of the time that holding takes, or at a higher price.
    """
    written = [value for node in region.part.nodes if not is_shape_only(node) for value in node.writes]
    # jax.checkpoint cannot save a named complex value ("reduce_precision does not accept dtype complex64").
    every = frozenset(value for value in written if not is_complex(region.part.avals[value]))
    if not every or not region.reading.is_moving or obstacle_of(region):
        return frozenset()
    builder = _Builder(program, clock, {})
    builder.build([region], {region.kind: every})
    index = StepIndex(builder.trace("", "", [region]), builder.costs())
    view = index.views[0]
    found = {value.id for value in view.graph.values if value.id in view.forced and value.producer >= 0}
    if view.droppable:
        offers = Offers(view, prices_of(index, view))
        [cuts] = solve_cuts(Network(view), [(offers, _PRICES * clock.store_seconds_per_byte)])
        found |= {value for cut in cuts for value in cut.kept}
    if not found and region.reading.residual_bytes:
        return frozenset({_INSIDE})
    return frozenset(int(view.graph.values[value].name.partition(".")[0]) for value in found)


@dataclass
class _Builder:
    program: ArrayProgram
    clock: Clock
    seconds: dict[str, float]
    ops: list[TraceOp] = field(default_factory=list)
    specs: dict[str, OpSpec] = field(default_factory=dict)
    storages: list[Storage] = field(default_factory=list)
    calls: list[RegionCall] = field(default_factory=list)
    storage_of: dict[int, int] = field(default_factory=dict)
    """Maps a value of the whole program to the storage that it has in the traced step."""
    ends: dict[int, int] = field(default_factory=dict)
    """Maps a storage to the tick (count of operations) at which it is freed, if it lives longer than the operation that makes
    it.
    """

    def build(self, regions: Sequence[Region], candidates: Mapping[str, frozenset[int]]) -> None:
        parts: list[_Part] = []
        planned = 0
        for region in regions:
            parts.append(_Part(self, region, planned if candidates[region.kind] else -1, candidates[region.kind]))
            planned += bool(candidates[region.kind])
        for part in parts:
            part.forward()
        for part in reversed(parts):
            part.backward()
        self.calls = [part.call() for part in parts if part.index >= 0]

    def add_storage(self, bytes_: int, label: str, born: int, dies: int, region: int = -1) -> int:
        category = Category.ACTIVATION if region >= 0 else Category.TEMPORARY
        self.storages.append(
            Storage(
                id=len(self.storages), bytes=bytes_, category=category, label=label, born=born, dies=dies, region=region
            )
        )
        return len(self.storages) - 1

    def add_op(self, name: str, region: Region, phase: Phase, key: str, seconds: float) -> int:
        self.seconds[key] = seconds
        self.ops.append(TraceOp(name=name, module=region.name, phase=phase, cost_key=key))
        return len(self.ops) - 1

    def costs(self) -> Costs:
        ops = {key: OpCost(seconds=seconds) for key, seconds in self.seconds.items()}
        return Costs(device=self.clock.device, source=self.clock.source, ops=ops)

    def trace(self, model: str, signature: str, regions: Sequence[Region]) -> Trace:
        storages = [
            Storage(**{name: getattr(each, name) for name in each.__struct_fields__} | {"dies": self.ends[each.id]})
            if each.id in self.ends
            else each
            for each in self.storages
        ]
        return Trace(
            model=model,
            fingerprint=fingerprint(regions),
            signature=signature,
            device=self.clock.device,
            is_fake=True,
            ops=tuple(self.ops),
            specs=self.specs,
            storages=tuple(storages),
            regions=tuple(self.calls),
            timings={},
            workspaces={},
        )


class _Part:
    """Builds one region of the traced step, with its forward and its backward."""

    def __init__(self, builder: _Builder, region: Region, index: int, candidates: frozenset[int]) -> None:
        self.builder, self.region, self.index = builder, region, index
        self.candidates = sorted(candidates)
        self.values: list[Value] = []
        self.region_ops: list[RegionOp] = []
        self.number: dict[int, int] = {}
        """Maps a value of this part of the program to its number in the graph of the traced step."""
        self.packed: dict[int, int] = {}
        self.span = self.back = (0, 0)
        self.slots: list[Slot] = []
        self.order: list[int] = []

    def forward(self) -> None:
        builder, region, part = self.builder, self.region, self.region.part
        start = len(builder.ops)
        for at, outer in zip(part.inputs, region.inputs, strict=True):
            self._add_input(at, outer, start)
        made: set[int] = set()
        for value in self.candidates:
            nodes, sources = self._recipe(value)
            made.update(nodes)
            seconds = sum(builder.clock.seconds(part.nodes[at], part) for at in nodes) * region.repeats
            name = value_name(region, value)
            key = f"{region.kind} {name}"
            tick = builder.add_op(name.partition(".")[2] or name, region, Phase.FORWARD, key, seconds)
            self._add_made(value, name, key, tick, tuple(self.number[s] for s in sources if s in self.number))
        rest = [node for at, node in enumerate(part.nodes) if at not in made]
        seconds = sum(builder.clock.rough_seconds(node, part) for node in rest) * region.repeats
        tick = builder.add_op("rest", region, Phase.FORWARD, f"{region.kind} rest", seconds)
        self.span = (start, len(builder.ops))
        self._add_outputs(tick)

    def _recipe(self, value: int) -> tuple[set[int], tuple[int, ...]]:
        """Return the operations that recompute a value, and the values that these operations start from: the nearest values
        that may be held.

        Values that may be held are the inputs of the part, and the values that were found to be worth holding.
        """
        part = self.region.part
        if value == _INSIDE:
            return set(range(len(part.nodes))), ()
        makers = {v: at for at, node in enumerate(part.nodes) for v in node.writes}
        leaves = {*self.candidates, *part.inputs}
        nodes, pending = {makers[value]}, list(part.nodes[makers[value]].values)
        sources: set[int] = set()
        while pending:
            each = pending.pop()
            if each in leaves:
                sources.add(each)
            elif makers[each] not in nodes:
                nodes.add(makers[each])
                pending += part.nodes[makers[each]].values
        return nodes, tuple(sorted(sources))

    def _add_input(self, at: int, outer: int, start: int) -> None:
        builder, region, part = self.builder, self.region, self.region.part
        bytes_ = part.bytes(at)
        is_given = outer < 0 or outer in builder.program.inputs
        is_carry = False
        if region.is_scan:
            params = builder.program.nodes[region.first].params
            is_carry = params["num_consts"] <= at < params["num_consts"] + params["num_carry"]
        origin = Origin.INPUT if is_carry or not (is_given or region.is_scan) else Origin.PARAMETER
        storage = builder.storage_of.get(outer, -1)
        if is_carry and region.active[at]:
            storage = builder.add_storage(region.repeats * bytes_, f"{region.name} carry", start, start)
        elif storage < 0:
            storage = builder.add_storage(0, "argument", -1, -1)
        self.number[at] = len(self.values)
        self.values.append(
            Value(
                id=len(self.values), name=f"{at}.input", bytes=bytes_, storage=storage, origin=origin, is_storable=True
            )
        )
        if origin is Origin.INPUT:
            self.packed[at] = start

    def _add_made(self, value: int, name: str, key: str, tick: int, reads: tuple[int, ...]) -> None:
        region = self.region
        bytes_ = region.reading.residual_bytes if value == _INSIDE else region.part.bytes(value)
        number = len(self.values)
        storage = self.builder.add_storage(region.repeats * bytes_, f"{region.name} {name}", tick, tick, self.index)
        self.number[value] = number
        op = len(self.region_ops)
        self.values.append(
            Value(id=number, name=name, bytes=bytes_, storage=storage, origin=Origin.OP, producer=op, is_storable=True)
        )
        self.region_ops.append(
            RegionOp(id=op, name=name.partition(".")[2] or name, reads=reads, writes=(number,), cost_key=key, tick=tick)
        )
        self.packed[value] = tick

    def _add_outputs(self, tick: int) -> None:
        """Add the region's results that later regions (parts of the function that a plan manages) read. A result lives until
        its last reader.
        """
        builder, region = self.builder, self.region
        for at, outer in zip(region.part.outputs, region.outputs, strict=True):
            number = self.number.get(at) if isinstance(at, int) and not region.is_scan else None
            if number is not None:
                builder.storage_of[outer] = self.values[number].storage
            else:
                bytes_ = builder.program.bytes(outer)
                builder.storage_of[outer] = builder.add_storage(bytes_, f"{region.name} output", tick, tick + 1)
        for outer in region.inputs:
            storage = builder.storage_of.get(outer)
            if storage is not None:
                builder.ends[storage] = max(builder.ends.get(storage, 0), tick + 1)

    def backward(self) -> None:
        builder, region = self.builder, self.region
        reading, start = region.reading, len(builder.ops)
        if not reading.is_moving:
            self.back = (start, start)
            return
        for tick, node in enumerate(reading.backward):
            seconds = builder.clock.rough_seconds(node, reading.joint) * region.repeats
            builder.add_op(node.name, region, Phase.BACKWARD, f"{region.kind} backward {tick}", seconds)
        stop = len(builder.ops)
        self.back = (start, stop)
        for value, (first, end) in reading.backward_lives.items():
            builder.add_storage(reading.joint.bytes(value), f"{region.name} gradient", start + first, start + end)
        moving = [at for at in region.part.outputs if isinstance(at, int)]
        cotangent = sum(region.part.bytes(at) for at in moving if not region.is_scan or at in region.part.avals)
        builder.add_storage(cotangent, f"{region.name} gradient of its results", start, stop)
        self._add_slots(start, stop)

    def _add_slots(self, start: int, stop: int) -> None:
        reads = self.region.reading.reads(frozenset(self.candidates))
        inputs = {at for at in self.region.part.inputs if at in self.packed}
        inputs.update(value for value in self.candidates if value == _INSIDE)
        wanted = {value: reads.get(value, (0, 0)) for value in self.packed if value in reads or value in inputs}
        for value in sorted(wanted):
            first = start + wanted[value][0]
            self.slots.append(
                Slot(
                    index=len(self.slots),
                    value=self.number[value],
                    packed=self.packed[value],
                    unpacked=first,
                    released=stop,
                )
            )
        self.order = sorted(range(len(self.slots)), key=lambda slot: (self.slots[slot].unpacked, slot))

    def call(self) -> RegionCall:
        """Return the finished region with its graph, in the form that the planner reads."""
        outputs = tuple(self.number[at] for at in self.region.part.outputs if isinstance(at, int) and at in self.number)
        graph = RegionGraph(
            values=tuple(self.values),
            ops=tuple(self.region_ops),
            slots=tuple(self.slots),
            outputs=outputs,
            backward_order=tuple(self.order),
        )
        return RegionCall(
            index=self.index,
            name=self.region.name,
            call=0,
            kind=hashlib.sha256(self.region.kind.encode()).hexdigest()[:12],
            graph=graph,
            forward=self.span,
            backward=self.back,
            obstacle=obstacle_of(self.region),
            is_compiled=True,
        )


def fingerprint(regions: Sequence[Region]) -> str:
    """Return a digest that is equal for functions whose regions (parts of the function that a plan manages) run the same
    operations, at any sizes.
    """
    text = "\n".join(f"{r.name} {r.repeats > 1} {[node.name for node in r.part.nodes]}" for r in regions)
    return f"jax-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
