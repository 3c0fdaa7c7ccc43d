"""Computes a proven lower bound of the step time of all plans within a budget, with a linear program.

"Packing" means to compress or offload a value, "replay" the recomputation of dropped values.

Legend. A region is one module call. ``R[r]`` = bytes that region r holds between its forward and its backward, ``s[r]`` = its
seconds of replay and packing, ``w[r]`` = its seconds of waiting for the link (to host memory or disk), ``E[r]`` = its squared
error, ``B[r]`` = the bytes it sends.

==  ==========================================================  ======================================================
1   minimise Σ s[r] + w[r]
2   s[r] ≥ value_k - price_k·R[r] - error_k·E[r] - link_k·B[r]  every line of the hull, so for every choice, found or not
3   fixed[m] + Σ_between R[j] ≤ budget                          every instant m outside of backwards
4   fixed[m] + Σ_between R[j] + read[m] ≤ budget                m in the backward of r: values being read are in memory
5   fixed[m] + Σ_between R[j] + read[m] + R[r] - past[m] ≤ …    the same, plus the bytes that r still holds for later
6   w[r] ≥ out + in, each B[r] / speed - window, or 0           transfers that the neighbour's compute does not hide
7   Σ E[r] ≤ max_error², Σ B[r] ≤ host budget                   if they are limited
==  ==========================================================  ======================================================

If micro-batches wait, ``waiting`` times the bytes held at the handover are added until the optimizer steps.

``past[m]`` are the bytes that need not be held any more at m, so ``R[r] - past[m]`` never exceeds the bytes held. Replay's own
memory is left out (only values being read count), so the bound is valid for every choice. It bounds this model of the
machine (each op runs again at most once, these costs), not the machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.sparse import coo_array, csr_array

from plimsoll.planning.choice import Limits
from plimsoll.planning.choices import ChoiceSet
from plimsoll.planning.effects import RegionFrame, frame_of, held_bytes, relief_spans
from plimsoll.planning.frontier import Hull, Line
from plimsoll.planning.highs import solve_linear
from plimsoll.planning.simulate import actual_cover, engine_seconds
from plimsoll.planning.step import Ints, RegionView, Span, StepIndex, boundary_values, merge, slot_stop, subtract

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Region:
    """Data: the numbers of one region that the linear program of a lower bound needs (rows 2 to 5 in the module's text).

    ``read`` and ``past`` have one entry for each instant of the region's backward. ``kept_bytes`` is R if everything is kept,
    ``most_bytes`` is R if inputs are copied as well. A sent value has its source on the device until the instant
    ``sent_until``, and a buffer from the instant ``back_from`` on. For each byte sent, these take at least ``source_share`` and
    ``buffer_share`` bytes.
    """

    frame: RegionFrame
    hull: Hull
    kept_bytes: float
    most_bytes: float
    touch_seconds: float
    read: Ints
    past: Ints
    sent_until: tuple[int, ...] = ()
    back_from: tuple[int, ...] = ()
    source_share: float = 0.0
    buffer_share: float = 0.0

    def sent_share(self, a: int, b: int) -> float:
        """Return the share, at least, of the offloaded bytes of a region that is on the device from instant a to instant b.

        Both instants are between forward and backward, and no transfer begins or ends between them. The offloaded bytes are B
        of the program.
        """
        is_leaving = any(b <= until for until in self.sent_until)
        is_back = any(a >= since for since in self.back_from)
        return max(self.source_share * is_leaving, self.buffer_share * is_back)


class LowerBound:
    """The linear program that bounds the step time of one step, for any budget.

    With ``boundaries`` the bound also holds for plans that drop inputs of regions (module calls). The program's variables are
    R, E, B, s and the waiting in both directions; each has one entry for each region.
    """

    def __init__(
        self, index: StepIndex, sets: Sequence[ChoiceSet], limits: Limits | None = None, *, boundaries: bool = False
    ) -> None:
        self.index = index
        self.limits = limits or Limits(math.inf)
        self.regions = [_describe(index, view, choice_set) for view, choice_set in zip(index.views, sets, strict=True)]
        self.fixed = _least_fixed(index, boundaries=boundaries)
        self.scale_bytes = max(float(self.fixed.max()), 1.0)
        self.scale_seconds = max(index.base_seconds, 1e-12)
        # Errors are scaled by the limit, or by the error that one choice can cause.
        most = max((line.value_seconds / line.error_price for line in self._lines() if line.error_price), default=1.0)
        self.scale_error = self.limits.squared_error if 0 < self.limits.squared_error < math.inf else max(most, 1e-30)
        self.memory, self.room = self._memory_rows()

    def seconds(self, budget_bytes: int) -> float:
        """Return a lower bound, in seconds, of the time of the whole step under any plan within the budget.

        The bound is ``inf`` if no plan fits.
        """
        count = len(self.regions)
        if not count:
            return self.index.base_seconds
        absent = csr_array((len(self.memory), count))
        held, sent = csr_array(self.memory[:, :count]), csr_array(self.memory[:, count:])
        memory = sparse.hstack([held, absent, sent, absent, absent, absent])
        rows = _Rows(6 * count)
        self._add_lines(rows)
        self._add_transfers(rows)
        self._add_limits(rows)
        nothing_lossy = self.limits.squared_error == 0
        most = [region.most_bytes / self.scale_bytes for region in self.regions]
        result = solve_linear(
            np.concatenate([np.zeros(3 * count), np.ones(3 * count)]),
            A_ub=sparse.vstack([memory, rows.table()], format="csr"),
            b_ub=np.concatenate([(budget_bytes - self.room) / self.scale_bytes, rows.right]),
            bounds=[
                *((0.0, bytes_) for bytes_ in most),
                *((0.0, 0.0 if nothing_lossy else None) for _ in range(count)),
                *((0.0, None) for _ in range(4 * count)),
            ],
        )
        if result is None:
            return np.inf
        # Subtract the solver's tolerance: a bound must never be too high.
        return self.index.base_seconds + max(float(result.fun) - 1e-7, 0.0) * self.scale_seconds

    def _lines(self) -> Iterator[Line]:
        """Yield lower bounds of the seconds of each region, as lines: the more bytes it holds, the fewer seconds.

        The lines are from the lower convex hull of the region's choices (what to keep or recompute).
        """
        return (line for region in self.regions for line in region.hull.lines)

    def _add_lines(self, rows: _Rows) -> None:
        """Add rows to the linear program that bound the seconds of each region from below.

        They are the rows 2 of the module's legend.
        """
        count = len(self.regions)
        for at, region in enumerate(self.regions):
            for line in region.hull.lines:
                # The engine only spends seconds of its own in regions that it touches. It does not touch a region that
                # keeps everything, so for such a region the row must not demand any seconds.
                untouched = line.price_seconds_per_byte * region.kept_bytes
                rows.add(
                    (at, -line.price_seconds_per_byte * self.scale_bytes / self.scale_seconds),
                    (count + at, -line.error_price * self.scale_error / self.scale_seconds),
                    (2 * count + at, -line.link_price * self.scale_bytes / self.scale_seconds),
                    (3 * count + at, -1.0),
                    at_most=-min(untouched, line.value_seconds + region.touch_seconds) / self.scale_seconds,
                )

    def _add_transfers(self, rows: _Rows) -> None:
        """Add rows to the linear program that bound the seconds of waiting for transfers.

        They are the rows 6 of the module's legend. Each region has one row for each direction.
        """
        count = len(self.regions)
        link = self.index.forms.link
        for at, view in enumerate(self.index.views):
            after = self.index.neighbour(view.call.index)
            if link is None or after is None:
                continue
            windows = self.index.transfer_windows(view.call, after)
            for way, speed in enumerate((link.out_bytes_per_second, link.in_bytes_per_second)):
                rows.add(
                    (2 * count + at, self.scale_bytes / speed / self.scale_seconds),
                    ((4 + way) * count + at, -1.0),
                    at_most=windows[way] / self.scale_seconds,
                )

    def _add_limits(self, rows: _Rows) -> None:
        """Add two constraints to the linear program, if the user has set these limits (row 7 of the module's legend).

        One bounds the squared error that lossy codecs cause in all regions together. The other bounds the bytes that all
        regions together offload to host memory.
        """
        count = len(self.regions)
        if 0 < self.limits.squared_error < math.inf:
            share = self.scale_error / self.limits.squared_error
            rows.add(*((count + at, share) for at in range(count)), at_most=1.0)
        if self.limits.link_bytes is not None:
            rows.add(*((2 * count + at, 1.0) for at in range(count)), at_most=self.limits.link_bytes / self.scale_bytes)

    def _memory_rows(self) -> tuple[Floats, Floats]:
        """Return the rows that limit the bytes in memory to the budget (rows 3 to 5 of the module's legend).

        They are a table with the coefficients of R (bytes that regions hold) and B (bytes that they offload), and an array
        with, for each row, the bytes that are alive in addition. A region is a module call.
        """
        edges = {0, self.index.instants, self.index.last_wait}
        for region in self.regions:
            edges |= {region.frame.exit, region.frame.start, region.frame.stop, *region.sent_until, *region.back_from}
        ordered = sorted(edge for edge in edges if 0 <= edge <= self.index.instants)
        rows, room = [], []
        exits = np.array([region.frame.exit for region in self.regions])
        starts = np.array([region.frame.start for region in self.regions])
        sends = np.array(
            [region.source_share > 0 or region.buffer_share > 0 for region in self.regions], dtype=np.bool_
        )
        at, waiting = self.index.handover, self.index.waiting
        waits = waiting * ((exits <= at) & (at < starts))
        for a, b in itertools.pairwise(ordered):
            between = np.zeros((len(self.regions), 2))
            between[:, 0] = is_held = (exits <= a) & (b <= starts)
            for position in np.flatnonzero(is_held & sends).tolist():
                between[position, 1] = self.regions[position].sent_share(a, b)
            between[:, 0] += waits if a < self.index.last_wait else 0.0
            active = [p for p, r in enumerate(self.regions) if r.frame.start <= a and b <= r.frame.stop]
            level = self.fixed[a:b].copy()
            for position in active:
                frame = self.regions[position].frame
                level += self.regions[position].read[a - frame.start : b - frame.start]
            rows.append(between.T.ravel())
            room.append(int(level.max()))
            for position in active:
                region = self.regions[position]
                past = region.past[a - region.frame.start : b - region.frame.start]
                with_own = between.copy()
                with_own[position] = (1.0 + (waits[position] if a < self.index.last_wait else 0.0), region.buffer_share)
                rows.append(with_own.T.ravel())
                room.append(int((level - past).max()))
        return np.array(rows).reshape(len(rows), 2 * len(self.regions)), np.array(room, dtype=np.float64)


class _Rows:
    """Collects the rows of a linear program in a sparse table. Each row has an upper limit for its sum (``right``)."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._entries: list[tuple[int, int, float]] = []
        self.right: list[float] = []

    def add(self, *entries: tuple[int, float], at_most: float) -> None:
        """Add one row: the sum of its entries, given as (column, number) pairs, must not exceed ``at_most``."""
        self._entries += [(len(self.right), column, number) for column, number in entries]
        self.right.append(at_most)

    def table(self) -> csr_array:
        """Return all rows that were added, as one sparse table of the linear program's coefficients."""
        at = np.array([(row, column) for row, column, _ in self._entries], dtype=np.int64).reshape(-1, 2)
        numbers = np.array([number for _, _, number in self._entries], dtype=np.float64)
        return coo_array((numbers, (at[:, 0], at[:, 1])), shape=(len(self.right), self._columns)).tocsr()


def _describe(index: StepIndex, view: RegionView, choice_set: ChoiceSet) -> _Region:
    """Return the numbers of one region that the linear program needs: its bytes, its reads, and its transfers."""
    frame = frame_of(index, view)
    bytes_of = held_bytes(index, view)
    length = max(frame.stop - frame.start, 0)
    own = {v: bytes_of[v] for v in view.decided}
    reads: dict[int, list[Span]] = {}
    held = np.zeros(length + 1, dtype=np.int64)
    read = np.zeros(length + 1, dtype=np.int64)

    def add(curve: Ints, a: int, b: int, size: int) -> None:
        curve[min(max(a - frame.start, 0), length)] += size
        curve[min(max(b - frame.start, 0), length)] -= size

    for value, size in own.items():
        storage = view.graph.values[value].storage
        first = min((2 * slot.unpacked for slot in view.slots_of[value] if slot.unpacked >= 0), default=frame.start)
        for a, b in subtract([(frame.start, max(first, frame.start))], index.covered(storage)):
            add(held, a, b, int(size))
        spans = [
            (2 * slot.unpacked + 1, slot_stop(index.trace, slot)) for slot in view.slots_of[value] if slot.unpacked >= 0
        ]
        reads.setdefault(storage, []).extend(spans)
    for storage, spans in reads.items():
        for a, b in subtract(merge(spans), index.covered(storage)):
            add(read, a, b, index.trace.storages[storage].bytes)
    all_bytes = float(sum(own.values()))
    copies = sum(bytes_of[v] for v in view.copied)
    touch = engine_seconds(index, view)
    past = int(all_bytes + copies) - np.cumsum(held)[:-1]
    after = index.neighbour(view.call.index)
    source_share, buffer_share = _shares_of_sent(view)
    return _Region(
        frame,
        choice_set.hull,
        all_bytes,
        all_bytes + copies,
        touch,
        np.cumsum(read)[:-1],
        past,
        () if after is None else (2 * after.forward[1],),
        () if after is None else (2 * after.backward[0],),
        source_share,
        buffer_share,
    )


def _shares_of_sent(view: RegionView) -> tuple[float, float]:
    """Return two numbers for the transfers of a region: bytes on the device for each byte sent, before and after.

    Before the transfer they are in the source, the tensor that is sent out. After it they are in the buffer that receives the
    value. Both numbers are the least over the region's values. If two values share one source, the first number is 0.
    """
    ratios, storages = [], []
    for value in view.decided:
        entry = view.forms.get(value)
        sent = [form.link_bytes for form in (entry.forms if entry is not None else ()) if form.link_bytes]
        if sent:
            ratios.append(view.graph.values[value].bytes / max(sent))
            storages.append(view.graph.values[value].storage)
    buffer_share = min(ratios, default=0.0)
    return (buffer_share if len(set(storages)) == len(storages) else 0.0), buffer_share


def _relief(index: StepIndex) -> Ints:
    """Return an array with, for each instant, bytes that R counts although they are in memory under any plan.

    R is what regions hold between forward and backward. The bytes are in storages that are alive under any plan for a part of
    that time.
    """
    change = np.zeros(index.instants + 1, dtype=np.int64)
    for view in index.views:
        frame = frame_of(index, view)
        for storage in {view.graph.values[v].storage for v in view.decided}:
            for a, b in relief_spans(index, frame, storage):
                change[a] += index.trace.storages[storage].bytes
                change[b] -= index.trace.storages[storage].bytes
    return np.cumsum(change)[:-1]


def _least_fixed(index: StepIndex, *, boundaries: bool) -> Ints:
    """Return an array with, for each instant, the least bytes that are alive without the bytes that regions hold.

    The bytes of micro-batches that wait for their backward are included.
    """
    less = _relief(index) + (index.fixed - _without_boundaries(index) if boundaries else 0)
    least: Ints = index.fixed - less - index.waits(int(less[index.handover]))
    return least


def _without_boundaries(index: StepIndex) -> Ints:
    """Return an array with, for each instant, the bytes alive under any plan, if regions drop their inputs.

    Only inputs that can be rebuilt are dropped.
    """
    linked = {view.call.index: boundary_values(index, view) for view in index.views}
    fixed = index.fixed.copy()
    storages = {index.views[r].graph.values[v].storage for r, values in linked.items() for v in values}
    for storage in storages:
        for a, b in subtract(index.covered(storage), actual_cover(index, storage, linked)):
            fixed[a:b] -= index.trace.storages[storage].bytes
    return fixed
