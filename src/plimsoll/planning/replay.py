"""Simulates how one region (module call), or a chain of linked regions, recomputes dropped values: bytes and ops at each
instant.

A *replay* is this recomputation in backward. Regions are *linked* if one drops its input and an earlier one rebuilds it. A
replay has private memory: ops allocate buffers, in-place ops take buffers over, and a buffer lives until both the schedule and
the slots (tensors that autograd saved) made of it release it. ``simulate`` adds these bytes to everything else. The choices
(what to keep or recompute) of the integer program are measured by the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Form
from plimsoll.planning.choice import Choice
from plimsoll.planning.replay_schedule import BOUNDARY, NO_OP, Schedule, Segment, build_schedule
from plimsoll.planning.step import RegionView, Span, StepIndex, provider_of, slot_stop

Level = tuple[int, int]
"""A pair (instant, bytes): the bytes of rebuilt values from this instant until the next level. An instant is a moment before or
during an op."""
Live = tuple[str, int]
"""A pair for one buffer that is alive: its label, and its bytes."""
_ALL_AT_ONCE = -1
"""Stands for the position of a saved tensor in the order of reading. It means the moment when a compiled module brings back all
compressed and offloaded values at once.
"""


class BufferEvent(NamedTuple):
    """Data: one allocation (positive bytes) or release (negative bytes) of a buffer that recomputation uses.

    Events are at even instants. With ``is_due`` the buffer is released because saved tensors (slots) end, before anything is
    rebuilt at that instant. A workspace (memory that an op needs while it runs) is a buffer that lives for one op.
    """

    instant: int
    buffer: int
    bytes: int
    label: str
    is_due: bool = False


@dataclass(slots=True)
class Replay:
    """Data: the memory that one simulated recomputation needs, in addition to the bytes that are in memory under any plan.

    ``holds`` maps storages of the trace to spans of instants while kept values hold them; spans may overlap each other and the
    fixed bytes. ``copies`` are private copies of inputs (span, bytes, label). ``payloads`` are the bytes that packed
    (compressed or offloaded) values leave on the device, and ``packing`` is the extra memory for making the payloads, at the
    instant when forward ends. ``levels`` are the bytes of rebuilt values: each entry is valid until the next one, and at an
    even instant it is the maximum during the recomputation that runs there.
    """

    holds: dict[int, list[Span]] = field(default_factory=dict)
    copies: list[tuple[Span, int, str]] = field(default_factory=list)
    payloads: list[tuple[Span, int, str]] = field(default_factory=list)
    packing: list[tuple[Span, int, str]] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    ops: list[tuple[int, int]] = field(default_factory=list)
    """The ops that run again, as (region, op) pairs in the order of running."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """The packed (compressed or offloaded) values that are brought back, as (region, value) pairs in the order of bringing
    back.
    """
    live: list[Live] = field(default_factory=list)
    """The label and bytes of each rebuilt buffer that is alive at the watched instant. Within this instant, the moment counts
    when these bytes are largest."""
    buffers: list[BufferEvent] = field(default_factory=list)
    """All allocations and releases of the buffers that the recomputation uses, in order."""

    def has_rebuilt(self, instant: int) -> bool:
        """Return True if any rebuilt value is in memory at an instant.

        At an even instant, where recomputation runs, a moment of this recomputation is enough.
        """
        levels = dict(self.levels)
        before = [at for at in levels if at <= instant]
        return bool(before) and levels[max(before)] > 0


@dataclass(slots=True)
class _Memory:
    """The simulated buffers of a recomputation, each with a count of references.

    Allocations and releases are added to ``log``.
    """

    log: list[BufferEvent]
    bytes_now: int = 0
    instant: int = 0
    sizes: list[int] = field(default_factory=list)
    references: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def allocate(self, size: int, label: str) -> int:
        """Add a buffer of ``size`` bytes that has one reference, and return the buffer's number."""
        self.sizes.append(size)
        self.references.append(1)
        self.labels.append(label)
        self.bytes_now += size
        buffer = len(self.sizes) - 1
        self.log.append(BufferEvent(self.instant, buffer, size, label))
        return buffer

    def retain(self, buffer: int) -> int:
        """Add a reference to a buffer. Return the buffer's number, which was passed in."""
        self.references[buffer] += 1
        return buffer

    def release(self, buffer: int, *, is_due: bool = False) -> None:
        """Remove a reference from a buffer, and free the buffer if it was the last one."""
        self.references[buffer] -= 1
        if not self.references[buffer]:
            size = self.sizes[buffer]
            self.bytes_now -= size
            self.log.append(BufferEvent(self.instant, buffer, -size, self.labels[buffer], is_due))

    def alive(self) -> list[Live]:
        """Return a list with the label and the bytes of each buffer that is alive."""
        return [
            (label, size)
            for label, size, references in zip(self.labels, self.sizes, self.references, strict=True)
            if references > 0
        ]


