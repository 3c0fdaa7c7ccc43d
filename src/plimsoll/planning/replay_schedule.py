"""Schedules the replay of one region: which ops run again before which slot is read, and which values are freed when.

A *replay* is the recomputation of dropped values in backward, a *slot* is one tensor that autograd saved. This file defines the
rules of a replay. The simulator counts bytes with this schedule, and the engine, which carries out plans, compiles the same
schedule, so prediction and execution cannot drift apart. ``measuring`` repeats the rules for many choices (what to keep or
recompute) at once, and tests compare it with the simulator byte for byte. This file does not import torch.

Semantics. Slots are read in ``order``. Just before a slot is read, the ops run that it needs and that have not yet run; each op
runs at most once per backward. A rebuilt value is freed after its last use: the last op that reads it, or the last slot that is
made of it. An in-place op works on the replay's private memory. If the old version is still needed, or is not private, the op
works on a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from plimsoll.artifacts.region import RegionGraph

BOUNDARY = -1
"""A number that means the region's outputs where the index of a slot (saved tensor) is expected. A later region (module call)
whose input was dropped reads these outputs.
"""


class Unreachable(Exception):
    """Raised if a plan drops a value that cannot be rebuilt; ``value`` is its id and ``obstacle`` says why."""

    def __init__(self, value: int, obstacle: str) -> None:
        super().__init__(obstacle)
        self.value = value
        self.obstacle = obstacle


NO_OP = -1
"""Stands for an op's id in a step that does not run an op, but brings back a packed (compressed or offloaded) value."""


class ReplayStep(NamedTuple):
    """One step of the recomputation: copy the values ``copies``, run ``op``, then drop the values ``frees``.

    Values are copied if the in-place op would overwrite them too early. If ``op`` is ``NO_OP``, the step instead brings back
    the packed (compressed or offloaded) value ``load``.
    """

    op: int
    copies: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    load: int = -1


class Segment(NamedTuple):
    """What happens when backward reads ``slot``, a saved tensor: run ``steps``, return its value, drop the values ``frees``.

    If ``slot`` is ``BOUNDARY``, all outputs of the region are returned, and ``value`` is the first of them that had to be
    rebuilt.
    """

    slot: int
    value: int
    steps: tuple[ReplayStep, ...]
    frees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Data: how and when one region recomputes its dropped values, for one choice of stored values.

    ``segments`` has one entry for each dropped slot (saved tensor), in the order of reading. ``leaves`` maps each dropped slot
    to the stored values that it is rebuilt from, directly or through other ops. A dropped slot keeps exactly these values
    alive. If a slot's value is packed (compressed or offloaded), that value is the only leaf.
    """

    segments: tuple[Segment, ...]
    leaves: dict[int, tuple[int, ...]]

    @property
    def ops(self) -> tuple[int, ...]:
        """The ids of the ops that run again, in the order of running."""
        return tuple(step.op for segment in self.segments for step in segment.steps if step.op != NO_OP)


def recipe_ops(graph: RegionGraph, value: int, stored: frozenset[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of the ops that rebuild ``value`` from ``stored`` values, and of the stored values that they read.

    The ops are in program order.

    Raises:
        Unreachable: an op on the way must not run again, or a value on the way is not held.
    """
    ops, leaves = _recipe(graph, (value,), stored)
    return tuple(sorted(ops)), tuple(sorted(leaves))


def can_rebuild(graph: RegionGraph, values: Iterable[int], stored: Set[int]) -> bool:
    """Return True if ops that may run again can rebuild all these values from the ``stored`` values."""
    try:
        _recipe(graph, values, stored)
    except Unreachable:
        return False
    return True


def _recipe(graph: RegionGraph, targets: Iterable[int], stored: Set[int]) -> tuple[set[int], set[int]]:
    """Return the ops that rebuild all target values, and the stored values that these ops read, both as sets of ids.

    Raises:
        Unreachable: an op on the way must not run again, or a value on the way is not held.
    """
    values, entries = graph.values, graph.ops
    ops: set[int] = set()
    leaves: set[int] = set()
    pending = list(targets)
    while pending:
        current = pending.pop()
        if current in stored:
            leaves.add(current)
            continue
        producer = values[current].producer
        if producer < 0:
            raise Unreachable(current, f"{values[current].name} is not held for backward")
        if producer in ops:
            continue
        op = entries[producer]
        if op.obstacle:
            raise Unreachable(current, op.refusal)
        ops.add(producer)
        pending.extend(op.reads)
    return ops, leaves


def _bits(mask: int) -> list[int]:
    """Return the positions of the bits of ``mask`` that are 1, lowest first."""
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def _recipes(graph: RegionGraph, stored: Set[int]) -> tuple[list[int], list[int]]:
    """Return two lists with one bit mask for each value: the ops that rebuild it, and the stored values that these ops read.

    The first mask is -1 for a value that cannot be rebuilt.
    """
    ops_of, leaves_of = [-1] * len(graph.values), [0] * len(graph.values)
    for value in stored:
        ops_of[value], leaves_of[value] = 0, 1 << value
    for op in graph.ops:
        if op.obstacle or any(ops_of[read] < 0 for read in op.reads):
            continue
        ops, leaves = 1 << op.id, 0
        for read in op.reads:
            ops |= ops_of[read]
            leaves |= leaves_of[read]
        for write in op.writes:
            if write not in stored:
                ops_of[write], leaves_of[write] = ops, leaves
    return ops_of, leaves_of


