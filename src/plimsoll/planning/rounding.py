"""Rounds a relaxed optimum, which mixes choices (what to keep or recompute), to whole choices that fit the budget, and searches
for better combinations.

A vertex of the relaxed program splits at most as many regions (module calls) between choices as there are windows (stretches of
the step) at the budget, so rounding changes little. `round_down` rounds towards less memory, then repairs, then spends the
memory left over. A remainder of room is lost that no single region can use. So `search_near` takes some regions at a time and
tries many combinations of their choices at once, while all other regions stay unchanged: a large neighbourhood search, each
step a beam search.

Source: Shaw (1998) for the neighbourhoods; reduced costs as the measure of nearness as in Balas and Zemel's (1980) core.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plimsoll.planning.choice import Limits
from plimsoll.planning.step import Ints
from plimsoll.planning.windows import Windows

Floats = npt.NDArray[np.float64]
Taken = tuple[int, ...]
"""A combination of choices: for each region, the position of its choice in the region's list."""

_SUPPORT = 1e-6
"""A choice with a smaller share than this is not part of the relaxed optimum: the share is noise of the linear program."""
_PASSES_AT_MOST = 4
_GROUPS = ((10, 3), (12, 2), (8, 2), (4, 1))
"""Pairs of numbers, one for each round of the search for a better combination of choices; then they repeat.

The first number says how many regions change their choices together. The second says how many of these are regions whose
present choice does not add time.
"""
_ROUNDS_AT_MOST = 12
"""A search for a better combination of choices stops after this many rounds. Each round divides all regions into new groups."""
_NEAREST = 256
"""A search combines only this many choices of each region: those with the smallest reduced costs (least seconds beyond the
optimum).
"""
_LEAST_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Effort:
    """Data: the limits of a search.

    ``width`` is the largest number of combinations (one choice for each region) that a beam search keeps from one region to the
    next. ``work`` is the largest number of table entries that it may add up. The search stops after ``stale_rounds`` rounds in
    a row without success.
    """

    width: int
    work: int
    stale_rounds: int


QUICK, THOROUGH = Effort(256, 2_000_000, 2), Effort(1024, 8_000_000, 4)


@dataclass(frozen=True, slots=True)
class Room:
    """The limits on a combination of choices, and the figures of the choices, to tell which combinations fit.

    The limits are on the bytes in each window (a stretch of the step), and on the gradient error and the offloaded bytes of all
    regions together.
    """

    windows: Windows
    budget_bytes: int
    limits: Limits

    def starts(self) -> list[int]:
        """Return, for each region, the column of its first choice in tables that have the choices of all regions as columns.

        The regions' choices follow each other. The number of all columns comes last.
        """
        return [0, *np.cumsum([len(choices) for choices in self.windows.effects]).tolist()]

    def load(self, taken: Taken) -> Ints:
        """Return an array with the bytes in each window under the choices in ``taken``."""
        parts = (table[:, choice] for table, choice in zip(self.windows.added_bytes, taken, strict=True))
        return sum(parts, self.windows.fixed_bytes.copy())

    def figures(self, taken: Taken) -> tuple[float, float, int]:
        """Return three sums over all regions of a combination: added seconds, squared gradient error, and offloaded bytes."""
        effects = [choices[c] for choices, c in zip(self.windows.effects, taken, strict=True)]
        return (
            sum(effect.seconds for effect in effects),
            sum(effect.squared_error for effect in effects),
            sum(effect.link_bytes for effect in effects),
        )

    def holds(self, taken: Taken) -> bool:
        """Return True if a combination of choices is within the budget in each window, and within the other limits."""
        _, squared_error, link_bytes = self.figures(taken)
        return self.limits.allow(squared_error, link_bytes) and int(self.load(taken).max()) <= self.budget_bytes


def round_down(room: Room, shares: Floats) -> Taken | None:
    """Turn a relaxed optimum, which mixes choices, into one choice for each region.

    The choices fit the limits together. ``None`` if they cannot be made to fit.

    Args:
        room: the limits.
        shares: the relaxed optimum's share of each choice, for the choices of all regions one after the other.
    """
    taken: list[int] = []
    for first, choices in zip(room.starts(), room.windows.effects, strict=False):
        support = np.flatnonzero(shares[first : first + len(choices)] > _SUPPORT)
        taken.append(min((int(c) for c in support), key=lambda c: (choices[c].retained_bytes, choices[c].seconds)))
    search = _Search(room, taken)
    if not search.repair():
        return None
    search.improve()
    return tuple(search.taken)


