"""A second simulator, written to be read rather than to be fast: for every instant, the list of everything that is alive.

It shares no code with ``planning.replay_schedule`` or ``planning.replay``. Each region becomes one flat list of events (bring
back a packed value, run an op, hand a slot its value); what dies when is found by looking through the rest of the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Form
from plimsoll.artifacts.region import Origin, Slot
from plimsoll.planning.choice import Choice
from plimsoll.planning.step import RegionView, StepIndex

Span = tuple[int, int]


@dataclass
class Event:
    """``kind`` is ``load``, ``op`` or ``read``; ``uses`` are the values that must be there, ``makes`` those that appear."""

    region: int
    tick: int
    kind: str
    number: int
    uses: tuple[int, ...]
    makes: tuple[int, ...]
    slot: Slot | None = None


@dataclass
class SlowStep:
    """Bytes at every instant of one step under one choice per region, and its seconds."""

    index: StepIndex
    choices: Sequence[Choice]
    alive: list[tuple[Span, int]] = field(default_factory=list)
    storages: dict[int, list[Span]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def curve(self) -> list[int]:
        trace = self.index.trace
        for storage in trace.storages:
            self._hold(storage.id, 2 * storage.born + 1, 2 * storage.dies)
        for view in self.index.views:
            self._forward(view)
            self._leaves(view)
        totals = [int(b) for b in self.index.workspace]
        for (start, stop), size in self.alive:
            for instant in range(max(start, 0), min(stop, self.index.instants)):
                totals[instant] += size
        for number, spans in self.storages.items():
            for instant in {i for a, b in spans for i in range(max(a, 0), min(b, self.index.instants))}:
                totals[instant] += trace.storages[number].bytes
        for instant, size in enumerate(self._replayed()):
            totals[instant] += size
        return totals

    def seconds(self) -> float:
        """Call after ``curve``."""
        costs, trace = self.index.costs, self.index.trace
        total = sum(self.index.op_seconds(op.cost_key) for op in trace.ops)
        for event in self.events:
            if event.kind == "op":
                key = self.index.views[event.region].graph.ops[event.number].cost_key
                total += self.index.op_seconds(key) + costs.replay_seconds
        for view, choice in zip(self.index.views, self.choices, strict=True):
            if choice.kept != frozenset(view.decided) or choice.is_boundary_dropped:
                total += costs.region_seconds + len(view.graph.slots) * costs.slot_seconds
            forms = [self._form(view, value) for value in self._packed(view)]
            total += sum(form.encode_seconds + form.decode_seconds for form in forms)
            total += self._waiting(view, [form for form in forms if form.decision is Decision.OFFLOAD])
        return total

    def _waiting(self, view: RegionView, forms: list[Form]) -> float:
        link = self.index.forms.link
        if not forms or link is None:
            return 0.0
        after, ops = self._after(view), self.index.trace.ops
        forward = sum(self.index.op_seconds(op.cost_key) for op in ops[view.call.forward[1] : after.call.forward[1]])
        backward = sum(self.index.op_seconds(op.cost_key) for op in ops[after.call.backward[0] : view.call.backward[0]])
        sent = sum(form.link_bytes for form in forms)
        out_seconds = len(forms) * link.latency_seconds + sent / link.out_bytes_per_second
        in_seconds = len(forms) * link.latency_seconds + sent / link.in_bytes_per_second
        return max(out_seconds - forward, 0.0) + max(in_seconds - backward, 0.0)

    # What is held ----------------------------------------------------------------------------------------------

    def _hold(self, storage: int, start: int, stop: int) -> None:
        self.storages.setdefault(storage, []).append((start, stop))

    def _after(self, view: RegionView) -> RegionView:
        return self.index.views[view.call.index + 1]

    def _form(self, view: RegionView, value: int) -> Form:
        name = self._packed(view)[value]
        return next(form for form in view.forms[value].forms if form.name == name)

    def _linked(self, view: RegionView) -> set[int]:
        """Inputs that a dropped boundary lets go."""
        if not self.choices[view.call.index].is_boundary_dropped:
            return set()
        storages = self.index.trace.storages
        found = set()
        for value in view.saved:
            entry = view.graph.values[value]
            maker = storages[entry.storage].region
            if entry.origin is Origin.INPUT and 0 <= maker != view.call.index:
                provider = self.index.views[maker]
                outputs = {provider.graph.values[v].storage for v in provider.graph.outputs}
                if provider.droppable and entry.storage in outputs and self._can_rebuild_outputs(provider):
                    found.add(value)
        makers = {storages[view.graph.values[v].storage].region for v in found}
        return found if len(makers) == 1 else set()

    def _can_rebuild_outputs(self, view: RegionView) -> bool:
        def can(value: int) -> bool:
            if value in view.leaves or value in view.movable:
                return True
            producer = view.graph.values[value].producer
            if producer < 0 or view.graph.ops[producer].obstacle:
                return False
            return all(can(read) for read in view.graph.ops[producer].reads)

        return all(can(output) for output in view.graph.outputs)

    def _provider(self, view: RegionView) -> RegionView | None:
        linked = self._linked(view)
        if not linked:
            return None
        return self.index.views[self.index.trace.storages[view.graph.values[min(linked)].storage].region]

    def _consumers(self, view: RegionView) -> list[RegionView]:
        return [other for other in self.index.views if self._provider(other) is view]

    def _packed(self, view: RegionView) -> dict[int, str]:
        linked = self._linked(view)
        return {v: form for v, form in self.choices[view.call.index].packed if v not in linked}

    def _is_held(self, view: RegionView, value: int) -> bool:
        """Whether the value itself is there when backward starts."""
        if value in self._linked(view):
            return False
        return value in self.choices[view.call.index].kept or value in view.leaves

    def _forward(self, view: RegionView) -> None:
        """Slots hold until the forward of their region ends, and those of kept values until they are released."""
        exit_ = 2 * view.call.forward[1]
        for slot in view.graph.slots:
            if slot.is_managed:
                stop = self._released(slot)
                if not self._is_held(view, slot.value):
                    stop = min(stop, exit_)
                self._hold(view.graph.values[slot.value].storage, 2 * slot.packed, stop)

    def _released(self, slot: Slot) -> int:
        return 2 * slot.released + slot.is_overwritten if slot.released >= 0 else self.index.instants

    def _leaves(self, view: RegionView) -> None:
        """What slots that do not hold their value hold in its stead, for as long as they live."""
        exit_ = 2 * view.call.forward[1]
        until: dict[int, int] = {}
        for slot in (view.graph.slots[s] for s in view.graph.backward_order):
            if slot.is_managed and not self._is_held(view, slot.value) and slot.value not in self._linked(view):
                for leaf in self._leaves_of(view, slot.value):
                    until[leaf] = max(until.get(leaf, 0), self._released(slot))
        for output in view.graph.outputs if self._consumers(view) else ():
            if not self._is_held(view, output):
                for leaf in self._leaves_of(view, output):
                    until[leaf] = max(until.get(leaf, 0), self._outputs_needed_until(view))
        for leaf, stop in until.items():
            entry = view.graph.values[leaf]
            if leaf in view.free or leaf in self._linked(view):
                continue
            if leaf in self._packed(view):
                form = self._form(view, leaf)
                if form.decision is Decision.OFFLOAD:
                    after = self._after(view)
                    # The source goes out behind the next forward; the buffer comes back behind the next backward.
                    self._hold(entry.storage, exit_, 2 * after.call.forward[1])
                    self.alive.append(((2 * after.call.backward[0], self._first_load(view, leaf)), entry.bytes))
                else:
                    self.alive.append(((exit_, stop), form.held_bytes))
            elif leaf in view.slots_of:
                self._hold(entry.storage, exit_, stop)
            else:
                self.alive.append(((2 * view.call.forward[0], stop), entry.bytes))
        packed = [v for v in view.saved if v in until and v in self._packed(view)]
        self.alive.append(((exit_ - 1, exit_), self._packing(view, packed)))

    def _packing(self, view: RegionView, packed: list[int]) -> int:
        """Encode one value after the other, and count what is there beside the saved values at the highest moment."""
        exit_ = 2 * view.call.forward[1]
        here = set(view.slots_of)
        saved = sum(self._bytes_of({view.graph.values[v].storage for v in here}).values())
        payloads, highest = 0, 0
        todo = [v for v in packed if self._form(view, v).decision is Decision.COMPRESS]
        for value in sorted(todo, key=lambda v: self._form(view, v).held_bytes - view.graph.values[v].bytes):
            form = self._form(view, value)
            payloads += form.held_bytes
            storages = {view.graph.values[v].storage for v in here}
            for storage in {view.graph.values[v].storage for v in view.slots_of} - storages:
                if any(start <= exit_ < stop for start, stop in self.storages[storage]):
                    storages.add(storage)
            now = sum(self._bytes_of(storages).values())
            highest = max(highest, now + payloads + form.workspace_bytes - saved)
            here.discard(value)
        return highest

    def _bytes_of(self, storages: set[int]) -> dict[int, int]:
        return {storage: self.index.trace.storages[storage].bytes for storage in storages}

    def _leaves_of(self, view: RegionView, value: int) -> set[int]:
        if value in self._packed(view) or self._is_held(view, value) or value in self._linked(view):
            return {value}
        producer = view.graph.values[value].producer
        return set().union(*(self._leaves_of(view, read) for read in view.graph.ops[producer].reads))

    def _outputs_needed_until(self, view: RegionView) -> int:
        """The release of the last slot that is made of what the consumers get from here."""
        stops = [0]
        for consumer in self._consumers(view):
            linked = self._linked(consumer)
            for slot in (consumer.graph.slots[s] for s in consumer.graph.backward_order):
                is_made = slot.is_managed and not self._is_held(consumer, slot.value)
                if is_made and linked & self._leaves_of(consumer, slot.value):
                    stops.append(self._released(slot))
            if self._consumers(consumer) and any(
                linked & self._leaves_of(consumer, v) for v in consumer.graph.outputs if not self._is_held(consumer, v)
            ):
                stops.append(self._outputs_needed_until(consumer))
        return max(stops)

    # What is replayed ------------------------------------------------------------------------------------------

    def _first_load(self, view: RegionView, value: int) -> int:
        self._write_events()
        ticks = [e.tick for e in self.events if e.kind == "load" and (e.region, e.number) == (view.call.index, value)]
        return 2 * ticks[0]

    def _write_events(self) -> None:
        if self.events:
            return
        here: set[tuple[int, int]] = set()
        asked: set[int] = set()
        reads = [
            (slot.unpacked, -view.call.index, rank, view, slot)
            for view in self.index.views
            for rank, slot in enumerate(view.graph.slots[s] for s in view.graph.backward_order)
            if slot.is_managed
        ]
        for tick, _, _, view, slot in sorted(reads, key=lambda read: read[:3]):
            if not self._is_held(view, slot.value):
                self.events += self._making(view, (slot.value,), tick, here, asked)
                if slot.value not in self._linked(view):
                    self.events.append(Event(view.call.index, tick, "read", slot.index, (slot.value,), (), slot))

    def _making(
        self, view: RegionView, values: Sequence[int], tick: int, here: set[tuple[int, int]], asked: set[int]
    ) -> Iterator[Event]:
        """The events that make values which are not there yet; ops in program order, loads right before their readers."""
        region = view.call.index
        ops: set[int] = set()
        leaves: set[int] = set()
        pending = list(values)
        while pending:
            value = pending.pop()
            if value in self._packed(view) or value in self._linked(view) or self._is_held(view, value):
                leaves.add(value)
                continue
            producer = view.graph.values[value].producer
            if producer not in ops:
                ops.add(producer)
                pending += view.graph.ops[producer].reads
        provider = self._provider(view)
        if leaves & self._linked(view) and provider is not None and provider.call.index not in asked:
            asked.add(provider.call.index)
            outputs = [v for v in provider.graph.outputs if not self._is_held(provider, v)]
            yield from self._making(provider, outputs, tick, here, asked)
            index = provider.call.index
            yield Event(index, tick, "outputs", -1, tuple(outputs), ())
        for op in sorted(o for o in ops if (region, -1 - o) not in here):
            here.add((region, -1 - op))
            entry = view.graph.ops[op]
            for read in sorted(set(entry.reads)):
                if read in self._packed(view) and (region, read) not in here:
                    here.add((region, read))
                    yield Event(region, tick, "load", read, (), (read,))
            yield Event(region, tick, "op", op, tuple(entry.reads), tuple(entry.writes))
        for value in sorted(values):
            if value in self._packed(view) and (region, value) not in here:
                here.add((region, value))
                yield Event(region, tick, "load", value, (), (value,))

    def _replayed(self) -> list[int]:
        """The bytes of private memory at every instant: at even ones the highest while replays run there."""
        self._write_events()
        lives: list[
            list[int]
        ] = []  # per buffer: bytes, first event, last event, instant until which something holds it
        buffer_of: dict[tuple[int, int], int] = {}
        extra: dict[int, int] = {}
        for at, event in enumerate(self.events):
            view = self.index.views[event.region]
            values = view.graph.values
            key = event.region
            for value in event.uses:
                if (key, value) in buffer_of:
                    lives[buffer_of[key, value]][2] = at
            if event.kind == "read":
                assert event.slot is not None
                held = lives[buffer_of[key, event.uses[0]]]
                held[3] = max(held[3], self._released(event.slot))
            if event.kind == "outputs":
                wanted = {self.index.views[c.call.index].graph.values[v].storage
                          for c in self._consumers(view) for v in self._linked(c)}  # fmt: skip
                for value in event.uses:
                    if values[value].storage in wanted:
                        held = lives[buffer_of[key, value]]
                        held[3] = max(held[3], self._outputs_needed_until(view))
            if event.kind == "op":
                extra[at] = self.index.trace.workspaces.get(view.graph.ops[event.number].cost_key, 0)
            if event.kind == "load":
                extra[at] = self._form(view, event.number).workspace_bytes
            for value in event.makes:
                taken = None
                for read in event.uses:
                    is_overwritten = values[read].storage == values[value].storage
                    if is_overwritten and (key, read) in buffer_of and not self._is_used_after(at, key, read):
                        taken = buffer_of[key, read]
                if taken is None:
                    lives.append([values[value].bytes, at, at, 0])
                    taken = len(lives) - 1
                lives[taken][2] = max(lives[taken][2], at)
                buffer_of[key, value] = taken
        return self._levels(lives, extra)

    def _is_used_after(self, at: int, region: int, value: int) -> bool:
        return any(event.region == region and value in event.uses for event in self.events[at + 1 :])

    def _levels(self, lives: list[list[int]], extra: dict[int, int]) -> list[int]:
        levels = [0] * self.index.instants
        for instant in range(self.index.instants):
            now = [at for at, event in enumerate(self.events) if 2 * event.tick == instant]
            before = [at for at, event in enumerate(self.events) if 2 * event.tick < instant]
            if instant % 2 == 0 and now:
                # Alive at an event: what it or a later one uses, and what a slot that was handed it still holds.
                levels[instant] = max(
                    sum(b for b, first, last, until in lives if first <= at and (at <= last or instant < until))
                    + extra.get(at, 0)
                    for at in now
                )
                continue
            done = max([*before, *now], default=-1)
            levels[instant] = sum(
                b for b, first, last, until in lives if first <= done and (last > done or instant < until)
            )
        return levels