def build_schedule(
    graph: RegionGraph,
    stored: Iterable[int],
    dropped: Iterable[int],
    order: Sequence[int] | None = None,
    packed: Iterable[int] = (),
) -> Schedule:
    """Return the schedule that rebuilds all slots (saved tensors) whose value is in ``dropped`` or ``packed``.

    Args:
        graph: the region.
        stored: ids of values that are held when backward starts (kept slots, inputs, parameters, buffers).
        dropped: ids of values that are not held and must be rebuilt for their slots.
        order: slot indices in the order of reading (``BOUNDARY`` for the outputs); by default ``graph.backward_order``.
        packed: ids of values that are held in another form (codec or offload) and can be brought back from it.

    Raises:
        Unreachable: a dropped value cannot be rebuilt from the held ones.
    """
    away = frozenset(packed)
    held = frozenset(stored) - away
    there = held | away
    gone = frozenset(dropped) | away
    # One pass over the ops for all slots, because the slots' recipes share most ops.
    ops_of, leaves_of = _recipes(graph, there) if gone else ([], [])
    ran = 0
    loaded: set[int] = set()
    parts: list[_Part] = []
    leaves: dict[int, tuple[int, ...]] = {}
    for slot in graph.backward_order if order is None else order:
        targets = graph.outputs if slot == BOUNDARY else (graph.slots[slot].value,)
        rebuilt = tuple(target for target in targets if target in gone)
        if not rebuilt:
            continue
        ops = needs = 0
        for target in rebuilt:
            if ops_of[target] < 0:
                _recipe(graph, rebuilt, there)  # raises `Unreachable` with the reason
            ops |= ops_of[target]
            needs |= leaves_of[target]
        leaves[slot] = tuple(_bits(needs))
        # Values that earlier ops read are already loaded. Load only what the new ops read, and targets.
        fresh = _bits(ops & ~ran)
        loads = away.intersection(leaves[slot]) - loaded
        if loads:
            loads &= {read for op in fresh for read in graph.ops[op].reads} | set(rebuilt)
        parts.append(_Part(slot, rebuilt, _in_order(graph, fresh, loads)))
        ran |= ops
        loaded |= loads
    return Schedule(segments=_with_frees(graph, parts, held), leaves=leaves)


class _Part(NamedTuple):
    """Data: one segment (the work for one saved tensor) before it is known which values its steps free.

    A step is (op, value to load); one of the two is -1.
    """

    slot: int
    values: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]


def _in_order(graph: RegionGraph, ops: Sequence[int], loads: Set[int]) -> tuple[tuple[int, int], ...]:
    """Return the steps of a recomputation in their order: ops, and loads of compressed or offloaded values.

    Ops are in program order. A load comes right before the first op that reads the value. Loads that no op reads come last.
    """
    if not loads:
        return tuple((op, -1) for op in ops)
    steps: list[tuple[int, int]] = []
    waiting = set(loads)
    for op in ops:
        due = sorted(waiting.intersection(graph.ops[op].reads))
        steps += [(NO_OP, value) for value in due]
        waiting.difference_update(due)
        steps.append((op, -1))
    return (*steps, *((NO_OP, value) for value in sorted(waiting)))


def _with_frees(graph: RegionGraph, parts: list[_Part], held: frozenset[int]) -> tuple[Segment, ...]:
    """Return the segments (the work for each saved tensor), with the values that can be freed after each step.

    The walk goes backwards, so the first reader that it meets is the value's last reader.
    """
    values, ops = graph.values, graph.ops
    needed_later: set[int] = set()
    segments: list[Segment] = []
    for part in reversed(parts):
        frees = tuple(sorted(set(part.values) - needed_later))
        needed_later.update(part.values)
        steps: list[ReplayStep] = []
        for op_id, load in reversed(part.steps):
            if op_id == NO_OP:
                steps.append(ReplayStep(op=NO_OP, load=load))
                continue
            op = ops[op_id]
            storages = {values[write].storage for write in op.writes}
            overwritten = [read for read in op.reads if values[read].storage in storages]
            copies = tuple(read for read in overwritten if read in needed_later or read in held)
            own = [read for read in op.reads if read not in held]
            dead = {value for value in (*own, *op.writes) if value not in needed_later}
            needed_later.update(own)
            steps.append(ReplayStep(op=op_id, copies=copies, frees=tuple(sorted(dead))))
        segments.append(Segment(slot=part.slot, value=part.values[0], steps=tuple(reversed(steps)), frees=frees))
    return tuple(reversed(segments))
