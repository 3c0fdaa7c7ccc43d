"""What a region does in a steady call: which slots it keeps, which it drops, and the code that brings those back."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plimsoll.artifacts.region import Origin, RegionGraph
from plimsoll.engine.cells import Cell, Copy, Readable
from plimsoll.engine.choosing import Choice, choose
from plimsoll.engine.compile import Recording, SegmentFunction, Sources, compile_segments, copy_storage
from plimsoll.engine.frame import Frame, Link
from plimsoll.engine.randomness import ENTRY
from plimsoll.engine.sentinels import SentinelPolicy, must_defer, sample_geometry
from plimsoll.engine.split_backward import Halves
from plimsoll.engine.stored_forms import Packer, Refused, Source, is_exact, plan_packing
from plimsoll.errors import ReplayMismatch
from plimsoll.planning.replay_schedule import BOUNDARY, Unreachable, build_schedule, recipe_ops
from plimsoll.tracing.local_tensors import is_sharded, local_of, settled, version_of
from plimsoll.tracing.recorder.collectives import is_collective
from plimsoll.tracing.recorder.storages import Geometry, same_bits

_GONE = torch.empty(0)
"""Stands where a packed tensor was."""
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
        packer: Packer,
        payload_shares: Mapping[str, float],
        call: int,
        halves: Halves | None,
    ) -> None:
        self.name = name
        self.graph = graph
        self.halves = halves
        self.choice = choice
        self.device_type = device_type
        self.is_learning = True
        self.has_failed = False
        self._recording = recording
        self._not_rebuildable = not_rebuildable
        self._node_counts = node_counts
        self._specs = tuple((g.size, g.dtype, g.stride, g.offset) for g in recording.slot_geometries)
        self._parameters = tuple(source for _, source in parameters)
        self._packer = packer
        self._codecs = {value: packer.codec(form) for value, form in choice.packed.items()}
        self._packing = plan_packing(graph, choice, recording.slot_geometries, self._codecs, payload_shares)
        self.call = call
        self._dropped_slots = tuple(s.index for s in graph.slots if s.is_managed and s.value in choice.gone)
        dropped = set(self._dropped_slots)
        self._kept_slots = tuple(s.index for s in graph.slots if s.index not in dropped)
        self._twins = self._find_twins()
        self._solo: dict[int, SegmentFunction] = {}
        self._boundary: Code | None = None
        self._cell_of, self._input_of = self._find_sources()
        self._sources = self._name_sources([value for value, _ in parameters])
        order = tuple(slot for slot in graph.backward_order if slot in dropped)
        self.code = self._compile(order)
        self._plan_leaves()
        self.state_points = self._find_state_points()
        self.exact_slots = self._find_exact_slots()
        self._sentinels = self._find_sentinels()
        self._policy = policy
        self._calls = 0
        self.refused: dict[tuple[str, str], int] = {}
        """How often a value (by name and codec) was kept because its codec could not take it."""
        self.signs = {
            slot.index: graph.values[slot.value].name
            for slot in graph.slots
            if (codec := self._codecs.get(slot.value)) is not None and codec.keeps_sign_only
        }

    @property
    def collectives(self) -> tuple[str, ...]:
        """The ops by which recipes talk to other ranks, in the order in which backward runs them."""
        recorded = (self._recording.ops[op] for op in self._replayed_in_order)
        return tuple(op.name for op in recorded if is_collective(op.func))

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
        if not frame.lies_like(self._recording.layouts):
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
        return all(cells[index].version_now(tensors[index]) == cells[index].version for index in self._dropped_slots)

    def finish(
        self, frame: Frame, inputs: Sequence[torch.Tensor], versions: Sequence[int], link: Link | None
    ) -> dict[int, Readable] | None:
        """Turn the open cells of a call that fits into kept and dropped ones; ``None`` (and nothing done) if it cannot.

        ``versions`` are those that the inputs had when the region was entered. Returns what is held instead of packed
        values.

        Raises:
            OffloadFailed: the link has no room; nothing is done.
        """
        copies = self._copy_inputs(inputs, versions)
        if copies is None:
            return None
        samples = self._take_samples(frame)
        packed = self._pack(frame)
        cells, tensors = frame.cells, frame.tensors
        for index in self._kept_slots:
            cells[index].keep(tensors[index])
        readable: dict[int, Readable] = {value: cells[slot] for value, slot in self._needed_cells}
        readable.update(copies)
        readable.update(packed)
        if self.choice.link is not None:
            assert link is not None
            readable[self.choice.link] = link
        for leaves, slots in self._leaf_groups:
            sources = tuple(readable[value] for value in leaves)
            for slot in slots:
                cells[slot].drop(sources)
        for slot, sample in samples.items():
            cells[slot].sample = sample
        waiting = {slot: weakref.ref(cells[slot]) for slot in self._dropped_slots}
        frame.program = self
        frame.bind(self._read_parameters(), waiting)
        frame.close()
        return packed

    def _pack(self, frame: Frame) -> dict[int, Readable]:
        """Encode or send packed values, letting go of each at once."""
        packed: dict[int, Readable] = {}
        if not self._packing:
            return packed
        if torch.is_autocast_enabled(self.device_type):  # codecs compute in the precision that they were measured in
            with torch.autocast(self.device_type, enabled=False):
                return self._pack(frame)
        tensors = frame.tensors
        for packing in self._packing:
            source = Source(tensors[packing.slots[0]], frame.cells[packing.slots[0]].shell)
            seed = zlib.crc32(f"{self.name}/{self.call}/{packing.value}/{self._calls}".encode())
            try:
                with torch._C._AutoDispatchBelowAutograd():
                    one = self._packer.pack(source, packing.form, seed=seed, most_bytes=packing.most_bytes)
            except BaseException:
                frame.close()  # its tensors, cells and graph hold each other, and the collector cannot see that
                raise
            packed[packing.value] = one
            if isinstance(one, Refused):
                key = (self.graph.values[packing.value].name, packing.form)
                self.refused[key] = self.refused.get(key, 0) + 1
            del source, one
            for slot in packing.slots:
                tensors[slot] = _GONE
        return packed

    def boundary_leaves(
        self, cells: Sequence[Cell], packed: Mapping[int, Readable], link: Link | None
    ) -> tuple[Readable, ...] | None:
        """What remaking the outputs starts from, for a region whose boundary is dropped; ``None`` if they cannot be."""
        outputs = frozenset(self.graph.outputs)
        dropped = outputs - self.choice.stored - self.choice.packed.keys()
        try:
            schedule = build_schedule(self.graph, self.choice.stored, dropped, (BOUNDARY,), packed=self.choice.packed)
        except Unreachable:
            return None
        readable: dict[int, Readable] = {value: cells[slot] for value, slot in self._cell_of.items()}
        readable.update(packed)
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

    @property
    def leaf_slots(self) -> tuple[int, ...]:
        """Kept slots that recipes start from."""
        return tuple(slot for _, slot in self._needed_cells)

    def recipe_of(self, slot: int) -> tuple[int, ...]:
        """The ops that rebuild a dropped slot."""
        stored = self.choice.stored | self.choice.packed.keys()
        return recipe_ops(self.graph, self.graph.slots[slot].value, stored)[0]

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
        value = self.graph.slots[slot].value
        name = self.graph.values[value].name
        if value in self.choice.packed:
            raise ReplayMismatch(
                f"{name!r} of region {self.name!r} came back from {self.choice.packed[value]!r} as something else.",
                why="the codec or the link gave back other bytes than forward made",
                next="the optimizer has not stepped; run the step again: the region is re-run as a whole from now on",
            )
        producer = self.graph.ops[self.graph.values[value].producer].name
        leaves = next(leaves for leaves, slots in self._leaf_groups if slot in slots)
        forms = [
            f", or {form!r} gave back another {self.graph.values[leaf].name!r}"
            for leaf, form in self.choice.packed.items()
            if leaf in leaves
        ]
        raise ReplayMismatch(
            f"{name!r} of region {self.name!r} was not rebuilt as forward made it.",
            why=f"op {producer!r} or one before it got other constants or data than when the region was recorded"
            + "".join(forms),
            next="the optimizer has not stepped; run the step again: the region is re-run as a whole from now on",
        )

    def _compile(self, order: tuple[int, ...]) -> Code:
        dropped = self.choice.dropped
        if BOUNDARY in order:
            dropped = dropped | (frozenset(self.graph.outputs) - self.choice.stored - self.choice.packed.keys())
        schedule = build_schedule(self.graph, self.choice.stored, dropped, order, self.choice.packed)
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
            if value.origin is Origin.INPUT
            and value.id not in cell_of
            and value.id != self.choice.link
            and value.id not in self.choice.packed
        }
        return cell_of, input_of

    def _name_sources(self, parameters: Sequence[int]) -> Sources:
        sources = self._parameters
        return Sources(
            parameters={value: position for position, value in enumerate(parameters)},
            protected={i: f"{s.name} of region {self.name!r}" for i, s in enumerate(sources) if s.is_checked},
            geometries=self._leaf_geometries(),
            links=frozenset() if self.choice.link is None else frozenset({self.choice.link}),
            packed=frozenset(self.choice.packed),
            sharded=frozenset(i for i, s in enumerate(sources) if is_sharded(s.holder[s.key])),
        )

    def _find_twins(self) -> tuple[tuple[int, int], ...]:
        """Slots that showed one tensor from outside while recording; it is read, or packed, through the first of them."""
        first: dict[int, int] = {}
        twins = []
        for index in range(len(self.graph.slots)):
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
        for packing in self._packing:
            dtype = self._recording.slot_geometries[packing.slots[0]].dtype
            count = self.graph.values[packing.value].bytes // dtype.itemsize
            geometries[packing.value] = Geometry((count,), (1,), 0, dtype)
        return geometries

    def _plan_leaves(self) -> None:
        schedule = build_schedule(
            self.graph, self.choice.stored, self.choice.dropped, self.code.order, self.choice.packed
        )
        groups: dict[tuple[int, ...], list[int]] = {}
        for slot, leaves in schedule.leaves.items():
            visible = self._visible(slot, leaves)
            groups.setdefault(visible, []).append(slot)
        self._leaf_groups = tuple((leaves, tuple(slots)) for leaves, slots in groups.items())
        used = {value for leaves, _ in self._leaf_groups for value in leaves}
        self._needed_cells = tuple((value, slot) for value, slot in self._cell_of.items() if value in used)
        self._input_of = {value: position for value, position in self._input_of.items() if value in used}
        self._replayed_in_order = schedule.ops
        self._replayed = frozenset(schedule.ops)

    def _find_state_points(self) -> dict[int, tuple[tuple[int, torch.Generator], ...]]:
        points: dict[int, dict[int, torch.Generator]] = {}
        for op_id in self._replayed:
            point = self._recording.ops[op_id].random_point
            if point is not None:
                points.setdefault(point[1], {})[point[0]] = self._recording.generators[point[0]]
        return {slot: tuple(found.items()) for slot, found in points.items()}

    def _find_exact_slots(self) -> tuple[int, ...]:
        """Dropped slots that do not come from a lossy form: what comes back is what forward made."""
        lossy = {v for v, codec in self._codecs.items() if codec is not None and not is_exact(codec)}
        from_lossy = {slot for leaves, slots in self._leaf_groups if lossy.intersection(leaves) for slot in slots}
        return tuple(slot for slot in self._dropped_slots if slot not in from_lossy)

    def _find_sentinels(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]]:
        """Values that are packed exactly, and the last of every chain: dropped values that no replayed op reads.

        Each is sampled at its first slot.
        """
        read = {value for op in self._replayed for value in self.graph.ops[op].reads}
        chosen: dict[int, int] = {}
        for slot in self.exact_slots:
            value = self.graph.slots[slot].value
            if value in self._codecs or (value not in read and self.graph.values[value].origin is Origin.OP):
                chosen.setdefault(value, slot)
        shapes = {slot: sample_geometry(self._recording.slot_geometries[slot]) for slot in chosen.values()}
        return {slot: shape for slot, shape in shapes.items() if shape is not None}

    def _take_samples(self, frame: Frame) -> dict[int, torch.Tensor]:
        """Elements of the sentinel slots, as integers: bits are compared, not values."""
        self._calls += 1
        if frame.inspection is not None or not self._sentinels or self._calls % self._policy.every:
            return {}
        with torch._C._AutoDispatchBelowAutograd():
            return {slot: self._sample(slot, frame.tensors[slot]).clone() for slot in self._sentinels}

    def _sample(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        size, stride, offset, integers = self._sentinels[slot]
        return torch.as_strided(tensor.view(integers), size, stride, offset)

    def _copy_inputs(self, inputs: Sequence[torch.Tensor], versions: Sequence[int]) -> dict[int, Readable] | None:
        copies: dict[int, Readable] = {}
        for value, position in self._input_of.items():
            if version_of(inputs[position]) != versions[position]:
                return None
            tensor = settled(inputs[position]).detach()
            if Geometry.of(tensor) != self._recording.values[value].base:
                return None
            copies[value] = Copy(copy_storage(tensor))
        return copies

    def _read_parameters(self) -> tuple[torch.Tensor, ...]:
        return tuple(
            local_of(source.holder[source.key]).detach().clone() if source.is_copied else source.holder[source.key]
            for source in self._parameters
        )
