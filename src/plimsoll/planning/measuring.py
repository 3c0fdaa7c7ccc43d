"""Computes what each of many choices of one region (module call) adds to the step's memory and time, in one pass over the
region's ops.

A choice says which saved values the region keeps, recomputes, or packs (compresses or offloads). The rules are the same as in
`replay_schedule` and `replay`, which the simulator follows choice by choice; here each number is an array with one entry for
each choice. Time within backward is counted in *keys*. Keys order the moments at which slots (tensors that autograd saved) are
released or read. Within a moment they order the ops as in the program: before each op the packed values that it needs are
loaded, after it values are freed.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.forms import Form
from plimsoll.artifacts.trace import RegionCall
from plimsoll.planning.choice import Choice, choice_error, link_bytes, packing_seconds
from plimsoll.planning.effects import Effect, RegionFrame, Relief, frame_of, is_between, own_cover, relief_spans
from plimsoll.planning.replay_schedule import Unreachable
from plimsoll.planning.simulate import engine_seconds, is_touched
from plimsoll.planning.step import Ints, RegionView, Span, StepIndex, slot_stop, subtract

Mask = npt.NDArray[np.bool_]

_AT_ONCE = 256
"""How many choices one pass measures together. A larger pass needs more memory, and is hardly faster for each choice."""
_NEVER = np.iinfo(np.int64).max // 2**22
"""A key that means never: it comes after all other keys, which are times within backward. It is small enough that it can be
multiplied by the number of events."""
_FOREVER = np.iinfo(np.int64).max
_NO_PEAK = np.iinfo(np.int64).min // 2
"""Stands for the workspace of an event that releases a buffer: a very negative number of bytes.

