"""Inserts ops into a trace, and adds or changes storages, with all ticks shifted accordingly, without torch.

A tick is the position of an op in the trace. Ops are inserted *before* a tick of the original trace; ops inserted at one tick
keep their order. A storage that dies at that tick dies before them; what starts or is first read at that tick comes after them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from plimsoll.artifacts.region import Slot
from plimsoll.artifacts.trace import Category, OpSpec, Phase, RegionCall, Storage, Trace, TraceOp, TraceParameter
from plimsoll.planning.costing.host import HOST

GROUP = "shards"
"""The name of the group of ranks over which ZeRO shards tensors and data parallelism reduces gradients: the dp and cp ranks
together.
"""
REPLICAS = "replicas"
REPLICAS_REDUCE = "hsdp.all_reduce"
"""The name of HSDP's reduction over the group ``REPLICAS``: it adds up shards that were reduced within each replica."""
BESIDE = (GROUP, REPLICAS, HOST)
"""The names of the groups of ranks whose collectives run at the same time as compute."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """A moment of the edited trace: the moment while an inserted op runs, or with ``is_after`` the moment when it has ended."""

    number: int
    is_after: bool = False

    @property
    def done(self) -> Inserted:
        """The moment when the op has ended."""
        return Inserted(self.number, is_after=True)


Moment = int | Inserted | None
"""A moment of the edited trace: a tick (position of an op) of the original trace, an inserted op, or ``None`` for the end of
the step.
"""


@dataclass(slots=True)
class Edit:
    """Collects changes to a trace: inserted ops, added storages and changed storages. ``finish`` applies them."""

    trace: Trace
    _positions: list[int] = field(default_factory=list)
    _ops: list[TraceOp] = field(default_factory=list)
    _specs: dict[str, OpSpec] = field(default_factory=dict)
    _added: list[tuple[Storage, Moment, Moment]] = field(default_factory=list)
    _changed: dict[int, tuple[dict[str, Any], Moment, Moment]] = field(default_factory=dict)

    @property
    def last_tick(self) -> int:
        """The tick (position) after the last op of the original trace."""
        return len(self.trace.ops)

    def collective(
        self, tick: int, kind: str, unit: str, whole_bytes: int, dtype: str, phase: Phase | None = None
    ) -> Inserted:
        """Insert a collective over the data-parallel ranks.

        ``whole_bytes`` is the size of the whole tensor, before it is divided.
        """
        spec = OpSpec(name=kind, flops=0, moved_bytes=whole_bytes, dtype=dtype, group=GROUP)
        return self.op(tick, unit, f"{kind}({GROUP};{dtype};{whole_bytes})", spec, phase)

    def host_op(self, tick: int, name: str, unit: str, moved_bytes: int, phase: Phase | None = None) -> Inserted:
        """Insert a copy between device and host, or work that the host itself does."""
        spec = OpSpec(name=name, flops=0, moved_bytes=moved_bytes, dtype="f32", group=HOST)
        return self.op(tick, unit, f"{name}({moved_bytes})", spec, phase)

    def copy(self, tick: int, name: str, unit: str, moved_bytes: int, dtype: str) -> Inserted:
        """Insert an op that moves ``moved_bytes`` within the device's memory."""
        spec = OpSpec(name=name, flops=0, moved_bytes=moved_bytes, dtype=dtype)
        return self.op(tick, unit, f"{name}({dtype};{moved_bytes})", spec)

    def op(
        self, tick: int, module: str, cost_key: str, spec: OpSpec, phase: Phase | None = None, *, region: int = -1
    ) -> Inserted:
        """Insert an op before a tick (the position of an op). ``region`` is the index of the region (a module that the plan
        decides about) that contains the op, or -1 outside all regions.

        Without ``phase``, the op has the phase of the op at the tick. At the end of the trace, that phase is backward.
        """
        if phase is None:
            phase = self.trace.ops[tick].phase if tick < len(self.trace.ops) else Phase.BACKWARD
        self._positions.append(tick)
        self._ops.append(TraceOp(name=spec.name, module=module, phase=phase, cost_key=cost_key, region=region))
        self._specs[cost_key] = spec
        return Inserted(len(self._ops) - 1)

    def add(self, size: int, category: Category, label: str, born: Moment, dies: Moment) -> int:
        """Add a storage, and return the storage's id."""
        number = len(self.trace.storages) + len(self._added)
        self._added.append((Storage(id=number, bytes=size, category=category, label=label, born=0, dies=0), born, dies))
        return number

    def end(self, added: int, dies: Moment) -> None:
        """Set the moment at which a storage that was added to the trace is freed."""
        place = added - len(self.trace.storages)
        storage, born, _ = self._added[place]
        self._added[place] = (storage, born, dies)

    def change(self, storage: int, born: Moment, dies: Moment, **fields: Any) -> None:
        """Change the lifetime of a storage of the original trace, and optionally other fields of it."""
        self._changed[storage] = (fields, born, dies)

    def finish(self, *, parameters: Sequence[TraceParameter], notes: Sequence[str]) -> Trace:
        """Return the trace with all changes applied."""
        clock = TickClock(self._positions, len(self.trace.ops))
        ops: list[TraceOp] = [*self.trace.ops, *self._ops]
        inserted = map(Inserted, range(len(self._ops)))
        order = [*map(clock.of_op, range(len(self.trace.ops))), *map(clock.of, inserted)]
        placed = [op for _, op in sorted(zip(order, ops, strict=True), key=lambda pair: pair[0])]
        storages = [self._storage(storage, clock) for storage in self.trace.storages]
        storages += [replace(s, born=clock.birth(born), dies=clock.of(dies)) for s, born, dies in self._added]
        return replace(
            self.trace,
            ops=tuple(placed),
            specs=self.trace.specs | self._specs,
            storages=tuple(storages),
            regions=tuple(_region(call, clock) for call in self.trace.regions),
            parameters=tuple(parameters),
            notes=(*self.trace.notes, *notes),
        )

    def _storage(self, storage: Storage, clock: TickClock) -> Storage:
        if storage.id in self._changed:
            fields, born, dies = self._changed[storage.id]
            return replace(storage, born=clock.birth(born), dies=clock.of(dies), **fields)
        lasts = storage.born < 0 or storage.category in (Category.GRADIENT, Category.OPTIMIZER_STATE)
        return replace(
            storage,
            born=clock.of_op(storage.born) if storage.born >= 0 else -1,
            dies=clock.ticks if lasts and storage.dies >= len(self.trace.ops) else clock.before(storage.dies),
        )