@dataclass(slots=True)
class _Part:
    """The state of one region during a simulated recomputation: its schedule, and the buffer of each of its values."""

    view: RegionView
    choice: Choice
    schedule: Schedule
    linked: frozenset[int]
    """The dropped inputs of this region, as ids of values. The provider, an earlier region, must rebuild them."""
    provider: int
    asked: bool = False
    buffer_of: dict[int, int] = field(default_factory=dict)
    consumers: list[int] = field(default_factory=list)
    segments: dict[int, Segment] = field(default_factory=dict)


def replay(
    index: StepIndex, choices: Mapping[int, Choice], linked: Mapping[int, frozenset[int]], watch: int = -1
) -> Replay:
    """Simulate the recomputation of these regions together, and return the bytes and ops that their choices add.

    Args:
        index: the step.
        choices: maps each region to its choice; values that the choice does not hold are rebuilt.
        linked: maps each region whose input is dropped to the input values that an earlier region rebuilds.
        watch: an instant at which to list the live buffers (-1: none).

    Raises:
        Unreachable: a dropped value cannot be rebuilt.
    """
    machine = _Machine(index, choices, linked, watch)
    machine.hold()
    machine.run()
    return machine.out


class _Machine:
    """The simulation of one recomputation of one region, or of several linked ones.

    Call ``hold``, then ``run``; then ``out`` has the results.
    """

    def __init__(
        self, index: StepIndex, choices: Mapping[int, Choice], linked: Mapping[int, frozenset[int]], watch: int
    ) -> None:
        self.index = index
        self.watch = watch
        self.out = Replay()
        self.memory = _Memory(self.out.buffers)
        self.highest = 0
        self.watched = -1
        self.releases: dict[int, list[int]] = {}
        self.parts: dict[int, _Part] = {}
        # Later regions first: backward reaches them first, and a provider needs the list of its consumers.
        for region in sorted(choices, reverse=True):
            self.parts[region] = self._part(region, choices[region], linked)

    def _part(self, region: int, choice: Choice, linked: Mapping[int, frozenset[int]]) -> _Part:
        """Return the state of one region before backward begins.

        It has the region's schedule of recomputation, its dropped inputs, and the region that rebuilds them.
        """
        view = self.index.views[region]
        graph = view.graph
        mine = linked.get(region, frozenset())
        provider = provider_of(self.index, view, mine)
        consumers = [r for r, part in self.parts.items() if part.provider == region]
        choice = choice.without(mine)
        stored = view.leaves | choice.kept | mine
        dropped = view.everything - choice.kept - choice.forms.keys() - mine
        order = graph.backward_order
        if consumers:
            order = (BOUNDARY, *order)
            dropped |= frozenset(v for v in graph.outputs if v not in stored and v not in choice.forms)
        schedule = build_schedule(graph, stored, dropped, order, choice.forms)
        segments = {segment.slot: segment for segment in schedule.segments}
        return _Part(view, choice, schedule, mine, provider, consumers=consumers, segments=segments)

    # Memory between forward and backward --------------------------------------------------------------------------

    def hold(self) -> None:
        """Record from when to when memory is held for kept values, for the values that recomputation starts from (leaves), for
        copies of inputs, and for payloads of compressed values.
        """
        for part in self.parts.values():
            for value in part.choice.kept:
                for slot in part.view.slots_of[value]:
                    self._hold(part, value, 2 * slot.packed, slot_stop(self.index.trace, slot))
            copied: dict[int, int] = {}
            packed: dict[int, int] = {}
            for slot_index, leaves in part.schedule.leaves.items():
                stop = self._stop(part, slot_index)
                for leaf in leaves:
                    if leaf in part.view.free or leaf in part.linked:
                        continue
                    if leaf in part.choice.forms:
                        packed[leaf] = max(packed.get(leaf, 0), stop)
                    elif leaf in part.view.copied - part.view.steady:
                        copied[leaf] = max(copied.get(leaf, 0), stop)
                    else:
                        entry = part.view.call.forward[0]
                        first = min((slot.packed for slot in part.view.slots_of.get(leaf, ())), default=entry)
                        self._hold(part, leaf, 2 * first, stop)
            entry = 2 * part.view.call.forward[0]
            for leaf, stop in copied.items():
                value_ = part.view.graph.values[leaf]
                label = f"{part.view.call.name} copy of {value_.name}"
                self.out.copies.append(((entry, stop), value_.bytes, label))
            self._hold_packed(part, packed)

    def _hold_packed(self, part: _Part, stops: Mapping[int, int]) -> None:
        """Record the memory of a module call's packed (compressed or offloaded) values until their last reader releases them.

        A compressed value has a payload on the device. An offloaded value has its source tensor, until the transfer ends.

        Payloads are made one after the other, the largest saving first, and each source is freed at once. The extra memory of
        packing is the maximum of this sequence, on top of all that forward saved. Compiled code is different: it hands over all
        saved values when its forward ends and takes all of them back when its backward begins. So its sources live until
        forward ends, and its payloads are freed when backward begins.
        """
        call = part.view.call
        exit_ = 2 * call.forward[1]
        for value, stop in stops.items():
            form = self._form(part, value)
            # The default is for an input that no slot holds.
            first = min((slot.packed for slot in part.view.slots_of.get(value, ())), default=call.forward[0])
            if form.decision is Decision.OFFLOAD:
                self._hold(part, value, 2 * first, self._transfer(part, value)[0])
                continue
            if call.unpacks_at_once:
                self._hold(part, value, 2 * first, exit_)
            until = 2 * call.backward[0] + 1 if call.unpacks_at_once else stop
            self.out.payloads.append(((exit_, until), form.held_bytes, self._label(part, value)))
        most = self._packing_bytes(part, stops)
        if most:
            self.out.packing.append(((exit_ - 1, exit_), most, f"{part.view.call.name} packing"))

    def _packing_bytes(self, part: _Part, values: Collection[int]) -> int:
        """Return the most bytes that are needed in addition while values are compressed at the end of the forward of a region.

        They are payloads (compressed values) and workspaces, on top of the tensors that forward saved, minus source tensors
        that are already freed.
        """
        forms = {v: self._form(part, v) for v in part.view.saved if v in values}
        entries = part.view.graph.values
        waiting = [v for v, form in forms.items() if form.decision is not Decision.OFFLOAD]
        waiting.sort(key=lambda v: forms[v].held_bytes - entries[v].bytes)
        exit_ = 2 * part.view.call.forward[1]
        now = most = 0
        for at, value in enumerate(waiting):
            now += forms[value].held_bytes
            most = max(most, now + forms[value].workspace_bytes)
            storage = entries[value].storage
            spans = (*self.index.covered(storage), *self.out.holds.get(storage, ()))
            stays = part.view.call.unpacks_at_once or any(entries[v].storage == storage for v in waiting[at + 1 :])
            if not stays and not any(start <= exit_ < stop for start, stop in spans):
                now -= entries[value].bytes
        return most

    def _form(self, part: _Part, value: int) -> Form:
        return part.view.form(value, part.choice.forms[value])

    def _label(self, part: _Part, value: int) -> str:
        return f"{part.view.call.name} {part.choice.forms[value]} of {part.view.graph.values[value].name}"

    def _transfer(self, part: _Part, value: int) -> Span:
        """Return two instants for an offloaded value: when its memory is freed, and when room for it is allocated again."""
        region = part.view.call.index
        if self.index.transfers is not None:
            return self.index.transfers.spans[region, value]
        after = self.index.neighbour(region)
        assert after is not None, "only regions with a neighbour have forms that go over a link"
        return 2 * after.forward[1], 2 * after.backward[0]

    def _hold(self, part: _Part, value: int, start: int, stop: int) -> None:
        """Record that the storage of a value of a region is in memory from the instant ``start`` to the instant ``stop``."""
        self.out.holds.setdefault(part.view.graph.values[value].storage, []).append((start, stop))

    def _stop(self, part: _Part, slot_index: int) -> int:
        """Return the instant at which a saved tensor (slot) releases its leaves, the held values that it is rebuilt from.

        For ``BOUNDARY`` (the region's outputs), it is the instant when all regions that need the outputs are done.
        """
        if slot_index != BOUNDARY:
            return slot_stop(self.index.trace, part.view.graph.slots[slot_index])
        return max(self._needed_until(self.parts[r]) for r in part.consumers)

    def _needed_until(self, part: _Part) -> int:
        """Return the instant until which a region needs its dropped inputs.

        It is when the last of the region's saved tensors that are made of these inputs is released.
        """
        graph = part.view.graph
        direct = [slot for value in part.linked for slot in part.view.slots_of.get(value, ())]
        through = [
            graph.slots[slot] if slot != BOUNDARY else None
            for slot, leaves in part.schedule.leaves.items()
            if part.linked.intersection(leaves)
        ]
        stops = [slot_stop(self.index.trace, slot) for slot in (*direct, *through) if slot is not None]
        if None in through:
            stops.append(self._stop(part, BOUNDARY))
        return max(stops, default=0)

    # The replay itself -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Walk through backward. At each tick (position among the ops), first release buffers whose saved tensors have ended,
        then run the ops that rebuild the saved tensors read there.
        """
        reads: list[tuple[int, int, int, int]] = []
        for position, (region, part) in enumerate(self.parts.items()):
            rebuilt = part.schedule.leaves
            for rank, slot_index in enumerate(part.view.graph.backward_order):
                slot = part.view.graph.slots[slot_index]
                if slot_index in rebuilt or slot.value in part.linked:
                    reads.append((slot.unpacked, position, rank, region))
            if part.choice.forms and part.view.call.unpacks_at_once:
                reads.append((part.view.call.backward[0], position, _ALL_AT_ONCE, region))
        reads.sort()
        for at, (tick, _, rank, region) in enumerate(reads):
            part = self.parts[region]
            # An instant may have several reads. Release what is due before the first of them runs anything, and record
            # the level after the last.
            if at == 0 or reads[at - 1][0] != tick:
                self._release_ended(2 * tick)
                self.memory.instant = 2 * tick
                self.highest = self.memory.bytes_now
                self._note_live(2 * tick)
            if rank == _ALL_AT_ONCE:
                for value in sorted(part.choice.forms.keys() & set().union(*part.schedule.leaves.values())):
                    self._load(part, value, {}, 2 * tick)
            else:
                self._read(part, part.view.graph.backward_order[rank], 2 * tick)
            if at + 1 == len(reads) or reads[at + 1][0] != tick:
                self.out.levels.append((2 * tick, self.highest))
                self._release_ended(2 * tick + 1)  # slots that the op of this tick overwrites
                self.out.levels.append((2 * tick + 1, self.memory.bytes_now))
                self._note_live(2 * tick + 1)
        self._release_ended(self.index.instants)

    def _release_ended(self, instant: int) -> None:
        """Release the buffers of all slots (saved tensors) that end at or before an instant."""
        for due in sorted(d for d in self.releases if d <= instant):
            self.memory.instant = due
            for buffer in self.releases.pop(due):
                self.memory.release(buffer, is_due=True)
            self.out.levels.append((due, self.memory.bytes_now))
            self._note_live(due)

    def _note_live(self, instant: int) -> None:
        """Record in ``Replay.live`` which buffers are alive, if ``instant`` is not after the watched instant.

        Before the watched instant, the latest buffers are recorded; at the watched instant, those with the largest sum.
        """
        if instant > self.watch:
            return
        level = self.memory.bytes_now
        if instant < self.watch or level >= self.watched:
            self.out.live = self.memory.alive()
        self.watched = -1 if instant < self.watch else max(level, self.watched)

    def _work(self, instant: int, label: str, workspace_bytes: int) -> None:
        """Count the workspace of an op or a codec: memory that is allocated and freed at once.

        If the recomputation's bytes with the workspace are a new maximum, record it.
        """
        buffer = self.memory.allocate(workspace_bytes, label) if workspace_bytes else -1
        self.highest = max(self.highest, self.memory.bytes_now)
        self._note_live(instant)
        if buffer >= 0:
            self.memory.release(buffer)

    def _read(self, part: _Part, slot_index: int, instant: int) -> None:
        """Simulate that backward reads a saved tensor (slot): rebuild it, and keep its buffer until the slot is released."""
        slot = part.view.graph.slots[slot_index]
        if slot.value in part.linked or part.linked.intersection(part.schedule.leaves.get(slot_index, ())):
            self._rebuild_provider(part, instant)
        segment = part.segments.get(slot_index)
        if segment is None:
            return
        self._run_segment(part, segment, instant)
        buffer = part.buffer_of.get(segment.value)
        if buffer is not None:
            self._keep_until(buffer, slot_stop(self.index.trace, slot))
        self._forget(part, segment.frees)

    def _rebuild_provider(self, part: _Part, instant: int) -> None:
        """Make the provider of a region rebuild its outputs, if this has not happened yet.

        The provider is the earlier region that makes the dropped inputs of ``part``. The provider may have to ask its own
        provider first.
        """
        provider = self.parts[part.provider]
        if provider.asked:
            return
        provider.asked = True
        if provider.linked.intersection(provider.schedule.leaves.get(BOUNDARY, ())):
            self._rebuild_provider(provider, instant)
        segment = provider.segments.get(BOUNDARY)
        if segment is not None:
            self._run_segment(provider, segment, instant)
            self._forget(provider, segment.frees)

    def _run_segment(self, part: _Part, segment: Segment, instant: int) -> None:
        """Simulate one segment: the ops and loads that rebuild one saved tensor, or the outputs of a region.

        A load brings back a compressed or offloaded value. Buffers are allocated and freed as the ops need them.
        """
        graph = part.view.graph
        wanted: dict[int, int] = {}
        if segment.slot == BOUNDARY:
            asked = {self.parts[r].view.graph.values[v].storage for r in part.consumers for v in self.parts[r].linked}
            outputs = [v for v in graph.outputs if graph.values[v].storage in asked]
            wanted = dict.fromkeys(outputs, self._stop(part, BOUNDARY))
        for step in segment.steps:
            if step.op == NO_OP:
                if not part.view.call.unpacks_at_once:
                    self._load(part, step.load, wanted, instant)
                continue
            op = graph.ops[step.op]
            self.out.ops.append((part.view.call.index, step.op))
            taken_over = {
                graph.values[r].storage: part.buffer_of[r]
                for r in op.reads
                if r in part.buffer_of and r not in step.copies
            }
            for write in op.writes:
                value = graph.values[write]
                buffer = taken_over.get(value.storage)
                part.buffer_of[write] = (
                    self.memory.allocate(value.bytes, f"{part.view.call.name} rebuilt {value.name}")
                    if buffer is None
                    else self.memory.retain(buffer)
                )
                if write in wanted:
                    self._keep_until(part.buffer_of[write], wanted[write])
            workspace_bytes = self.index.trace.workspaces.get(op.cost_key, 0)
            self._work(instant, f"{part.view.call.name} workspace of {op.name}", workspace_bytes)
            self._forget(part, step.frees)

    def _load(self, part: _Part, load: int, wanted: Mapping[int, int], instant: int) -> None:
        """Bring a packed value back into a new buffer: decode a compressed value, or fetch an offloaded one.

        An offloaded value has a buffer on the device already from the start of its transfer back.
        """
        value = part.view.graph.values[load]
        form = self._form(part, load)
        if form.decision is Decision.OFFLOAD:
            since = self._transfer(part, load)[1]
            self.out.payloads.append(((since, max(since, instant)), value.bytes, self._label(part, load)))
        self.out.loads.append((part.view.call.index, load))
        buffer = self.memory.allocate(value.bytes, f"{part.view.call.name} brought back {value.name}")
        part.buffer_of[load] = buffer
        if load in wanted:
            self._keep_until(buffer, wanted[load])
        self._work(instant, f"{part.view.call.name} workspace of {form.name}", form.workspace_bytes)

    def _keep_until(self, buffer: int, instant: int) -> None:
        """Add a reference to a buffer, and schedule its removal at an instant."""
        self.releases.setdefault(instant, []).append(self.memory.retain(buffer))

    def _forget(self, part: _Part, values: Iterable[int]) -> None:
        """Remove the references that these values of a region have to their buffers. A buffer without references is freed."""
        for value in values:
            buffer = part.buffer_of.pop(value, None)
            if buffer is not None:
                self.memory.release(buffer)