def speed_up(room: Room, taken: Taken) -> Taken:
    """Return a combination like ``taken``, but with faster choices where the limits allow this."""
    search = _Search(room, list(taken))
    search.improve()
    return tuple(search.taken)


def search_near(
    room: Room,
    reduced: Floats,
    start: Taken | None,
    least_seconds: float,
    enough_seconds: float,
    effort: Effort = THOROUGH,
) -> Taken | None:
    """Return the fastest combination of choices that is found near a relaxed optimum.

    The seconds of a combination are the relaxed optimum's seconds, plus the reduced costs of its choices, plus the value of the
    room that it leaves unused. So partial combinations are ranked by their reduced costs, and dropped if these exceed the
    possible gain.

    Args:
        room: the limits.
        reduced: for each choice of each region, a lower bound of the seconds that the step takes beyond the optimum if the
            choice is taken whole.
        start: a combination within the limits; ``None`` if none is known yet.
        least_seconds: the seconds of the relaxed optimum.
        enough_seconds: stop at a combination with at most these seconds.
        effort: how hard to search.
    """
    regions = range(len(room.windows.effects))
    beam = _Beam(room.windows, room.limits, reduced, effort)
    best = start if start is not None else beam.run(regions, [0] * len(regions), room.budget_bytes)
    draw = np.random.default_rng(0)
    stale = 0
    for turn in range(_ROUNDS_AT_MOST):
        if best is None or stale == effort.stale_rounds:
            break
        stale += 1
        for group in _grouped(best, beam.costs, beam.seconds, draw, turn):
            seconds = room.figures(best)[0]
            if seconds <= enough_seconds:
                return best
            found = beam.run(group, best, room.budget_bytes, seconds - least_seconds)
            if found is not None and room.figures(found)[0] < seconds * (1 - 1e-12):
                best, stale = found, 0
    return best


def lower_peak(windows: Windows, limits: Limits, reduced: Floats, start: Taken, least_bytes: int) -> Taken:
    """Return a combination with a smaller peak than the peak of ``start``, or ``start`` if the search finds nothing.

    The search stops at a peak of ``least_bytes``, because no peak can be smaller. ``reduced`` has, for each choice of each
    region, a lower bound of how much the peak grows if the choice is taken whole.
    """
    best, stale = start, 0
    beam = _Beam(windows, limits, reduced, QUICK)
    draw = np.random.default_rng(0)
    for turn in range(_ROUNDS_AT_MOST):
        if stale == QUICK.stale_rounds:
            break
        stale += 1
        for group in _grouped(best, beam.costs, beam.seconds, draw, turn):
            peak_bytes = int(Room(windows, 0, limits).load(best).max())
            if peak_bytes <= least_bytes:
                return best
            found = beam.run(group, best, peak_bytes - 1)
            if found is not None:
                best, stale = found, 0
    return best


def _grouped(
    taken: Taken, costs: Sequence[Floats], seconds: Sequence[Floats], draw: np.random.Generator, turn: int
) -> Iterator[list[int]]:
    """Yield groups of regions whose choices are changed together.

    Each region whose present choice adds time is in one group; regions with the largest reduced costs come first. Each group
    also has some regions that do not add time.
    """
    order = draw.permutation(len(taken)).tolist()
    order.sort(key=lambda region: -float(costs[region][taken[region]]))
    touched = [region for region in order if seconds[region][taken[region]] > 0]
    untouched = [region for region in order if seconds[region][taken[region]] <= 0]
    together, without = _GROUPS[turn % len(_GROUPS)]
    size = together - min(without, len(untouched))
    for at, first in enumerate(range(0, max(len(touched), 1), size)):
        more = together - len(touched[first : first + size])
        start = at * without % max(len(untouched), 1)
        yield sorted(touched[first : first + size] + untouched[start : start + more])


