"""Replay schedules, run by an interpreter that knows nothing but which memory holds which value."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from planning.builders import random_step
from planning.form_builders import random_choice, random_forms
from plimsoll.artifacts.region import Origin, RegionGraph, RegionOp, Slot, Value
from plimsoll.planning.replay_schedule import (
    BOUNDARY,
    NO_OP,
    ReplayStep,
    Schedule,
    Segment,
    Unreachable,
    build_schedule,
)
from plimsoll.planning.step import StepIndex

STEPS = 400


@dataclass
class Interpreter:
    """Runs a schedule: ``memory`` says where a rebuilt value lies, ``contents`` which value a place holds now."""

    graph: RegionGraph
    held: frozenset[int]
    packed: frozenset[int]
    memory: dict[int, int] = field(default_factory=dict)
    contents: list[int] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)

    def run(self, schedule: Schedule) -> None:
        for segment in schedule.segments:
            for step in segment.steps:
                self._load(step) if step.op == NO_OP else self._run(step)
                self._check_nothing_idles(schedule, segment, step)
            targets = self.graph.outputs if segment.slot == BOUNDARY else (self.graph.slots[segment.slot].value,)
            for value in targets:
                assert self._is_there(value), f"slot {segment.slot} does not find {value}"
            for value in segment.frees:
                del self.memory[value]
        assert not self.memory, "something is never let go"
        assert len(set(self.ran)) == len(self.ran), "an op ran twice"
        assert len(set(self.loaded)) == len(self.loaded), "a value was brought back twice"

    def _is_there(self, value: int) -> bool:
        return value in self.held or (value in self.memory and self.contents[self.memory[value]] == value)

    def _place(self, value: int) -> None:
        self.contents.append(value)
        self.memory[value] = len(self.contents) - 1

    def _load(self, step: ReplayStep) -> None:
        assert step.load in self.packed
        self.loaded.append(step.load)
        self._place(step.load)

    def _run(self, step: ReplayStep) -> None:
        op = self.graph.ops[step.op]
        assert not op.obstacle
        for value in op.reads:
            assert self._is_there(value), f"op {op.id} does not find {value}"
        self.ran.append(op.id)
        for value in op.writes:
            storage = self.graph.values[value].storage
            old = [read for read in op.reads if self.graph.values[read].storage == storage and read not in step.copies]
            if old:
                assert old[0] not in self.held, f"op {op.id} writes over what is held"
                self.memory[value] = self.memory[old[0]]
                self.contents[self.memory[value]] = value
            else:
                self._place(value)
        for value in step.frees:
            del self.memory[value]

    def _check_nothing_idles(self, schedule: Schedule, segment: Segment, step: ReplayStep) -> None:
        """Whatever lies in memory is used by something that comes later."""
        steps = [s for part in schedule.segments for s in part.steps]
        at = next(i for i, other in enumerate(steps) if other is step)
        later = {read for s in steps[at + 1 :] if s.op != NO_OP for read in self.graph.ops[s.op].reads}
        for part in schedule.segments[schedule.segments.index(segment) :]:
            later.update(self.graph.outputs if part.slot == BOUNDARY else (part.value,))
        assert self.memory.keys() <= later, "something lies idle"


def graph_of(
    ops: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    slots: Sequence[int],
    *,
    outputs: tuple[int, ...] = (),
    order: Sequence[int] | None = None,
    in_place: Iterable[int] = (),
) -> RegionGraph:
    """A graph of ops given as (reads, writes); value 0 is the input; slots are read last first, as backward does."""
    producers = {write: at for at, (_, writes) in enumerate(ops) for write in writes}
    values = []
    for number in range(max(producers) + 1):
        producer = producers.get(number, -1)
        storage = values[ops[producer][0][0]].storage if number in in_place else number
        origin = Origin.OP if producer >= 0 else Origin.INPUT
        values.append(Value(id=number, name=f"v{number}", bytes=8, storage=storage, origin=origin, producer=producer))
    return RegionGraph(
        values=tuple(values),
        ops=tuple(
            RegionOp(id=at, name=f"op{at}", reads=reads, writes=writes, cost_key="op")
            for at, (reads, writes) in enumerate(ops)
        ),
        slots=tuple(Slot(index=at, value=value) for at, value in enumerate(slots)),
        outputs=outputs,
        backward_order=tuple(order if order is not None else reversed(range(len(slots)))),
    )


def run(
    graph: RegionGraph, stored: set[int], dropped: set[int], packed: set[int], order: Sequence[int] | None = None
) -> Schedule:
    schedule = build_schedule(graph, stored, dropped, order, packed)
    Interpreter(graph, frozenset(stored - packed), frozenset(packed)).run(schedule)
    return schedule


def steps_of(schedule: Schedule) -> list[tuple[str, int]]:
    """``("load", value)``, ``("op", op)`` and ``("slot", slot)`` in the order in which they happen."""
    found: list[tuple[str, int]] = []
    for segment in schedule.segments:
        found += [("load", step.load) if step.op == NO_OP else ("op", step.op) for step in segment.steps]
        found.append(("slot", segment.slot))
    return found


CHAIN = [((0,), (1,)), ((1,), (2,))]
"""The input makes 1, which makes 2."""
HAPPENS = {
    "a packed slot is loaded when it is read": (
        ([((0,), (1,))], [1], {}),
        ({0}, set(), {1}, None),
        "load 1, slot 0",
    ),
    "a packed value is loaded right before the first op that reads it": (
        ([((0,), (1,)), ((0,), (2,)), ((1, 2), (3,))], [3, 2], {}),
        ({0}, {3}, {2}, [0, 1]),
        "op 0, load 2, op 2, slot 0, slot 1",
    ),
    "a packed value with several readers is loaded once": (
        ([((0,), (1,)), ((1,), (2,)), ((1,), (3,))], [2, 3], {}),
        ({0}, {2, 3}, {1}, [1, 0]),
        "load 1, op 2, slot 1, op 1, slot 0",
    ),
    "a packed slot that is read before its reader": (
        (CHAIN, [1, 2], {}),
        ({0}, {2}, {1}, [0, 1]),
        "load 1, slot 0, op 1, slot 1",
    ),
    "a packed slot that is read after its reader": (
        (CHAIN, [1, 2], {}),
        ({0}, {2}, {1}, [1, 0]),
        "load 1, op 1, slot 1, slot 0",
    ),
    "an in-place op beside a slot that needs what was loaded": (
        (CHAIN, [1, 2], {"in_place": [2]}),
        ({0}, {2}, {1}, None),
        "load 1, op 1, slot 1, slot 0",
    ),
    "the boundary hands over packed outputs": (
        (CHAIN, [1, 2], {"outputs": (2,)}),
        ({0}, {1}, {2}, [BOUNDARY, 1, 0]),
        f"load 2, slot {BOUNDARY}, slot 1, op 0, slot 0",
    ),
    "packing wins over storing": ((CHAIN, [1, 2], {}), ({0, 1}, set(), {1}, None), "load 1, slot 0"),
    "what is stored is never loaded": ((CHAIN, [1, 2], {}), ({0, 1}, {2}, set(), None), "op 1, slot 1"),
}


@pytest.mark.parametrize("case", HAPPENS)
def test_values_are_loaded_once_and_right_before_they_are_read(case: str) -> None:
    (ops, slots, more), how, happens = HAPPENS[case]
    schedule = run(graph_of(ops, slots, **more), *how)
    assert ", ".join(f"{kind} {number}" for kind, number in steps_of(schedule)) == happens


def test_what_was_loaded_is_freed_after_its_last_reader_and_known_as_a_leaf() -> None:
    alone = run(graph_of([((0,), (1,))], slots=[1]), stored={0}, dropped=set(), packed={1})
    assert (alone.segments[0].frees, alone.leaves, alone.ops) == ((1,), {0: (1,)}, ())
    both = graph_of([((0,), (1,)), ((0,), (2,)), ((1, 2), (3,))], slots=[3, 2])
    assert run(both, stored={0}, dropped={3}, packed={2}, order=[0, 1]).leaves == {0: (0, 2), 1: (2,)}
    twice = graph_of([((0,), (1,)), ((1,), (2,)), ((1,), (3,))], slots=[2, 3])
    first, second = run(twice, stored={0}, dropped={2, 3}, packed={1}, order=[1, 0]).segments
    assert (first.steps[-1].frees, second.steps[-1].frees) == ((), (1,))
    handed = run(graph_of(CHAIN, [1, 2], outputs=(2,)), {0}, {1}, {2}, order=[BOUNDARY, 1, 0])
    assert (handed.leaves[BOUNDARY], handed.segments[0].frees) == ((2,), ())


@pytest.mark.parametrize(("slots", "copies"), [([2], ()), ([1, 2], (1,))])
def test_an_in_place_op_takes_over_what_was_loaded_unless_a_slot_needs_it_later(
    slots: list[int], copies: tuple[int, ...]
) -> None:
    schedule = run(graph_of(CHAIN, slots, in_place=[2]), stored={0}, dropped={2}, packed={1})
    assert schedule.segments[0].steps[-1].copies == copies


def test_a_value_below_a_packed_one_need_not_be_held() -> None:
    graph = graph_of([((0,), (1,)), ((1,), (2,)), ((2,), (3,))], slots=[2, 3])
    assert run(graph, stored=set(), dropped={3}, packed={2}).ops == (2,)
    with pytest.raises(Unreachable) as raised:
        build_schedule(graph, set(), {3}, packed=set())
    assert raised.value.value == 0


@pytest.mark.parametrize("seed", range(0, STEPS, 20))
def test_every_op_and_slot_of_random_schedules_finds_its_inputs_and_nothing_lies_idle(seed: int) -> None:
    for number in range(seed, seed + 20):
        trace, costs = random_step(number, ops=8).finish()
        index, draw = StepIndex(trace, costs, random_forms(trace, costs, number)), random.Random(number)
        for view in index.views:
            choice = random_choice(draw, view)
            packed = frozenset(choice.forms)
            stored = view.leaves | choice.kept
            dropped = view.everything - choice.kept - packed
            order = view.graph.backward_order
            if draw.random() < 0.5:
                try:
                    build_schedule(view.graph, stored, view.graph.outputs, (BOUNDARY,), packed)
                except Unreachable:
                    continue
                order = (BOUNDARY, *order)
                dropped |= frozenset(view.graph.outputs) - stored - packed
            schedule = build_schedule(view.graph, stored, dropped, order, packed)
            Interpreter(view.graph, stored - packed, packed).run(schedule)
            for slot, leaves in schedule.leaves.items():
                assert set(leaves) <= stored | packed, slot
