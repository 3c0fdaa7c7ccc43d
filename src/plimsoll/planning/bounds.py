"""Hulls of all regions and a budget in, seconds that no plan of the engine undercuts out: a linear program.

Legend. ``R[r]`` = bytes that region r holds between its forward and its backward, ``s[r]`` = its seconds of replay.

==  ==========================================================  ======================================================
1   minimise Σ s[r]
2   s[r] ≥ value_k - price_k · R[r]                             every line of the hull, so for every choice, found or not
3   fixed[m] + Σ_between R[j] ≤ budget                          every instant m outside of backwards
4   fixed[m] + Σ_between R[j] + read[m] ≤ budget                m in the backward of r: what is read then is in memory
5   fixed[m] + Σ_between R[j] + read[m] + R[r] - past[m] ≤ …    the same, with what r still holds for later
==  ==========================================================  ======================================================

``past[m]`` are the bytes that need no longer be held at m, so ``R[r] - past[m]`` is never more than what is held. Replay's
own memory is left out (only values being read count), so this is a bound for every choice. It bounds this model of the
machine (each op run again at most once, these costs), not the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from plimsoll.planning.choices import ChoiceSet, prices_of
from plimsoll.planning.effects import Frame, frame_of, relief_spans
from plimsoll.planning.frontier import Hull
from plimsoll.planning.replay import boundary_values
from plimsoll.planning.simulate import actual_cover, engine_seconds
from plimsoll.planning.step import Ints, RegionView, StepIndex, merge, slot_stop, subtract

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Region:
    """What rows 2 to 5 need of one region: ``read`` and ``past`` per instant of its backward.

    ``kept_bytes`` is R if everything is kept, ``most_bytes`` if inputs are copied as well.
    """

    frame: Frame
    hull: Hull
    kept_bytes: float
    most_bytes: float
    touch_seconds: float
    read: Ints
    past: Ints


class LowerBound:
    """The program for one step; ``boundaries`` says whether plans that drop region inputs are bounded too."""

    def __init__(self, index: StepIndex, sets: Sequence[ChoiceSet], *, boundaries: bool = False) -> None:
        self.index = index
        self.regions = [_describe(index, view, choice_set) for view, choice_set in zip(index.views, sets, strict=True)]
        self.fixed = (_without_boundaries(index) if boundaries else index.fixed) - _relief(index)
        self.rows, self.room = self._memory_rows()
        self.lines, self.values = self._line_rows()

    def seconds(self, budget_bytes: int) -> float:
        """Seconds of the whole step that no plan within the budget undercuts; ``inf`` if no plan fits."""
        count = len(self.regions)
        if not count:
            return self.index.base_seconds
        scale_bytes = max(float(self.fixed.max()), 1.0)
        scale_seconds = max(self.index.base_seconds, 1e-12)
        memory = np.hstack([self.rows, np.zeros((len(self.rows), count))])
        lines = np.hstack([-self.lines * scale_bytes / scale_seconds, -self.lines_of_regions])
        result = linprog(
            np.concatenate([np.zeros(count), np.ones(count)]),
            A_ub=np.vstack([memory, lines]),
            b_ub=np.concatenate([(budget_bytes - self.room) / scale_bytes, -self.values / scale_seconds]),
            bounds=[(0.0, region.most_bytes / scale_bytes) for region in self.regions] + [(0.0, None)] * count,
            method="highs",
        )
        if result.status == 2:
            return np.inf
        assert result.status == 0, f"HiGHS: {result.message}"
        # The solver may be off by its tolerance, a bound may not.
        return self.index.base_seconds + max(float(result.fun) - 1e-7, 0.0) * scale_seconds

    def _line_rows(self) -> tuple[Floats, Floats]:
        rows, owners, values = [], [], []
        count = len(self.regions)
        for position, region in enumerate(self.regions):
            for line in region.hull.lines:
                price = line.price_seconds_per_byte
                row = np.zeros(count)
                row[position] = price
                owner = np.zeros(count)
                owner[position] = 1.0
                rows.append(row)
                owners.append(owner)
                values.append(min(price * region.kept_bytes, line.value_seconds + region.touch_seconds))
        self.lines_of_regions = np.array(owners).reshape(-1, count)
        return np.array(rows).reshape(-1, count), np.array(values)

    def _memory_rows(self) -> tuple[Floats, Floats]:
        """Rows 3 to 5: coefficients of R, and the bytes that are there besides."""
        edges = {0, self.index.instants}
        for region in self.regions:
            edges |= {region.frame.exit, region.frame.start, region.frame.stop}
        ordered = sorted(edge for edge in edges if 0 <= edge <= self.index.instants)
        rows, room = [], []
        for a, b in itertools.pairwise(ordered):
            between = [region.frame.exit <= a and b <= region.frame.start for region in self.regions]
            active = [p for p, r in enumerate(self.regions) if r.frame.start <= a and b <= r.frame.stop]
            level = self.fixed[a:b].copy()
            for position in active:
                frame = self.regions[position].frame
                level += self.regions[position].read[a - frame.start : b - frame.start]
            rows.append(np.array(between, dtype=np.float64))
            room.append(int(level.max()))
            for position in active:
                frame = self.regions[position].frame
                past = self.regions[position].past[a - frame.start : b - frame.start]
                with_own = np.array(between, dtype=np.float64)
                with_own[position] = 1.0
                rows.append(with_own)
                room.append(int((level - past).max()))
        return np.array(rows).reshape(-1, len(self.regions)), np.array(room, dtype=np.float64)


def _describe(index: StepIndex, view: RegionView, choice_set: ChoiceSet) -> _Region:
    frame = frame_of(index, view)
    prices = prices_of(index, view)
    length = max(frame.stop - frame.start, 0)
    own = {v: prices.held_bytes[v] for v in view.decided}
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
    for storage in {view.graph.values[v].storage for v in view.decided}:
        spans = [
            (2 * slot.unpacked + 1, slot_stop(index.trace, slot))
            for v in view.decided
            if view.graph.values[v].storage == storage
            for slot in view.slots_of[v]
            if slot.unpacked >= 0
        ]
        for a, b in subtract(merge(spans), index.covered(storage)):
            add(read, a, b, index.trace.storages[storage].bytes)
    all_bytes = float(sum(own.values()))
    copies = sum(prices.held_bytes[v] for v in view.copied)
    touch = engine_seconds(index, view)
    past = int(all_bytes + copies) - np.cumsum(held)[:-1]
    return _Region(frame, choice_set.hull, all_bytes, all_bytes + copies, touch, np.cumsum(read)[:-1], past)


def _relief(index: StepIndex) -> Ints:
    """What R may count twice: storages alive anyway for a part of the time between forward and backward."""
    change = np.zeros(index.instants + 1, dtype=np.int64)
    for view in index.views:
        frame = frame_of(index, view)
        for storage in {view.graph.values[v].storage for v in view.decided}:
            for a, b in relief_spans(index, frame, storage):
                change[a] += index.trace.storages[storage].bytes
                change[b] -= index.trace.storages[storage].bytes
    return np.cumsum(change)[:-1]


def _without_boundaries(index: StepIndex) -> Ints:
    """The fixed bytes if every region input that can be rebuilt were let go."""
    linked = {view.call.index: boundary_values(index, view) for view in index.views}
    fixed = index.fixed.copy()
    storages = {index.views[r].graph.values[v].storage for r, values in linked.items() for v in values}
    for storage in storages:
        for a, b in subtract(index.covered(storage), actual_cover(index, storage, linked)):
            fixed[a:b] -= index.trace.storages[storage].bytes
    return fixed