class _Beam:
    """A beam search: it extends partial combinations (one choice for each region) by one region after another, and keeps those
    nearest to the relaxed optimum (with the smallest sums of reduced costs).
    """

    def __init__(self, windows: Windows, limits: Limits, reduced: Floats, effort: Effort) -> None:
        self._windows, self._limits, self._effort = windows, limits, effort
        starts = Room(windows, 0, limits).starts()
        self.costs = [reduced[a:b] for a, b in itertools.pairwise(starts)]
        self._nearest = [np.argsort(costs, kind="stable")[:_NEAREST] for costs in self.costs]
        taken = ([(e.seconds, e.squared_error, e.link_bytes) for e in choices] for choices in windows.effects)
        self._figures = [np.array(rows, dtype=np.float64).reshape(-1, 3) for rows in taken]
        self.seconds = [figures[:, 0] for figures in self._figures]

    def run(
        self, regions: Sequence[int], current: Sequence[int], budget_bytes: int, most_reduced: float = np.inf
    ) -> Taken | None:
        """Return the fastest combination found if only these regions change; ``None`` if none is found.

        All other regions keep their choices in ``current``. ``most_reduced`` limits the sum of the reduced costs of all
        regions' choices.
        """
        others = [region for region in range(len(current)) if region not in regions]
        most = most_reduced * (1 + 1e-6) - sum(self.costs[r][current[r]] for r in others)
        near = {r: self._nearest[r][self.costs[r][self._nearest[r]] <= most] for r in regions}
        if not all(map(len, near.values())):
            return None
        tables, loads = self._tables(near, others, current, budget_bytes)
        figures = sum((self._figures[r][current[r]] for r in others), np.zeros(3))[None]
        width = self._effort.work // max(sum(table.size for table in tables.values()), 1)
        width = int(np.clip(width, _LEAST_WIDTH, self._effort.width))
        left = sum((table.min(axis=0) for table in tables.values()), np.zeros_like(loads[0]))
        costs, paths = np.zeros(1), np.zeros((1, 0), dtype=np.int64)
        # Regions with the most choices come last: they are most likely to find a choice that fits the remaining room.
        order = sorted(regions, key=lambda region: (len(near[region]), region))
        for region in order:
            left = left - tables[region].min(axis=0)
            reached = costs[:, None] + self.costs[region][near[region]]
            both = figures[:, None, :] + self._figures[region][near[region]]
            before, choice = np.nonzero((reached <= most) & self._are_allowed(both))
            nearest = np.argsort(reached[before, choice], kind="stable")
            before, choice, loads = _fitting(
                before[nearest], choice[nearest], loads, tables[region], left, width if region != order[-1] else 0
            )
            if not len(before):
                return None
            costs, figures = reached[before, choice], both[before, choice]
            paths = np.concatenate([paths[before], near[region][choice][:, None]], axis=1)
        best = paths[int(np.lexsort((loads.max(axis=1, initial=0), figures[:, 0]))[0])].tolist()
        chosen = dict(zip(order, best, strict=True))
        return tuple(chosen.get(region, choice) for region, choice in enumerate(current))

    def _tables(
        self, near: dict[int, Ints], others: Sequence[int], current: Sequence[int], budget_bytes: int
    ) -> tuple[dict[int, Ints], Ints]:
        """Return a table for each region in ``near``, with the bytes that its choices add, and the bytes of all other regions.

        Both contain only the windows whose bytes may exceed the budget. The load is relative to the budget: positive means too
        much.
        """
        windows = self._windows
        load = windows.fixed_bytes - budget_bytes
        load = load + sum((windows.added_bytes[r][:, current[r]] for r in others), np.zeros_like(load))
        tables = {r: windows.added_bytes[r][:, choices].T for r, choices in near.items()}
        may_bind = load + sum((table.max(axis=0) for table in tables.values()), np.zeros_like(load)) > 0
        return {r: np.ascontiguousarray(table[:, may_bind]) for r, table in tables.items()}, load[None, may_bind]

    def _are_allowed(self, figures: Floats) -> npt.NDArray[np.bool_]:
        limits = self._limits
        allowed = (figures[..., 1] <= limits.squared_error * (1 + 1e-6)) & np.isfinite(figures[..., 1])
        return allowed if limits.link_bytes is None else allowed & (figures[..., 2] <= limits.link_bytes)


