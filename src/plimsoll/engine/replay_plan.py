"""What happens to each saved tensor of a region (a module that the plan decides about) in calls with one signature (shapes and
dtypes): it is kept, packed (held by a codec or sent over a link), or dropped and rebuilt by certain ops.

`choose` resolves the names in a plan to values of the recorded graph. A `ReplayPlan` follows from the result alone and never
changes: calls of the region, and replays in their backwards, only read it.

A *slot* is one saved tensor, numbered in the order of saving. A *value* is the content of one storage; several slots can be
views of the same value. A *leaf* of a recipe is a stored value that the recipe starts from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from plimsoll.artifacts.region import Origin, RegionGraph
from plimsoll.engine.codecs.protocol import Codec
from plimsoll.engine.hooks import Cell, Readable
from plimsoll.engine.replay_code import Code, RecordedRegion, Sources, WrittenSegments, write_segments
from plimsoll.engine.replay_rng import StatePoints, state_points
from plimsoll.engine.torch_calls import Number, Unknown
from plimsoll.engine.torch_flags import Flags
from plimsoll.planning.replay_schedule import BOUNDARY, Schedule, Unreachable, build_schedule, recipe_ops
from plimsoll.tracing.recorder.collectives import is_collective
from plimsoll.tracing.recorder.storages import Geometry


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """Data about a parameter or buffer that recipes (ops that rebuild dropped tensors) read. ``place`` is the index of the
    tensor in the list that a call reads when it begins (`Entry.sources`).

    ``is_copied``: each call makes a copy, because the model may write to the tensor before backward. This is so for small
    buffers, and for small parameters that autograd does not save. ``is_checked``: the tensor must not change between forward
    and backward. Recipes read the memory that forward read, because a parameter may have other memory (``.data``) during
    forward. A parameter that ``is_gathered`` (ZeRO-3) is gathered into other memory for backward, and recipes read that memory.
    """

    name: str
    place: int
    is_copied: bool
    is_checked: bool
    is_sharded: bool
    is_gathered: bool = False

    @property
    def is_held(self) -> bool:
        """Whether recomputation reads the memory that this parameter or buffer had when the call began."""
        return self.is_checked and not self.is_gathered


@dataclass(frozen=True, slots=True)
class DropChoice:
    """Data: which values of a region are dropped, packed (held by a codec or a link) and stored. Values are given by their ids
    in the region's graph.

    ``stored`` are the value ids that stay in memory. ``obstacles`` maps a value's name to the reason why it cannot be dropped.
    """

    dropped: frozenset[int]
    stored: frozenset[int]
    link: int | None = None
    """The value id of an input that is not held, because recomputing the region that ran before rebuilds it; ``None`` if all
    inputs are held.
    """
    obstacles: Mapping[str, str] = field(default_factory=dict)
    packed: Mapping[int, str] = field(default_factory=dict)
    """A mapping from the id of a packed value to the name of its codec or link (to host memory or disk)."""

    @property
    def gone(self) -> frozenset[int]:
        """The ids of values whose tensors are freed after forward, because they are dropped or packed."""
        return self.dropped | self.packed.keys()


def choose(
    graph: RegionGraph,
    names: frozenset[str],
    not_rebuildable: Mapping[int, str],
    links: frozenset[int] = frozenset(),
    forms: Mapping[str, str] | None = None,
    is_private: Callable[[str], bool] = lambda form: False,
) -> DropChoice:
    """Return which values of a region to drop, pack and store, given the names of the values that a plan drops (``names``).

    Values that cannot be rebuilt are kept, and ``obstacles`` of the result says why. ``links`` are inputs that recomputing the
    region before can rebuild. ``forms`` maps the name of a value to pack to the name of its codec or link. ``is_private`` says
    for such a name whether the values that come back cannot be used to rebuild other values (only signs come back, for
    example).
    """
    slot_values = {slot.value for slot in graph.slots if slot.is_managed}
    packed = {v: forms[graph.values[v].name] for v in slot_values - links if forms and graph.values[v].name in forms}
    always = {value.id for value in graph.values if value.origin in (Origin.PARAMETER, Origin.BUFFER, Origin.INPUT)}
    always -= packed.keys()
    wanted = {v for v in slot_values if graph.values[v].name in names and graph.values[v].origin is Origin.OP}
    obstacles = {graph.values[v].name: not_rebuildable[v] for v in sorted(wanted) if v in not_rebuildable}
    dropped = {v for v in wanted if v not in not_rebuildable}
    while True:
        # Results of ops that autograd does not save cannot be held: that would cost a hook per submodule in every call.
        stored = always | (slot_values - dropped - packed.keys())
        failed: set[int] = set()
        for value in sorted(dropped):
            try:
                leaves = recipe_ops(graph, value, frozenset(stored | packed.keys()))[1]
                useless = next((leaf for leaf in leaves if leaf in packed and is_private(packed[leaf])), None)
                if useless is not None:
                    failed.add(value)
                    obstacles[graph.values[value].name] = (
                        f"it is computed from {graph.values[useless].name}, which is held only as {packed[useless]}"
                    )
            except Unreachable as unreachable:
                failed.add(value)
                obstacles[graph.values[value].name] = unreachable.obstacle
        if not failed:
            break
        # Keep one more value and try again. Take the earliest that fails: the other failures may all depend on it.
        dropped -= {min(failed)}
    gone = dropped | (links & slot_values)
    return DropChoice(frozenset(gone), frozenset(stored), next(iter(links), None), obstacles, packed)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplayPlan:
    """Data: what happens to each value of one region in calls with one signature (shapes and dtypes). Derived attributes are
    computed at first use and cached.

    ``codecs`` maps each packed value to its codec, or to ``None`` for a value that goes over the link. ``parameters`` are pairs
    of graph value and source, for all parameters and buffers that ops read. ``not_rebuildable`` maps the values that no recipe
    can rebuild to the reason.
    """

    name: str
    call: int
    device_type: str
    flags: Flags
    graph: RegionGraph
    recording: RecordedRegion
    choice: DropChoice
    codecs: Mapping[int, Codec | None]
    parameters: tuple[tuple[int, ParameterSource], ...]
    not_rebuildable: Mapping[int, str]
    steady: frozenset[int] = frozenset()
    """The value ids of inputs that the model's forward has made and does not write to again."""
    is_input_lossy: bool = False
    """Whether the region that rebuilds this one's dropped input does so from values that are stored with loss."""
    template: ReplayPlan | None = None
    """The plan with placeholders that were filled with numbers to make this plan. ``None`` if this plan was not made in this
    way.
    """
    numbers: tuple[Number, ...] = ()
    """The numbers that were filled into the template to make this plan."""

    def at(self, numbers: tuple[Number, ...], recording: RecordedRegion) -> ReplayPlan:
        """Return a copy of this plan with ``numbers`` filled in for the placeholders (for numbers that change from call to
        call).

        ``recording`` is the recorded region with the numbers filled in. Both plans share everything that does not depend on
        numbers. The bytes and geometries in the graph still contain placeholders: use ``bytes_of`` and ``geometry_of``.
        """
        for name, member in vars(ReplayPlan).items():
            if isinstance(member, cached_property):
                getattr(self, name)
        made = copy.copy(self)
        made.__dict__.update(template=self, numbers=numbers, recording=recording)
        return made

    def bytes_of(self, value: int) -> int:
        """Return the size of a value's storage in bytes."""
        return int(self._number(self.graph.values[value].bytes))

    def geometry_of(self, value: int) -> Geometry:
        """Return the geometry (size, strides, offset, dtype) that a value has in its storage when it is made."""
        return self.filled(self.recording.values[value].base)

    def filled(self, geometry: Geometry) -> Geometry:
        """Return a recorded geometry (size, strides, offset, dtype) with placeholders replaced by this plan's numbers."""
        return geometry.changed(self._number)

    def _number(self, number: Number | Unknown) -> Number:
        return self.numbers[number.index] if isinstance(number, Unknown) else number

    @cached_property
    def dropped_slots(self) -> tuple[int, ...]:
        """The numbers (in the order of saving) of the tensors that are not held after forward, so that backward must rebuild,
        decode or fetch them.
        """
        return tuple(s.index for s in self.graph.slots if s.is_managed and s.value in self.choice.gone)

    @cached_property
    def kept_slots(self) -> tuple[int, ...]:
        dropped = set(self.dropped_slots)
        return tuple(slot.index for slot in self.graph.slots if slot.index not in dropped)

    @cached_property
    def leaf_groups(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Pairs of stored values (leaves) and dropped tensors: the tensors of a pair are rebuilt from these stored values.

        Dropped tensors with equal leaves are in one pair, so that the objects in autograd share one tuple.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for slot, leaves in self._schedule.leaves.items():
            groups.setdefault(self._visible(slot, leaves), []).append(slot)
        return tuple((leaves, tuple(slots)) for leaves, slots in groups.items())

    @cached_property
    def needed_cells(self) -> tuple[tuple[int, int], ...]:
        """The stored values that recomputation starts from, each as a pair of value id and the number of the kept saved tensor
        that holds the value.
        """
        return tuple((value, slot) for value, slot in self._cell_of.items() if value in self._used)

    @cached_property
    def unsaved_inputs(self) -> tuple[tuple[int, int], ...]:
        """The inputs of the region that recomputation starts from and that autograd does not save, each as a pair of value id
        and input position.
        """
        return tuple((value, position) for value, position in self._input_of.items() if value in self._used)

    @cached_property
    def held_places(self) -> tuple[int, ...]:
        """The places (see `ParameterSource`) of the parameters and buffers that recomputation reads in the memory that they had
        when the call began.
        """
        return tuple(source.place for _, source in self.parameters if source.is_held)

    @cached_property
    def outside_cells(self) -> tuple[tuple[int, int], ...]:
        """The pairs of ``needed_cells`` (value id and kept saved tensor) whose value was not made inside the region.

        Such a value may be a parameter that gets other memory before backward.
        """
        origins = (Origin.INPUT, Origin.EXTERNAL)
        return tuple((value, slot) for value, slot in self.needed_cells if self.graph.values[value].origin in origins)

    @property
    def leaf_slots(self) -> tuple[int, ...]:
        """The kept saved tensors that recomputation starts from, as numbers in the order of saving."""
        return tuple(slot for _, slot in self.needed_cells)

    @cached_property
    def needs_inputs(self) -> bool:
        """Whether dropping tensors needs the call's input tensors: recomputation starts from an input, or an input is rebuilt
        by recomputing the region that ran before.
        """
        return bool(self.unsaved_inputs) or self.choice.link is not None

    @property
    def link_position(self) -> int:
        """The position, among the region's inputs, of the input that is not held because it is rebuilt: by recomputing the
        region that ran before.
        """
        assert self.choice.link is not None
        return int(self.graph.values[self.choice.link].name.split(":")[1])

    @cached_property
    def exact_slots(self) -> tuple[int, ...]:
        """The dropped tensors (as numbers in the order of saving) that do not depend on a lossy codec, so that they come back
        equal to forward's, bit for bit.
        """
        codecs = ((value, codec) for value, codec in self.codecs.items() if codec is not None)
        lossy = {value for value, codec in codecs if codec.keeps_sign_only or not codec.is_lossless}
        if self.is_input_lossy and self.choice.link is not None:
            lossy.add(self.choice.link)
        from_lossy = {slot for leaves, slots in self.leaf_groups if lossy.intersection(leaves) for slot in slots}
        return tuple(slot for slot in self.dropped_slots if slot not in from_lossy)

    @cached_property
    def twins(self) -> tuple[tuple[int, int], ...]:
        """Pairs of saved tensors (as numbers in the order of saving) that were the same tensor from outside of the region
        during recording.

        Such a tensor is read or packed only once, as the first of the pair.
        """
        first: dict[int, int] = {}
        shown = [slot for slot in self.graph.slots if slot.value >= 0]
        outside = [slot for slot in shown if self.graph.values[slot.value].origin is Origin.EXTERNAL]
        pairs = ((first.setdefault(slot.value, slot.index), slot.index) for slot in outside)
        return tuple((one, other) for one, other in pairs if one != other)

    @cached_property
    def signs(self) -> Mapping[int, str]:
        """The saved tensors that are held as signs only: a mapping from the number of the tensor (in the order of saving) to
        the value's name.
        """
        return {
            slot.index: self.graph.values[slot.value].name
            for slot in self.graph.slots
            if (codec := self.codecs.get(slot.value)) is not None and codec.keeps_sign_only
        }

    @cached_property
    def replayed_ops(self) -> tuple[int, ...]:
        """The ids of the ops that run again, in the order of backward."""
        return self._schedule.ops

    def ops_for(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return the ids of the ops that run again if backward reads only these dropped tensors (numbers in the order of
        saving).
        """
        return self._scheduled(slots).ops

    @cached_property
    def collectives(self) -> tuple[str, ...]:
        """The names of the collectives that recomputation repeats, in the order of backward."""
        recorded = (self.recording.ops[op] for op in self.replayed_ops)
        return tuple(op.name for op in recorded if is_collective(op.func))

    @cached_property
    def state_points(self) -> StatePoints:
        """The points where forward must record the states of random generators. Empty if recomputation repeats no random op."""
        return state_points((self.recording.ops[op] for op in self.replayed_ops), self.recording.generators)

    def compile(self, order: tuple[int, ...] | None = None) -> Code:
        """Return the recipes (ops that rebuild dropped tensors) as compiled Python functions, for a backward that reads the
        tensors in the order ``order``.

        Without ``order``, use the expected order.
        """
        return (self.template or self)._write(order).bind(self.numbers)

    def _write(self, order: tuple[int, ...] | None) -> WrittenSegments:
        written = self._written.get(order)
        if written is None:
            schedule = self._schedule if order is None else self._scheduled(order)
            visible = {slot: self._visible(slot, leaves) for slot, leaves in schedule.leaves.items()}
            shown = Schedule(segments=schedule.segments, leaves=visible)
            written = self._written[order] = write_segments(self.graph, self.recording, shown, self._sources)
        return written

    @cached_property
    def _written(self) -> dict[tuple[int, ...] | None, WrittenSegments]:
        return {}

    def recipe_of(self, slot: int) -> tuple[int, ...]:
        """Return the ids of the ops that rebuild a dropped tensor."""
        stored = self.choice.stored | self.choice.packed.keys()
        return recipe_ops(self.graph, self.graph.slots[slot].value, stored)[0]

    def boundary_leaves(
        self, cells: Sequence[Cell], packed: Mapping[int, Readable], link: Readable | None
    ) -> tuple[Readable, ...] | None:
        """Return the objects that hold the stored values for rebuilding the region's outputs. Return ``None`` if the outputs
        cannot be rebuilt.

        The next region has the outputs rebuilt if it does not hold its input, which is such an output. ``cells`` are the
        objects with the call's saved tensors, ``packed`` the values that are held by a codec or link, and ``link`` reads the
        output of the region before.
        """
        wanted = self._boundary_values
        readable: dict[int, Readable] = {value: cells[slot] for value, slot in self._cell_of.items()}
        readable.update(packed)
        if link is not None and self.choice.link is not None:
            readable[self.choice.link] = link
        if wanted is None or any(value not in readable for value in wanted):
            return None
        return tuple(readable[value] for value in wanted)

    @property
    def activation_bytes(self) -> int:
        """The total size in bytes of the storages that the region made and autograd saved. Each storage counts once."""
        return self._bytes_of(self._saved_values)

    @property
    def droppable_bytes(self) -> int:
        """The part of ``activation_bytes`` that recomputation could rebuild, bit for bit, from the inputs and parameters of the
        region.
        """
        names = frozenset(self.graph.values[v].name for v in self._saved_values)
        return self._bytes_of(choose(self.graph, names, self.not_rebuildable).dropped)

    @property
    def dropped_bytes(self) -> int:
        """The total size in bytes of the storages that the region made and that are freed because all tensors in them are
        dropped.

        Each storage counts once.
        """
        return self._bytes_of(v for v in self.choice.dropped if self.graph.values[v].origin is Origin.OP)

    @property
    def _saved_values(self) -> frozenset[int]:
        saved = {slot.value for slot in self.graph.slots if slot.is_managed}
        return frozenset(v for v in saved if self.graph.values[v].origin is Origin.OP)

    def _bytes_of(self, values: Iterable[int]) -> int:
        return sum({self.graph.values[v].storage: self.bytes_of(v) for v in values}.values())

    @cached_property
    def _boundary_values(self) -> tuple[int, ...] | None:
        """The ids of the stored values for rebuilding the outputs of the region; ``None`` if the outputs cannot be rebuilt."""
        dropped = frozenset(self.graph.outputs) - self.choice.stored - self.choice.packed.keys()
        try:
            schedule = build_schedule(self.graph, self.choice.stored, dropped, (BOUNDARY,), self.choice.packed)
        except Unreachable:
            return None
        leaves = schedule.leaves.get(BOUNDARY)
        return None if leaves is None else self._visible(BOUNDARY, leaves)

    @cached_property
    def _schedule(self) -> Schedule:
        """All ops that recomputation runs, in the order that backward is expected to need. The order is used until a backward
        has shown its real order.
        """
        dropped = set(self.dropped_slots)
        return self._scheduled([slot for slot in self.graph.backward_order if slot in dropped])

    def _scheduled(self, order: Sequence[int]) -> Schedule:
        dropped = self.choice.dropped
        if BOUNDARY in order:
            dropped = dropped | (frozenset(self.graph.outputs) - self.choice.stored - self.choice.packed.keys())
        return build_schedule(self.graph, self.choice.stored, dropped, order, self.choice.packed)

    def _visible(self, slot: int, leaves: Iterable[int]) -> tuple[int, ...]:
        """Return the ids of the values that recomputing a dropped tensor (``slot`` is its number) reads from cells, the objects
        that hold saved tensors. Parameters are left out, because they are read elsewhere.

        `BOUNDARY` in place of a number means the outputs of the region. For it, the outputs that are held are added.
        """
        held = set(self.graph.outputs) & self.choice.stored if slot == BOUNDARY else set()
        return tuple(v for v in sorted(held.union(leaves)) if v not in self._sources.parameters)

    @cached_property
    def _used(self) -> frozenset[int]:
        return frozenset(value for leaves, _ in self.leaf_groups for value in leaves)

    @cached_property
    def _cell_of(self) -> Mapping[int, int]:
        """A mapping from each stored value to the first kept saved tensor that holds it (its number in the order of saving)."""
        cells: dict[int, int] = {}
        for index in self.kept_slots:
            value = self.graph.slots[index].value
            if value >= 0:
                cells.setdefault(value, index)
        return cells

    @cached_property
    def _input_of(self) -> Mapping[int, int]:
        """A mapping from each stored input that autograd does not save to its position among the inputs of the region."""
        elsewhere = {*self._cell_of, *self.choice.packed, self.choice.link}
        return {
            value.id: int(value.name.split(":")[1])
            for value in self.graph.values
            if value.origin is Origin.INPUT and value.id not in elsewhere
        }

    @cached_property
    def _sources(self) -> Sources:
        sources = list(enumerate(source for _, source in self.parameters))
        return Sources(
            parameters={value: position for position, (value, _) in enumerate(self.parameters)},
            protected={i: f"{s.name} of region {self.name!r}" for i, s in sources if s.is_checked},
            held={i: s.place for i, s in sources if s.is_held},
            geometries=self._leaf_geometries(),
            links=frozenset() if self.choice.link is None else frozenset({self.choice.link}),
            packed=frozenset(self.choice.packed),
            sharded=frozenset(i for i, s in sources if s.is_sharded),
        )

    def _leaf_geometries(self) -> dict[int, Geometry]:
        geometries = {value: self.recording.slot_geometries[slot] for value, slot in self._cell_of.items()}
        inputs = [*self._input_of] if self.choice.link is None else [*self._input_of, self.choice.link]
        geometries.update({value: self.recording.values[value].base for value in inputs})
        for slot in self.graph.slots:
            # whole storages are packed, and come back as flat tensors
            if slot.is_managed and slot.value in self.choice.packed:
                dtype = self.recording.slot_geometries[slot.index].dtype
                nbytes: int | Unknown = self.graph.values[slot.value].bytes
                count: Any = nbytes if isinstance(nbytes, Unknown) else nbytes // dtype.itemsize
                geometries.setdefault(slot.value, Geometry((count,), (1,), 0, dtype))
        return geometries
