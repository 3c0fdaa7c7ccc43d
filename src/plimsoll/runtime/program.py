"""What a region does in a steady call: which slots it keeps, which it drops, and the code that brings those back."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plimsoll.artifacts.region import Origin, RegionGraph
from plimsoll.errors import ReplayMismatch
from plimsoll.recording.geometry import Geometry
from plimsoll.runtime.cells import Cell, Copy, Readable
from plimsoll.runtime.compile import Recording, SegmentFunction, Sources, compile_segments, copy_storage
from plimsoll.runtime.frame import Frame, Link
from plimsoll.runtime.randomness import ENTRY
from plimsoll.runtime.sentinels import SentinelPolicy, must_defer
from plimsoll.runtime.verifying import INTEGER_OF_SIZE, same_bits
from plimsoll.schedule import BOUNDARY, Unreachable, build_schedule, recipe_ops

SAMPLE_SIZE = 16
NO_OFFSET = -1
"""The offset of saved tensors that do not lie on one storage (sparse ones)."""


@dataclass(frozen=True, slots=True)
class Code:
    """Compiled segments for one order of reading."""

    order: tuple[int, ...]
    places: dict[int, int]
    segments: tuple[SegmentFunction, ...]


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """Where a parameter or buffer is found in every call: its module's own dictionary, so that swaps are seen.

    A small buffer is copied per call, because the model may write to it before backward; a parameter must not change.
    """

    name: str
    holder: dict[str, Any]
    key: str
    is_copied: bool
    is_checked: bool


@dataclass(slots=True)
class Choice:
    """What to drop, resolved to ids of the region's graph."""

    dropped: frozenset[int]
    stored: frozenset[int]
    link: int | None
    obstacles: dict[str, str] = field(default_factory=dict)


def choose(
    graph: RegionGraph, names: frozenset[str], not_rebuildable: Mapping[int, str], links: frozenset[int]
) -> Choice:
    """Resolve the names that a plan drops. What cannot be rebuilt is kept, and ``obstacles`` says why.

    ``links`` are inputs that the region before can make again (for a dropped boundary).
    """
    slot_values = {slot.value for slot in graph.slots if slot.is_managed}
    always = {value.id for value in graph.values if value.origin in (Origin.PARAMETER, Origin.BUFFER, Origin.INPUT)}
    wanted = {v for v in slot_values if graph.values[v].name in names and graph.values[v].origin is Origin.OP}
    obstacles = {graph.values[v].name: not_rebuildable[v] for v in sorted(wanted) if v in not_rebuildable}
    dropped = {v for v in wanted if v not in not_rebuildable}
    while True:
        stored = always | (slot_values - dropped)
        failed: set[int] = set()
        for value in sorted(dropped):
            try:
                recipe_ops(graph, value, frozenset(stored))
            except Unreachable as unreachable:
                failed.add(value)
                obstacles[graph.values[value].name] = unreachable.obstacle
        if not failed:
            break
        dropped -= {min(failed)}
    gone = dropped | (links & slot_values)
    return Choice(frozenset(gone), frozenset(stored), next(iter(links), None), obstacles)