def _fitting(before: Ints, choice: Ints, loads: Ints, added: Ints, left: Ints, width: int) -> tuple[Ints, Ints, Ints]:
    """Return the first ``width`` extended combinations of choices (what to keep) that leave enough memory for the smallest
    choices of the other regions.

    A ``width`` of 0 means all. The result has three arrays: the positions of the extended combinations, the added choices, and
    the new loads. Of combinations with equal loads in all windows only the first is kept.
    """
    # Compare loads by a random weighted sum modulo 2^64. If two different loads collided, only one combination would be lost.
    weights = np.random.default_rng(0).integers(2**62, size=loads.shape[1])
    found, table = np.zeros(0, dtype=np.int64), np.zeros((0, loads.shape[1]), dtype=np.int64)
    step = 4 * width or len(before)
    for first in range(0, len(before), max(step, 1)):
        new = loads[before[first : first + step]] + added[choice[first : first + step]]
        fits = np.flatnonzero((new <= -left).all(axis=1))
        found, table = np.concatenate([found, first + fits]), np.concatenate([table, new[fits]])
        kept = np.sort(np.unique(table @ weights, return_index=True)[1])[: width or None]
        found, table = found[kept], table[kept]
        if width and len(found) == width:
            break
    return before[found], choice[found], table


class _Search:
    """A local search: it holds one choice for each region (``taken``) and changes one region's choice at a time."""

    def __init__(self, room: Room, taken: list[int]) -> None:
        windows = room.windows
        self.taken = taken
        self._added = windows.added_bytes
        self._budget_bytes = room.budget_bytes
        self._limits = room.limits
        self._seconds = [np.array([e.seconds for e in choices]) for choices in windows.effects]
        self._errors = [np.array([e.squared_error for e in choices]) for choices in windows.effects]
        self._sent = [np.array([e.link_bytes for e in choices]) for choices in windows.effects]
        self._load = room.load(tuple(taken))
        _, self._error, self._link = room.figures(tuple(taken))

    def repair(self) -> bool:
        """Change choices of single regions until all windows are within the budget.

        Return whether this succeeded. A window is a stretch of the step.
        """
        if not self._limits.allow(self._error, self._link):
            return False
        for _ in range(_PASSES_AT_MOST):
            before = list(self.taken)
            for region in reversed(range(len(self.taken))):
                if self._load.max() <= self._budget_bytes:
                    return True
                excess = np.maximum(self._loads(region) - self._budget_bytes, 0).sum(axis=0)
                best = int(np.argmin(np.where(self._is_allowed(region), excess, np.inf)))
                if excess[best] < excess[self.taken[region]]:
                    self._take(region, best)
            if self.taken == before:
                break
        return bool(self._load.max() <= self._budget_bytes)

    def improve(self) -> None:
        """Give regions faster choices that fit the limits, as long as some region has one, for at most 4 passes."""
        for _ in range(_PASSES_AT_MOST):
            before = list(self.taken)
            # Late regions first: they hold their bytes for the shortest time.
            for region in reversed(range(len(self.taken))):
                fits = (self._loads(region) <= self._budget_bytes).all(axis=0) & self._is_allowed(region)
                best = int(np.argmin(np.where(fits, self._seconds[region], np.inf)))
                if self._seconds[region][best] < self._seconds[region][self.taken[region]]:
                    self._take(region, best)
            if self.taken == before:
                break

    def _loads(self, region: int) -> Ints:
        """Return a table of one region's bytes, with a row for each window and a column for each choice.

        An entry has the bytes of the window if the region takes this choice.
        """
        added = self._added[region]
        loads: Ints = (self._load - added[:, self.taken[region]])[:, None] + added
        return loads

    def _is_allowed(self, region: int) -> npt.NDArray[np.bool_]:
        now = self.taken[region]
        errors = self._error - self._errors[region][now] + self._errors[region]
        sent = self._link - self._sent[region][now] + self._sent[region]
        allowed = [self._limits.allow(e, b) for e, b in zip(errors.tolist(), sent.tolist(), strict=True)]
        return np.array(allowed)

    def _take(self, region: int, choice: int) -> None:
        now, added = self.taken[region], self._added[region]
        self._load = self._load - added[:, now] + added[:, choice]
        self._error += self._errors[region][choice] - self._errors[region][now]
        self._link += self._sent[region][choice] - self._sent[region][now]
        self.taken[region] = choice