class TickClock:
    """Converts positions in the original trace to positions in the edited trace. A position (tick) is the index of an op; ops
    were inserted before ``positions``.
    """

    def __init__(self, positions: Sequence[int], ticks: int) -> None:
        order = sorted(range(len(positions)), key=lambda number: (positions[number], number))
        self._sorted = sorted(positions)
        self._inserted = {number: positions[number] + rank for rank, number in enumerate(order)}
        self.ticks = ticks + len(positions)

    def before(self, tick: int) -> int:
        """Return the position in the edited trace of the moment just before the ops that are inserted at ``tick`` (a position
        in the original trace).
        """
        return tick + bisect.bisect_left(self._sorted, tick) if tick >= 0 else tick

    def of_op(self, tick: int) -> int:
        """Return the tick (position) in the edited trace of an op of the original trace. Ops that are inserted at ``tick`` come
        before it.
        """
        return tick + bisect.bisect_right(self._sorted, tick) if tick >= 0 else tick

    def birth(self, moment: Moment) -> int:
        """Return the tick in the edited trace of the op that makes a storage; -1 if the storage exists before the step."""
        return self.of_op(moment) if isinstance(moment, int) else self.of(moment)

    def of(self, moment: Moment) -> int:
        """Return the tick in the edited trace at which a storage's life ends."""
        if moment is None:
            return self.ticks
        if isinstance(moment, Inserted):
            return self._inserted[moment.number] + moment.is_after
        return self.before(moment)


def _region(call: RegionCall, clock: TickClock) -> RegionCall:
    def slot(each: Slot) -> Slot:
        unpacked = clock.of_op(each.unpacked)
        released = each.released if each.released < 0 else max(clock.before(each.released), unpacked)
        return replace(each, packed=clock.before(each.packed), unpacked=unpacked, released=released)

    def span(ticks: tuple[int, int]) -> tuple[int, int]:
        return clock.of_op(ticks[0]), clock.before(ticks[1])

    graph = replace(
        call.graph,
        ops=tuple(replace(op, tick=clock.of_op(op.tick)) for op in call.graph.ops),
        slots=tuple(map(slot, call.graph.slots)),
    )
    backward = span(call.backward) if call.backward[0] >= 0 else call.backward
    return replace(call, graph=graph, forward=span(call.forward), backward=backward)


def moved_slot(slot: Slot, at: Callable[[int], int]) -> Slot:
    """Return a slot (the record of one tensor that autograd saved) with each of its ticks (positions of ops) converted by the
    function ``at``.
    """
    return replace(slot, packed=at(slot.packed), unpacked=at(slot.unpacked), released=at(slot.released))