class Program:
    """The steady state of one region under one signature."""

    def __init__(
        self,
        name: str,
        graph: RegionGraph,
        recording: Recording,
        choice: Choice,
        parameters: Sequence[tuple[int, ParameterSource]],
        *,
        not_rebuildable: Mapping[int, str],
        node_counts: range,
        device_type: str,
        policy: SentinelPolicy,
    ) -> None:
        self.name = name
        self.graph = graph
        self.choice = choice
        self.device_type = device_type
        self.is_learning = True
        self.has_failed = False
        self._recording = recording
        self._not_rebuildable = not_rebuildable
        self._node_counts = node_counts
        self._specs = tuple((g.size, g.dtype, g.stride, g.offset) for g in recording.slot_geometries)
        self._parameters = tuple(source for _, source in parameters)
        self._dropped_slots = tuple(s.index for s in graph.slots if s.is_managed and s.value in choice.dropped)
        dropped = set(self._dropped_slots)
        self._kept_slots = tuple(s.index for s in graph.slots if s.index not in dropped)
        self._twins = self._find_twins()
        self._solo: dict[int, SegmentFunction] = {}
        self._boundary: Code | None = None
        self._cell_of, self._input_of = self._find_sources()
        self._sources = Sources(
            parameters={value: position for position, (value, _) in enumerate(parameters)},
            protected={i: f"{s.name} of region {name!r}" for i, s in enumerate(self._parameters) if s.is_checked},
            geometries=self._leaf_geometries(),
            links=frozenset() if choice.link is None else frozenset({choice.link}),
        )
        order = tuple(slot for slot in graph.backward_order if slot in dropped)
        self.code = self._compile(order)
        self._plan_leaves()
        self.state_points = self._find_state_points()
        self._sentinels = self._find_sentinels()
        self._policy = policy
        self._calls = 0

    @property
    def needs_states(self) -> bool:
        """Whether some dropped slot repeats a random op."""
        return bool(self.state_points)

    @property
    def needs_inputs(self) -> bool:
        """Whether finishing a call needs the tensors that the region was called with."""
        return bool(self._input_of) or self.choice.link is not None

    @property
    def link_position(self) -> int:
        """Which input comes from the region before, for a dropped boundary."""
        assert self.choice.link is not None
        return int(self.graph.values[self.choice.link].name.split(":")[1])

    @property
    def activation_bytes(self) -> int:
        """Bytes of the distinct storages made in the region that autograd saved."""
        return self._bytes_of(self._saved_values())

    @property
    def droppable_bytes(self) -> int:
        """Of these, what recipes could bring back bit for bit from the region's inputs and parameters."""
        names = frozenset(self.graph.values[v].name for v in self._saved_values())
        return self._bytes_of(choose(self.graph, names, self._not_rebuildable, frozenset()).dropped)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of the distinct storages made in the region that only dropped slots held."""
        return self._bytes_of(v for v in self.choice.dropped if self.graph.values[v].origin is Origin.OP)

    def _saved_values(self) -> frozenset[int]:
        saved = {slot.value for slot in self.graph.slots if slot.is_managed}
        return frozenset(v for v in saved if self.graph.values[v].origin is Origin.OP)

    def _bytes_of(self, values: Iterable[int]) -> int:
        return sum({self.graph.values[v].storage: self.graph.values[v].bytes for v in values}.values())

    def take_entry_states(self, frame: Frame) -> None:
        """Take the generator states that random ops before the first saved tensor start from."""
        for position, generator in self.state_points.get(ENTRY, ()):
            frame.states[position, ENTRY] = generator.get_state()

    def fits(self, frame: Frame, node_count: int) -> bool:
        """Whether this call saved what the recorded one saved, and built as many autograd nodes."""
        tensors = frame.tensors
        if len(tensors) != len(self._specs) or node_count not in self._node_counts:
            return False
        for tensor, (size, dtype, stride, offset) in zip(tensors, self._specs, strict=True):
            if (
                tensor.shape != size
                or tensor.dtype is not dtype
                or (offset != NO_OFFSET and (tensor.stride() != stride or tensor.storage_offset() != offset))
            ):
                return False
        for first, second in self._twins:
            if tensors[first].untyped_storage()._cdata != tensors[second].untyped_storage()._cdata:
                return False
        cells = frame.cells
        return all(tensors[index]._version == cells[index].version for index in self._dropped_slots)

    def finish(self, frame: Frame, inputs: Sequence[torch.Tensor], versions: Sequence[int], link: Link | None) -> bool:
        """Turn the open cells of a call that fits into kept and dropped ones. False (and nothing done) if it cannot.

        ``versions`` are those that the inputs had when the region was entered.
        """
        copies = self._copy_inputs(inputs, versions)
        if copies is None:
            return False
        cells, tensors = frame.cells, frame.tensors
        for index in self._kept_slots:
            cells[index].keep(tensors[index])
        readable: dict[int, Readable] = {value: cells[slot] for value, slot in self._needed_cells}
        readable.update(copies)
        if self.choice.link is not None:
            assert link is not None
            readable[self.choice.link] = link
        for leaves, slots in self._leaf_groups:
            sources = tuple(readable[value] for value in leaves)
            for slot in slots:
                cells[slot].drop(sources)
        self._take_samples(frame)
        waiting = {slot: weakref.ref(cells[slot]) for slot in self._dropped_slots}
        frame.program = self
        frame.bind(self._read_parameters(), waiting)
        frame.close()
        return True

    def boundary_leaves(self, cells: Sequence[Cell], link: Link | None) -> tuple[Readable, ...] | None:
        """What remaking the outputs starts from, for a region whose boundary is dropped; ``None`` if they cannot be."""
        outputs = frozenset(self.graph.outputs)
        try:
            schedule = build_schedule(self.graph, self.choice.stored, outputs - self.choice.stored, (BOUNDARY,))
        except Unreachable:
            return None
        readable: dict[int, Readable] = {value: cells[slot] for value, slot in self._cell_of.items()}
        if link is not None and self.choice.link is not None:
            readable[self.choice.link] = link
        if BOUNDARY not in schedule.leaves:
            return None
        wanted = self._visible(BOUNDARY, schedule.leaves[BOUNDARY])
        if any(value not in readable for value in wanted):
            return None
        return tuple(readable[value] for value in wanted)

    def remakes(self, position: int) -> bool:
        """Whether a recipe can make this output again."""
        return self._recording.output_refs[position] is not None

    def boundary_code(self) -> Code:
        """The code for a backward that asks for the outputs before the slots."""
        if self._boundary is None:
            self._boundary = self._compile((BOUNDARY, *self.code.order))
        return self._boundary

    def alone(self, slot: int) -> SegmentFunction:
        """The code that rebuilds one slot from what is stored, whatever has run before."""
        if slot not in self._solo:
            self._solo[slot] = self._compile((slot,)).segments[0]
        return self._solo[slot]

    def learn(self, order: tuple[int, ...]) -> None:
        """Backward has shown in which order it reads; later calls are compiled for it."""
        self.is_learning = False
        if order != self.code.order and sorted(order) == sorted(self.code.order):
            self.code = self._compile(order)
            self._boundary = None

    def check_sample(self, slot: int, sample: torch.Tensor, value: torch.Tensor) -> None:
        """Compare a rebuilt slot with the elements that were taken from it in forward.

        Raises:
            ReplayMismatch: they differ in any bit (on a GPU: when backward ends).
        """
        with torch._C._AutoDispatchBelowAutograd():
            again = self._sample(slot, value)
            if must_defer(value.device.type):
                self._policy.deferred.add((sample != again).any(), functools.partial(self._fail, slot))
                return
            if torch.equal(sample, again):
                return
        if value.dtype.is_floating_point and same_bits(sample.view(value.dtype), again.clone().view(value.dtype)):
            return
        self._fail(slot)

    def _fail(self, slot: int) -> None:
        """Turn the region to the fallback and stop the step.

        Raises:
            ReplayMismatch: always.
        """
        self.has_failed = True
        name = self.graph.values[self.graph.slots[slot].value].name
        producer = self.graph.ops[self.graph.values[self.graph.slots[slot].value].producer].name
        raise ReplayMismatch(
            f"{name!r} of region {self.name!r} was not rebuilt as forward made it.",
            why=f"op {producer!r} or one before it got other constants or data than when the region was recorded",
            next="the optimizer has not stepped; run the step again: the region is re-run as a whole from now on",
        )

    def _compile(self, order: tuple[int, ...]) -> Code:
        dropped = self.choice.dropped
        if BOUNDARY in order:
            dropped = dropped | (frozenset(self.graph.outputs) - self.choice.stored)
        schedule = build_schedule(self.graph, self.choice.stored, dropped, order)
        visible = {slot: self._visible(slot, leaves) for slot, leaves in schedule.leaves.items()}
        shown = type(schedule)(segments=schedule.segments, leaves=visible)
        segments = compile_segments(self.graph, self._recording, shown, self._sources)
        return Code(order, {slot: i for i, slot in enumerate(order)}, segments)

    def _visible(self, slot: int, leaves: Iterable[int]) -> tuple[int, ...]:
        """What a recipe reads from cells; for the boundary also the outputs that are held as they are."""
        held = set(self.graph.outputs) & self.choice.stored if slot == BOUNDARY else set()
        return tuple(v for v in sorted(held.union(leaves)) if v not in self._sources.parameters)

    def _find_sources(self) -> tuple[dict[int, int], dict[int, int]]:
        """For stored values: the first kept slot that holds it, else the input position that it came in at."""
        cell_of: dict[int, int] = {}
        for index in self._kept_slots:
            value = self.graph.slots[index].value
            if value >= 0:
                cell_of.setdefault(value, index)
        input_of = {
            value.id: int(value.name.split(":")[1])
            for value in self.graph.values
            if value.origin is Origin.INPUT and value.id not in cell_of and value.id != self.choice.link
        }
        return cell_of, input_of

    def _find_twins(self) -> tuple[tuple[int, int], ...]:
        """Slots that showed one tensor from outside while recording; recipes read it through the first of them."""
        first: dict[int, int] = {}
        twins = []
        for index in self._kept_slots:
            value = self.graph.slots[index].value
            if (
                value >= 0
                and self.graph.values[value].origin is Origin.EXTERNAL
                and first.setdefault(value, index) != index
            ):
                twins.append((first[value], index))
        return tuple(twins)

    def _leaf_geometries(self) -> dict[int, Geometry]:
        geometries = {value: self._recording.slot_geometries[slot] for value, slot in self._cell_of.items()}
        for value in self._input_of:
            geometries[value] = self._recording.values[value].base
        if self.choice.link is not None:
            geometries[self.choice.link] = self._recording.values[self.choice.link].base
        return geometries

    def _plan_leaves(self) -> None:
        schedule = build_schedule(self.graph, self.choice.stored, self.choice.dropped, self.code.order)
        groups: dict[tuple[int, ...], list[int]] = {}
        for slot, leaves in schedule.leaves.items():
            visible = self._visible(slot, leaves)
            groups.setdefault(visible, []).append(slot)
        self._leaf_groups = tuple((leaves, tuple(slots)) for leaves, slots in groups.items())
        used = {value for leaves, _ in self._leaf_groups for value in leaves}
        self._needed_cells = tuple((value, slot) for value, slot in self._cell_of.items() if value in used)
        self._input_of = {value: position for value, position in self._input_of.items() if value in used}
        self._replayed = frozenset(schedule.ops)

    def _find_state_points(self) -> dict[int, tuple[tuple[int, torch.Generator], ...]]:
        points: dict[int, dict[int, torch.Generator]] = {}
        for op_id in self._replayed:
            point = self._recording.ops[op_id].random_point
            if point is not None:
                points.setdefault(point[1], {})[point[0]] = self._recording.generators[point[0]]
        return {slot: tuple(found.items()) for slot, found in points.items()}

    def _find_sentinels(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]]:
        """The last slot of every chain: dropped values that no replayed op reads, each sampled at its first slot."""
        read = {value for op in self._replayed for value in self.graph.ops[op].reads}
        chosen: dict[int, int] = {}
        for slot in self._dropped_slots:
            value = self.graph.slots[slot].value
            if value not in read and self.graph.values[value].origin is Origin.OP:
                chosen.setdefault(value, slot)
        shapes = {slot: _sample_geometry(self._recording.slot_geometries[slot]) for slot in chosen.values()}
        return {slot: shape for slot, shape in shapes.items() if shape is not None}

    def _take_samples(self, frame: Frame) -> None:
        """Take elements of the sentinel slots, as integers: bits are compared, not values."""
        self._calls += 1
        if not self._sentinels or self._calls % self._policy.every:
            return
        with torch._C._AutoDispatchBelowAutograd():
            for slot in self._sentinels:
                frame.cells[slot].sample = self._sample(slot, frame.tensors[slot]).clone()

    def _sample(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        size, stride, offset, integers = self._sentinels[slot]
        return torch.as_strided(tensor.view(integers), size, stride, offset)

    def _copy_inputs(self, inputs: Sequence[torch.Tensor], versions: Sequence[int]) -> dict[int, Readable] | None:
        copies: dict[int, Readable] = {}
        for value, position in self._input_of.items():
            tensor = inputs[position].detach()
            if tensor._version != versions[position] or Geometry.of(tensor) != self._recording.values[value].base:
                return None
            copies[value] = Copy(copy_storage(tensor))
        return copies

    def _read_parameters(self) -> tuple[torch.Tensor, ...]:
        return tuple(
            source.holder[source.key].detach().clone() if source.is_copied else source.holder[source.key]
            for source in self._parameters
        )


def _sample_geometry(geometry: Geometry) -> tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype] | None:
    """Size, stride, offset and integer type of up to 16 elements of a tensor, spread over it where it is dense."""
    count = math.prod(geometry.size)
    if count == 0 or geometry.dtype.itemsize not in INTEGER_OF_SIZE or geometry.dtype.is_complex:
        return None
    integers = INTEGER_OF_SIZE[geometry.dtype.itemsize]
    span = 1 + sum((size - 1) * stride for size, stride in zip(geometry.size, geometry.stride, strict=True))
    if span == count:
        return (min(SAMPLE_SIZE, count),), (max(1, count // SAMPLE_SIZE),), geometry.offset, integers
    size, stride = max(zip(geometry.size, geometry.stride, strict=True))
    return (min(SAMPLE_SIZE, size),), (stride,), geometry.offset, integers