So the memory in the middle of several releases never counts as the peak.
"""


class Measuring:
    """Computes the memory and time that choices of one region add to the step, for many choices at a time.

    The object holds all that does not depend on the choice. A choice says which saved values are kept, recomputed or packed
    (compressed or offloaded).
    """

    def __init__(self, index: StepIndex, view: RegionView) -> None:
        self.index, self.view, self.frame = index, view, frame_of(index, view)
        graph = view.graph
        self.reads = [slot for slot in graph.backward_order if graph.slots[slot].value in view.everything]
        """The slots (tensors that autograd saved) whose values a choice (what to keep or recompute) may drop or pack, in the
        order of reading.
        """
        self.read_values = [graph.slots[slot].value for slot in self.reads]
        at = [2 * graph.slots[slot].unpacked for slot in self.reads]
        self.stops = [slot_stop(index.trace, graph.slots[slot]) for slot in self.reads]
        self.at_once = 2 * view.call.backward[0] if view.call.unpacks_at_once else -1
        """The instant at which all packed (compressed or offloaded) values are brought back; -1 if each is brought back when it
        is read.
        """
        self.instants = sorted({*at, *self.stops, *((self.at_once,) if self.at_once >= 0 else ())})
        moments = sorted([(instant, -1) for instant in self.instants] + [(i, s) for s, i in enumerate(at)])
        self.release_moment = {instant: m for m, (instant, read) in enumerate(moments) if read < 0}
        self.read_moment = np.array(
            [m for _, m in sorted((read, m) for m, (_, read) in enumerate(moments) if read >= 0)] + [0], dtype=np.int64
        )
        self.is_release = np.array([read < 0 for _, read in moments] + [False])
        where = {instant: i for i, instant in enumerate(self.instants)}
        self.instant_of = np.array([where[instant] for instant, _ in moments] + [len(where)], dtype=np.int64)
        self.keys = 4 * len(graph.ops) + 6
        """How many keys (numbers that order the work within backward) belong to one moment of backward.

        They are four for each op (to load, run and free), and six for events outside of ops, such as loads that no op reads,
        and the release of the saved tensor.
        """
        self.op_seconds = np.array([index.replay_seconds(op.cost_key) for op in graph.ops])
        self.workspaces = np.array([index.trace.workspaces.get(op.cost_key, 0) for op in graph.ops], dtype=np.int64)
        self.touch_seconds = engine_seconds(index, view)
        self.columns = self._columns()
        storages = dict.fromkeys(graph.values[value].storage for value in (*view.saved, *view.steady))
        self.holdings = {storage: _Holding.of(index, self.frame, storage) for storage in storages}
        self.slot_stops = {v: max(slot_stop(index.trace, slot) for slot in view.slots_of[v]) for v in view.saved}
        self.own = {graph.values[value].storage for value in view.decided}

    def measure(self, choices: Sequence[Choice]) -> list[Effect]:
        """Return a list with the effect of each choice (the memory and time that it adds), as if it were simulated alone.

        Raises:
            Unreachable: a dropped value cannot be rebuilt.
        """
        effects = []
        for first in range(0, len(choices), _AT_ONCE):
            effects += _Pass(self, choices[first : first + _AT_ONCE]).effects()
        return effects

    def _columns(self) -> Ints:
        """Return an array with, for each instant in the backward of the region, the column that has its bytes in the table of
        rebuilt values.

        Column 0 means 0 bytes. If buffers are allocated or released at the instant, the column has the maximum there, and later
        instants have the bytes after it.
        """
        found = []
        for instant in range(self.frame.start, self.frame.stop):
            last = bisect_right(self.instants, instant) - 1
            is_at = last >= 0 and self.instants[last] == instant
            found.append(1 + last + (0 if is_at else len(self.instants)) if last >= 0 else 0)
        return np.array(found, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Holding:
    """Data: when a storage is in memory under any plan, from the end of the forward of its region on.

    In the spans ``gaps`` it is not, so that holding it adds its bytes. In the spans ``relief``, which are before the region's
    backward, it is. ``is_between`` is True if it is in memory all the time before backward.
    """

    gaps: tuple[Span, ...]
    is_between: bool
    relief: tuple[Span, ...]

    @classmethod
    def of(cls, index: StepIndex, frame: RegionFrame, storage: int) -> _Holding:
        """Return, as data, when one storage is alive under any plan, for a region with the instants ``frame``."""
        covered = own_cover(index, frame, storage)
        gaps = subtract([(frame.exit, _FOREVER)], covered)
        return cls(tuple(gaps), is_between(frame, covered), tuple(relief_spans(index, frame, storage)))


class _Pass:
    """Computes the memory and time that many choices of one region add, all at once.

    In its arrays, rows are values and columns are choices.
    """

    def __init__(self, region: Measuring, choices: Sequence[Choice]) -> None:
        self.region, self.choices = region, choices
        view = region.view
        self.count = len(choices)
        values = len(view.graph.values)
        self.kept = np.zeros((values, self.count), dtype=np.bool_)
        self.packed: dict[tuple[int, str], Mask] = {}
        for at, choice in enumerate(choices):
            self.kept[list(choice.kept), at] = True
            for pair in choice.packed:
                self.packed.setdefault(pair, np.zeros(self.count, dtype=np.bool_))[at] = True
        self.away = np.zeros_like(self.kept)
        for (value, _), mask in self.packed.items():
            self.away[value] |= mask
        self.held = self.kept & ~self.away
        self.held[list(view.leaves)] = True
        self.there = self.held | self.away
        self.gone = np.zeros_like(self.kept)
        decided = list(view.decided)
        self.gone[decided] = ~self.kept[decided] | self.away[decided]
        self._demand()
        self._order()

    # When each value is needed --------------------------------------------------------------------------------------

    def _demand(self) -> None:
        """Compute when each value is first needed in backward, and until when saved tensors that are made of it live.

        The walk goes from the last op to the first. ``first`` is the position of the read that first needs the value (the
        number of reads means never). ``until`` is an instant (-1 means never).
        """
        region, graph = self.region, self.region.view.graph
        never = len(region.reads)
        self.first = np.full(self.kept.shape, never, dtype=np.int64)
        self.until = np.full(self.kept.shape, -1, dtype=np.int64)
        for position in reversed(range(never)):
            value = region.read_values[position]
            gone = self.gone[value]
            self.first[value][gone] = position
            np.maximum(self.until[value], region.stops[position], out=self.until[value], where=gone)
        self.runs: dict[int, tuple[Ints, Mask]] = {}
        """Maps each op that runs again under some choice to two arrays over the choices: the position of the read before which
        it runs, and whether it runs.
        """
        for op in reversed(graph.ops):
            writes = list(op.writes)
            is_free = ~self.there[writes]
            position = np.where(is_free, self.first[writes], never).min(axis=0, initial=never)
            runs = position < never
            if not runs.any():
                continue
            if op.obstacle:
                raise Unreachable(op.writes[0], op.refusal)
            until = np.where(is_free, self.until[writes], -1).max(axis=0)
            self.runs[op.id] = position, runs
            for value in dict.fromkeys(op.reads):
                np.minimum(self.first[value], position, out=self.first[value])
                np.maximum(self.until[value], until, out=self.until[value])
        for value_ in graph.values:
            if value_.producer < 0 and (~self.there[value_.id] & (self.first[value_.id] < never)).any():
                raise Unreachable(value_.id, f"{value_.name} is not held for backward")

    def _order(self) -> None:
        """Compute the order of all work in backward: the key (the time within backward) of each op and of each load.

        The keys of each value's last use and end are computed too. A load brings back a packed (compressed or offloaded) value.
        Also find which in-place op takes over the buffer of the value that it overwrites.
        """
        region, graph = self.region, self.region.view.graph
        self.key: dict[int, Ints] = {}
        last = np.full(self.kept.shape, -1, dtype=np.int64)
        for read, value in enumerate(region.read_values):
            last[value][self.gone[value]] = region.read_moment[read] * region.keys + region.keys - 1
        for op_id, (position, runs) in self.runs.items():
            key = np.where(runs, region.read_moment[position] * region.keys + 4 * op_id + 2, -2)
            self.key[op_id] = key
            for value in graph.ops[op_id].reads:
                np.maximum(last[value], key + 1, out=last[value])
        self.last = last
        self.loads = {value: self._load_key(value) for value in sorted({value for value, _ in self.packed})}
        end = last.copy()
        for read, value in enumerate(region.read_values):
            release = region.release_moment[region.stops[read]] * region.keys
            np.maximum(end[value], release, out=end[value], where=self.gone[value])
        self.taken: dict[int, Mask] = {}
        for op_id in sorted(self.runs, reverse=True):
            key, runs = self.key[op_id], self.runs[op_id][1]
            for write in graph.ops[op_id].writes:
                # A held value is never read from the replay. A packed value's end belongs to its load.
                end[write] = np.where(self.held[write], key + 1, end[write])
                np.maximum(end[write], key + 1, out=end[write], where=~self.away[write])
                left = runs.copy()
                for read in reversed(graph.ops[op_id].reads):
                    if graph.values[read].storage == graph.values[write].storage:
                        takes = left & ~self.held[read] & (last[read] == key + 1)
                        left &= ~takes
                        np.maximum(end[read], end[write], out=end[read], where=takes)
                self.taken[write] = runs & ~left
        self.end = end

    def _load_key(self, value: int) -> Ints:
        """Return for each choice the key (time in backward) when a compressed or offloaded value is brought back.

        It is brought back before the first op that reads it; if no op reads it, just before backward reads its slot, the tensor
        that autograd saved. In compiled code all such values are brought back when backward begins.
        """
        region = self.region
        position = np.where(self.away[value], self.first[value], len(region.reads))
        if region.at_once >= 0:
            key = region.release_moment[region.at_once] * region.keys + 1
            return np.where(position < len(region.reads), key, _NEVER)
        place: Ints = np.full(self.count, region.keys - 2, dtype=np.int64)
        for op_id in sorted(self.runs, reverse=True):
            if value in region.view.graph.ops[op_id].reads:
                runs_at, runs = self.runs[op_id]
                place = np.where(runs & (runs_at == position), 4 * op_id + 1, place)
        return np.where(position < len(region.reads), region.read_moment[position] * region.keys + place, _NEVER)

    # Rebuilt values -------------------------------------------------------------------------------------------------

    def _events(self) -> Iterator[tuple[Ints, Ints, Ints | int]]:
        """Yield for each event of the recomputation's buffers: its key, bytes, workspace, over all choices.

        The bytes are positive for an allocation and negative for a release.
        """
        graph = self.region.view.graph
        for value, loaded in self.loads.items():
            size = graph.values[value].bytes
            is_loaded = loaded < _NEVER
            end = self.end[value]
            producer = graph.values[value].producer
            if producer in self.runs:  # its op also runs, for another result: then the op's buffer replaces this one
                made = self.key[producer]
                end = np.where(self.runs[producer][1] & (loaded < made) & (made < self.last[value]), _NEVER, end)
            spaces = np.zeros(self.count, dtype=np.int64)
            for (packed, name), mask in self.packed.items():
                if packed == value:
                    spaces += mask * self.region.view.form(value, name).workspace_bytes
            yield loaded, is_loaded * size, spaces
            yield np.where(is_loaded, end, _NEVER), is_loaded * -size, _NO_PEAK
        for op_id, (_, runs) in self.runs.items():
            come = np.zeros(self.count, dtype=np.int64)
            for write in graph.ops[op_id].writes:
                size = graph.values[write].bytes
                if size:
                    made = (runs & ~self.taken[write]) * size
                    come += made
                    yield np.where(made > 0, self._made_until(write, op_id), _NEVER), -made, _NO_PEAK
            yield np.where(runs, self.key[op_id], _NEVER), come, runs * self.region.workspaces[op_id]

    def _made_until(self, value: int, op_id: int) -> Ints:
        """Return for each choice the key (time in backward) when the buffer that an op made for a value is released.

        If the value is loaded later, the op's buffer stays.
        """
        until: Ints = self.end[value]
        loaded = self.loads.get(value)
        if loaded is not None:
            key = self.key[op_id]
            is_asked = self.last[value] > key
            end = np.where(is_asked & (loaded > key), _NEVER, np.where(is_asked, until, key + 1))
            until = np.where(self.away[value], end, until)
        return until

    def rebuilt(self) -> Ints:
        """Return a table of the bytes of rebuilt values: one row for each choice, one column for each instant of backward.

        At an even instant, where recomputation runs, the entry is the maximum during the recomputation.
        """
        region = self.region
        instants = len(region.instants)
        events = list(self._events())
        if not events:
            return np.zeros((self.count, len(region.columns)), dtype=np.int64)
        keys = np.stack([key for key, _, _ in events], axis=1)
        change = np.stack([change for _, change, _ in events], axis=1)
        spaces = np.stack([np.broadcast_to(space, self.count) for _, _, space in events], axis=1)
        # Sorting keys combined with positions keeps equal keys in order. Plain integers also sort several times as fast.
        keys, order = np.divmod(np.sort(keys * len(events) + np.arange(len(events)), axis=1), len(events))
        change, spaces = (np.take_along_axis(table, order, axis=1) for table in (change, spaces))
        level = np.cumsum(change, axis=1) + spaces
        moment = np.minimum(keys // region.keys, len(region.is_release) - 1)
        width = instants + 1
        flat = (np.arange(self.count) * width)[:, None] + region.instant_of[moment]

        def summed(change: Ints) -> Ints:
            # Sums of bytes are exact in a double up to 8 PiB.
            sums = np.bincount(flat.ravel(), weights=change.ravel(), minlength=self.count * width)
            return sums.astype(np.int64).reshape(self.count, width)[:, :instants]

        after = np.cumsum(summed(change), axis=1)
        released = summed(np.where(region.is_release[moment], change, 0))
        highest = np.zeros((self.count, width), dtype=np.int64)
        highest[:, 1:instants] = after[:, :-1]
        highest[:, :instants] += released
        np.maximum.at(highest.reshape(-1), flat.ravel(), level.ravel())
        table = np.concatenate([np.zeros((self.count, 1), dtype=np.int64), highest[:, :instants], after], axis=1)
        curves: Ints = table[:, region.columns]
        return curves

    # Held values and effects ----------------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Return a list with the effect (added memory and time) of each choice of this pass."""
        region, view, frame = self.region, self.region.view, self.region.frame
        self.rows = np.arange(self.count)
        self.change = np.zeros((self.count, frame.stop - frame.start + 1), dtype=np.int64)
        self.retained = np.zeros(self.count, dtype=np.int64)
        self.is_additive = np.ones(self.count, dtype=np.bool_)
        self.reliefs: list[list[Relief]] = [[] for _ in range(self.count)]
        held_until = self._held_until()
        for storage, until in held_until.items():
            self._hold(storage, until)
        self._hold_payloads()
        copied = self._copy()
        exit_bytes = self._packing_bytes(held_until)
        curves = np.cumsum(self.change, axis=1)[:, :-1] + self.rebuilt()
        seconds = np.zeros(self.count)
        for op_id, (_, runs) in self.runs.items():
            seconds += runs * region.op_seconds[op_id]
        found = []
        for at, choice in enumerate(self.choices):
            took = float(seconds[at]) + (region.touch_seconds if is_touched(view, choice) else 0.0)
            found.append(
                Effect(
                    choice=choice,
                    copied_bytes=int(copied[at]),
                    exit_bytes=int(exit_bytes[at]),
                    retained_bytes=int(self.retained[at] + copied[at]),
                    relief=tuple(sorted(self.reliefs[at])),
                    backward=curves[at],
                    seconds=took + (packing_seconds(region.index, view, choice) if choice.packed else 0.0),
                    is_additive=bool(self.is_additive[at]),
                    squared_error=choice_error(view, choice) if choice.packed else 0.0,
                    link_bytes=link_bytes(view, choice),
                )
            )
        return found

    def _held_until(self) -> dict[int, Ints]:
        """Return a mapping from each storage to an array with, for each choice, the instant until which the storage is held.

        It is held for kept values, for saved tensors (slots) made of these values, or until a transfer out has ended. -1 means
        never.
        """
        view, values = self.region.view, self.region.view.graph.values
        held: dict[int, Ints] = {}
        for value in (*view.saved, *view.steady):
            if value in view.resident:
                continue
            until = np.where(self.held[value], self.until[value], -1)
            if value in view.everything:
                until = np.where(self.held[value], np.maximum(until, self.region.slot_stops[value]), until)
            storage = values[value].storage
            held[storage] = np.maximum(held.get(storage, -1), until)
        for (value, name), mask in self.packed.items():
            if view.form(value, name).decision is Decision.OFFLOAD:
                sent = np.where(mask & (self.until[value] >= 0), 2 * self._neighbour().forward[1], -1)
                held[values[value].storage] = np.maximum(held[values[value].storage], sent)
        return {storage: until for storage, until in held.items() if (until >= 0).any()}

    def _neighbour(self) -> RegionCall:
        after = self.region.index.neighbour(self.region.view.call.index)
        assert after is not None, "only regions with a neighbour have forms that go over a link"
        return after

    def _add(self, start: int, stops: Ints, sizes: Ints) -> None:
        frame, length = self.region.frame, self.change.shape[1] - 1
        self.change[:, min(max(start - frame.start, 0), length)] += sizes
        self.change[self.rows, np.clip(stops - frame.start, 0, length)] -= sizes

    def _relieve(self, mask: Mask, *reliefs: Relief) -> None:
        if reliefs:
            for at in np.flatnonzero(mask):
                self.reliefs[at] += reliefs

    def _hold(self, storage: int, until: Ints) -> None:
        """Add the bytes of a held storage to the memory of each choice, until the instants ``until``.

        Times at which the storage is alive under any plan do not count. Another region may hold a storage that this region does
        not decide about (an input). Then a sum over regions counts the storage twice, so the effect is not additive.
        """
        region, frame = self.region, self.region.frame
        size, holding = region.index.trace.storages[storage].bytes, region.holdings[storage]
        for start, stop in holding.gaps:
            is_held = until > start
            self._add(start, np.minimum(until, stop), is_held * size)
            if storage not in region.own:
                self.is_additive &= ~is_held
        is_held = until > frame.exit
        is_through = is_held & (until >= frame.start)
        if not holding.is_between:
            self.retained += is_through * size
            spans = holding.relief
            self._relieve(is_through, *(Relief(a - frame.exit, b - frame.exit, size) for a, b in spans))
        for stop in np.unique(until[is_held & ~is_through]).tolist():
            part = ((a, min(b, stop, frame.start)) for a, b in holding.gaps)
            reliefs = (Relief(a - frame.exit, b - frame.exit, -size) for a, b in part if b > a)
            self._relieve(~is_through & (until == stop), *reliefs)

    def _copy(self) -> Ints:
        """Add the bytes of the inputs that a choice copies when the region begins; return these bytes for each choice."""
        view = self.region.view
        copied = np.zeros(self.count, dtype=np.int64)
        for value in view.copied - view.steady:
            size = view.graph.values[value].bytes
            is_copied = self.until[value] >= 0
            copied += is_copied * size
            self._add(self.region.frame.start, self.until[value], is_copied * size)
        return copied

    def _hold_payloads(self) -> None:
        """Add to the memory of each choice the payloads of compressed values and the buffers of returning offloaded values.

        A payload is what a codec stores. A transfer back writes to a buffer.
        """
        view, frame, region = self.region.view, self.region.frame, self.region
        for (value, name), mask in self.packed.items():
            form = view.form(value, name)
            if form.decision is not Decision.OFFLOAD:
                until = self.until[value]
                stop = until if region.at_once < 0 else np.full_like(until, region.at_once + 1)
                spans = [(frame.exit, stop, mask & (until >= 0), form.held_bytes)]
            else:
                since = 2 * self._neighbour().backward[0]
                loaded = self.loads[value]
                at = region.instant_of[np.minimum(loaded // region.keys, len(region.instant_of) - 1)]
                back = np.array([*region.instants, -1])[at]
                spans = [(since, np.maximum(since, back), mask & (loaded < _NEVER), view.graph.values[value].bytes)]
            for start, stops, is_there, size in spans:
                self._add(start, np.where(is_there, stops, start), is_there * size)
                is_through = is_there & (stops >= frame.start) & (start <= frame.exit)
                self.retained += is_through * size
                for stop in np.unique(stops[is_there & ~is_through]).tolist() if start < frame.start else ():
                    relief = Relief(start - frame.start, min(stop - frame.start, 0), -size, is_before_backward=True)
                    self._relieve(is_there & ~is_through & (stops == stop), relief)

    def _packing_bytes(self, held_until: dict[int, Ints]) -> Ints:
        """Return for each choice the most bytes that compressing values at the end of forward needs in addition.

        They are payloads (codecs' results) and workspaces, on top of the tensors that forward saved (see ``replay``).
        """
        view, exit_ = self.region.view, self.region.frame.exit
        values = view.graph.values
        position = {value: at for at, value in enumerate(view.saved)}
        pairs: list[tuple[int, Form, Mask]] = []
        for (value, name), mask in self.packed.items():
            form = view.form(value, name)
            if form.decision is not Decision.OFFLOAD:
                pairs.append((value, form, mask & (self.until[value] >= 0)))
        pairs.sort(key=lambda pair: (pair[1].held_bytes - values[pair[0]].bytes, position[pair[0]]))
        now = np.zeros(self.count, dtype=np.int64)
        most = np.zeros(self.count, dtype=np.int64)
        for at, (value, form, mask) in enumerate(pairs):
            now += mask * form.held_bytes
            np.maximum(most, now + form.workspace_bytes, out=most, where=mask)
            storage = values[value].storage
            covered = self.region.index.covered(storage)
            if self.region.at_once >= 0 or any(start <= exit_ < stop for start, stop in covered):
                continue
            stays = held_until.get(storage, np.full(self.count, -1)) > exit_
            for other, _, later in itertools.islice(pairs, at + 1, None):
                if values[other].storage == storage:
                    stays = stays | later
            now -= (mask & ~stays) * values[value].bytes
        if self.region.at_once >= 0:  # compiled code holds the sources of packed values until its forward ends
            for value, _, mask in pairs:
                covered = self.region.index.covered(values[value].storage)
                if not any(start < exit_ <= stop for start, stop in covered):
                    most += mask * values[value].bytes
        return most
