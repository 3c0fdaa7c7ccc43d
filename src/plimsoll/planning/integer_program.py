"""Picks one choice for each region such that the step takes the least seconds within a budget.

It solves a mixed-integer program with HiGHS. A choice says which saved values of a region (a module) are kept, recomputed or
stored in another form. A window is a stretch of the step; its peak is a sum over the regions' choices.

Legend. ``z[r, c]`` = 1 if region r takes choice c; ``load[w]`` = the bytes that the choices add in window w; ``last`` = 1,
or the peak if the peak is minimised. ``added`` and ``fixed`` come from ``windows``:

==  ===========================================================================  ==================================
1   minimise Σ seconds[r, c] · z[r, c] + step · last                             (or ``last`` alone, for the floor)
2   Σ_c z[r, c] = 1                                                              for every region r
3   load[w] - load[w - 1] = Σ_r,c (added[r][w, c] - added[r][w - 1, c]) z[r, c]  for every window w
4   load[w] ≤ budget - fixed[w]                                                  (or ``last`` - fixed[w])
5   Σ_r,c error²[r, c] · z[r, c] ≤ max_error²; Σ_r,c link[r, c] · z[r, c] ≤ …    if values have other forms
==  ===========================================================================  ==================================

Row 3 states the sums as differences: only a few regions change from one window to the next, so the matrix stays sparse at
any depth. The step's own seconds are in the objective, so gaps are relative to the whole step.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array, csc_array, csr_array, vstack

from plimsoll.planning.choice import Limits
from plimsoll.planning.choices import ChoiceSet
from plimsoll.planning.effects import Effect
from plimsoll.planning.highs import INFEASIBLE, LIMIT, NODES_SPENT, OPTIMAL, quiet, solve_linear
from plimsoll.planning.rounding import QUICK, THOROUGH, Room, Taken, lower_peak, round_down, search_near, speed_up
from plimsoll.planning.step import StepIndex
from plimsoll.planning.windows import build_windows

Floats = npt.NDArray[np.float64]

FINE_GAP = 1e-4
COARSE_GAP = 3e-3
EXACT_GAP = 0.0
WIDE_GAP = 1e-2
"""If a plan found by search is within this distance from the optimum, do not branch: it would take too much time.

The distance is a share of the step's time. Near the floor (lowest reachable peak) many windows (stretches of the step) are full
at once, and plans found near the relaxed optimum may be this far from it.
"""
SMALL_COLUMNS = 400
"""A program with at most this many choices (what to keep or recompute) is small: it is solved by branching to the end, if its
choices are complete.
"""
# Equal blocks make the program symmetric, so that closing the last thousandth of the gap can take a minute. With this limit the
# search took 0.4 s on a Llama of 8 blocks (docs/project/lab-notes.md).
MOST_NODES = 400
"""The most nodes that branching visits in a search whose answer only has to be within a gap (a distance from the optimum)."""
STAGE_SECONDS = 2.0
"""Time limit in seconds for a search of at most ``MOST_NODES`` nodes, because in deep models one node can take longer than a
whole search in shallow models."""
FLOOR_GAP = 2e-3
NEAR_FLOOR = 1e-2
"""The search for the smallest peak stops when its result is at most this share above the optimum, if there are many choices. If
there are few, the share is ``FLOOR_GAP``.
"""
_HAIR = 1e-9
"""Tolerance for rounding in linear programs. Peaks that differ by at most this share count as equal, and a reduced cost less
than this below 0 counts as 0."""
_SPARED, _JOINING = 32, 3
"""Linear programs start with one choice in 32; then up to 3 choices of each region (module call) join at a time. The optimum is
the same as with all choices from the start, in a third to a fifth of the time (docs/project/design/many-choices-at-once.md).
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """Data: the result of one run of the solver.

    ``effects`` has the choice taken for each region, with its memory and time; ``None`` if the solver found no combination.
    ``lower_value`` is a proven lower bound of the minimised number (seconds added to the step, or bytes of the peak).
    ``is_finished`` is False if the time ran out.
    """

    effects: tuple[Effect, ...] | None
    lower_value: float
    is_finished: bool


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Data: the optimum of the relaxed program, which may mix choices of one region.

    ``shares`` has, for each choice of each region in one row, its share in the mix. ``window_prices`` has, for each window (a
    stretch of the step), the seconds per step that one more byte in it would save (the duals of row 4). ``reduced_seconds``
    has, for each choice, a lower bound of the seconds that the step takes beyond the optimum if the choice is taken whole.
    """

    shares: Floats
    seconds: float
    window_prices: Floats
    reduced_seconds: Floats


class ChoiceProblem:
    """The mixed-integer program that picks one choice for each region of a step. It is built once, for many budgets."""

    def __init__(
        self, index: StepIndex, sets: Sequence[ChoiceSet], time_limit_seconds: float, limits: Limits | None = None
    ) -> None:
        self.windows = build_windows(index, sets)
        self.effects = self.windows.effects
        self.step_seconds = max(index.base_seconds, 1e-12)
        self.deadline = time.monotonic() + time_limit_seconds
        self.columns = sum(map(len, self.effects))
        self.seconds = np.array([effect.seconds for effects in self.effects for effect in effects])
        self._region_of = np.repeat(np.arange(len(self.effects)), list(map(len, self.effects)))
        # A power of two, so that sums of bytes stay exact. With rounded sums HiGHS's presolve can loop for ever
        # (docs/project/lab-notes.md, "A solver that never comes back").
        self.unit_bytes = 2.0 ** round(math.log2(max(float(self.windows.fixed_bytes.max()) / 10, 1.0)))
        self.matrix = self._rows()
        self._found: tuple[Taken, ...] = ()
        self._set_limits(limits or Limits())

    def relimited(self, limits: Limits, time_limit_seconds: float) -> ChoiceProblem:
        """Return a copy of the program with other limits on gradient error and offloaded bytes, and a new time limit."""
        other = copy.copy(self)
        other.deadline = time.monotonic() + time_limit_seconds
        other._found = ()
        other._set_limits(limits)
        return other

    def _set_limits(self, limits: Limits) -> None:
        taken = [effect for effects in self.effects for effect in effects]
        self.limits = limits
        self.shared = self._shared_rows()
        self.affordable = np.array([float(limits.allow(e.squared_error, e.link_bytes)) for e in taken])
        """An array with, for each choice, the upper bound of the choice's variable in the program. It is 0 if the choice alone
        exceeds the limits on error or offloaded bytes, else 1.
        """
        self._usable = np.flatnonzero(self.affordable > 0)
        self._at_work = self._usable[self._usable % _SPARED == 0]
        """The positions of the choices that are in the linear programs from the start. Other choices are added if they would
        help.
        """

    def choose(self, budget_bytes: int, gap_of_step: float = FINE_GAP) -> Selection:
        """Return the choices, one for each region, that take the least seconds and fit the budget in every window.

        A window is a stretch of the step. First the relaxed program, which may mix choices, is rounded. If the result is not
        within the gap, combinations near the optimum are searched. With a gap of 0 the solver then branches over the choices
        whose reduced cost still lets them win.

        Args:
            budget_bytes: the limit for every window.
            gap_of_step: the accepted distance from the optimum, as a share of the step, for an answer found by search.
        """
        relaxed = self.relax(budget_bytes)
        if relaxed is None:
            return Selection(effects=None, lower_value=np.inf, is_finished=True)
        room = Room(self.windows, budget_bytes, self.limits)
        # Search before branching: branching takes seconds, mostly for the last thousandth of the gap, and with a time limit the
        # plan would depend on the load of the machine (docs/project/design/many-choices-at-once.md).
        starts = [taken for taken in self._found if room.holds(taken)]
        rounded = round_down(room, relaxed.shares)
        starts += [] if rounded is None else [rounded]
        best = min(starts, key=lambda taken: room.figures(taken)[0], default=None)
        enough_seconds = relaxed.seconds + gap_of_step * self.step_seconds
        effort = THOROUGH if gap_of_step < COARSE_GAP else QUICK
        best = search_near(room, relaxed.reduced_seconds, best, relaxed.seconds, enough_seconds, effort)
        if FINE_GAP <= gap_of_step < COARSE_GAP:
            enough_seconds = relaxed.seconds + WIDE_GAP * self.step_seconds
        if gap_of_step < COARSE_GAP and (best is None or room.figures(best)[0] > enough_seconds):
            selection = self._branch(budget_bytes, relaxed, best, gap_of_step)
            if gap_of_step == EXACT_GAP or selection.effects is None:
                return selection
            best = search_near(
                room, relaxed.reduced_seconds, self._taken_of(selection.effects), relaxed.seconds, enough_seconds
            )
        return self._selection(best, relaxed.seconds, is_finished=True)

    def _selection(self, taken: Taken | None, lower_value: float, *, is_finished: bool) -> Selection:
        """Return the result for a combination of choices, and store the combination as a start for later searches."""
        if taken is None:
            return Selection(None, lower_value, is_finished)
        self._found = tuple(dict.fromkeys((*self._found, taken)))
        return Selection(self._effects_of(taken), lower_value, is_finished)

    def _effects_of(self, taken: Taken) -> tuple[Effect, ...]:
        """Return, for each region, the memory and time that it adds under a combination of choices (what to keep)."""
        return tuple(choices[c] for choices, c in zip(self.effects, taken, strict=True))

    def _taken_of(self, effects: tuple[Effect, ...]) -> Taken:
        """Return the combination of choices that has these effects (added memory and time), one for each region.

        A combination has, for each region, the position of its choice in the region's list.
        """
        return tuple(choices.index(effect) for choices, effect in zip(self.effects, effects, strict=True))

    def _branch(self, budget_bytes: int, relaxed: Relaxed, known: Taken | None, gap_of_step: float) -> Selection:
        """Return the optimum within a gap, found by branching, if the time suffices.

        ``known`` is a combination (one choice for each region) that fits, or ``None``. Choices that cannot be in a better
        combination are left out.
        """
        bounds = self._budget_bounds(budget_bytes)
        known_effects = None if known is None else self._effects_of(known)
        known_seconds = sum(effect.seconds for effect in known_effects) if known_effects is not None else np.inf
        slack_seconds = (known_seconds - relaxed.seconds) * (1 + 1e-6) + 1e-9 * self.step_seconds
        bounds.ub[: self.columns][relaxed.reduced_seconds > slack_seconds] = 0.0
        aim = np.concatenate([self.seconds / self.step_seconds, np.zeros(len(self.windows.spans)), [1.0]])
        selection = self._solve(aim, bounds, [], gap_of_step, None if gap_of_step == EXACT_GAP else MOST_NODES)
        if selection.effects is None and known_effects is not None:
            return Selection(known_effects, relaxed.seconds, selection.is_finished)
        lower_seconds = max((selection.lower_value - 1.0) * self.step_seconds, relaxed.seconds)
        return Selection(selection.effects, lower_seconds, selection.is_finished)

    def minimise_peak(self) -> Selection:
        """Return the choices, one for each region, with the smallest peak.

        As far as this peak allows, they are then made faster.
        """
        found = self._lowest_peak()
        if found.effects is None:
            return found
        # A fast plan holds as much at the loss as later plans will. The first step runs this plan, and its measured excess
        # over the prediction would be too small for them otherwise.
        taken = self._taken_of(found.effects)
        room = Room(self.windows, self._peak_bytes(taken), self.limits)
        return self._selection(speed_up(room, taken), found.lower_value, is_finished=found.is_finished)

    def _lowest_peak(self) -> Selection:
        """Return the choices, one for each region, with the smallest peak that is found.

        The relaxed optimum, which may mix choices, is rounded. If the result is not close enough to the optimum, a search
        follows.
        """
        windows = len(self.windows.spans)
        aim = np.concatenate([np.zeros(self.columns + windows), [1.0]])
        window = np.arange(windows)
        rows = np.concatenate([window, window])
        columns = np.concatenate([self.columns + window, np.full(windows, self.columns + windows)])
        data = np.concatenate([np.ones(windows), -np.ones(windows)])
        below_peak = coo_array((data, (rows, columns)), shape=(windows, len(aim))).tocsr()
        room = LinearConstraint(below_peak, -np.inf, -self.windows.fixed_bytes / self.unit_bytes)
        bounds = self._bounds(np.full(windows, np.inf), (0.0, np.inf))
        least, lifts = self._relaxed_peak(aim, bounds, room)
        least_bytes = least * self.unit_bytes
        if not np.isfinite(least_bytes):
            return Selection(effects=None, lower_value=np.inf, is_finished=True)
        start = self._lowest_rounded(least_bytes, lifts * self.unit_bytes)
        # Within this distance, branching over many choices has not been seen to find anything better.
        close = FLOOR_GAP if self.columns <= SMALL_COLUMNS else NEAR_FLOOR
        if start is not None and self._peak_bytes(start) <= least_bytes * (1 + close):
            return self._selection(start, least_bytes, is_finished=True)
        if start is not None:
            bounds.ub[-1] = self._peak_bytes(start) * (1 + _HAIR) / self.unit_bytes
        selection = self._solve(aim, bounds, [room], FLOOR_GAP, MOST_NODES)
        lower_bytes = max(selection.lower_value * self.unit_bytes, least_bytes) if selection.effects else least_bytes
        known = start if selection.effects is None else self._taken_of(selection.effects)
        best = None
        if known is not None:
            best = lower_peak(self.windows, self.limits, lifts * self.unit_bytes, known, int(lower_bytes))
        if best is not None and self._peak_bytes(best) <= lower_bytes * (1 + NEAR_FLOOR):
            return self._selection(best, lower_bytes, is_finished=True)
        if selection.is_finished and best is None:
            return selection
        selection = self._solve(aim, bounds, [room], NEAR_FLOOR)
        if selection.effects is None:
            return self._selection(best, lower_bytes, is_finished=selection.is_finished)
        return Selection(selection.effects, selection.lower_value * self.unit_bytes, selection.is_finished)

    def _peak_bytes(self, taken: Taken) -> int:
        """Return the step's peak in bytes if each region takes its choice in a combination."""
        return int(Room(self.windows, 0, self.limits).load(taken).max())

    def _lowest_rounded(self, least_bytes: float, lifts: Floats) -> Taken | None:
        """Return a combination of choices, one for each region, with a small peak; ``None`` if none is found.

        A few budgets are tried. The relaxed optimum (which mixes choices) of the first one that can be rounded to whole choices
        is then improved.
        """
        for gap in (0.0, FLOOR_GAP / 10, FLOOR_GAP, NEAR_FLOOR, 5 * NEAR_FLOOR):
            budget_bytes = max(math.ceil(least_bytes * (1 - _HAIR)), int(least_bytes * (1 + gap)))
            relaxed = self.relax(budget_bytes)
            if relaxed is None:
                continue
            room = Room(self.windows, budget_bytes, self.limits)
            found = round_down(room, relaxed.shares)
            if found is None:  # a beam through all regions may fit where rounding does not
                found = search_near(room, relaxed.reduced_seconds, None, relaxed.seconds, np.inf, QUICK)
            if found is not None:
                # Farther from the optimum, branching follows, which does not need a better start.
                is_near = gap <= NEAR_FLOOR
                return lower_peak(self.windows, self.limits, lifts, found, math.ceil(least_bytes)) if is_near else found
        return None

    def _relaxed_peak(self, aim: Floats, bounds: Bounds, room: LinearConstraint) -> tuple[float, Floats]:
        """Return the smallest peak in bytes if a region may mix choices, and the reduced cost of each choice.

        The peak is infinite if the program is infeasible.
        """
        result, _, reduced = self._optimum(aim, bounds, [(room.A, room.ub)])
        return (np.inf, reduced) if result is None else (float(result.fun), np.maximum(reduced, 0.0))

    def relax(self, budget_bytes: int) -> Relaxed | None:
        """Return the program's optimum under a budget if regions may mix choices; ``None`` if even then nothing fits."""
        windows = len(self.windows.spans)
        unit_seconds = max(float(self.seconds.max(initial=0.0)), 1e-30)
        aim = np.concatenate([self.seconds / unit_seconds, np.zeros(windows + 1)])
        result, shares, reduced = self._optimum(aim, self._budget_bounds(budget_bytes), [])
        if result is None:
            return None
        prices = -np.asarray(result.upper.marginals[-windows - 1 : -1], dtype=np.float64)
        return Relaxed(
            shares=shares,
            seconds=float(result.fun) * unit_seconds,
            window_prices=np.maximum(prices, 0.0) * unit_seconds / self.unit_bytes,
            reduced_seconds=np.maximum(reduced, 0.0) * unit_seconds,
        )

    def _optimum(
        self, aim: Floats, bounds: Bounds, more: list[tuple[csr_array, Floats]]
    ) -> tuple[OptimizeResult | None, Floats, Floats]:
        """Return the optimum of the relaxed program, and two arrays over the choices: their shares and their reduced costs.

        ``more`` are additional rows. The method is column generation. Of thousands of choices an optimum uses a few per region,
        and optima for other budgets use mostly the same choices. So start with few columns (choices), and add columns whose
        reduced costs show that they would help, until no column would help.
        """
        rows = more if self.shared is None else [*more, (self.shared, np.ones(self.shared.shape[0]))]
        above = csc_array(vstack([row for row, _ in rows])) if rows else None
        most = np.concatenate([right for _, right in rows]) if rows else None
        at_work = self._at_work
        while True:
            are_all = len(at_work) == len(self._usable)
            at = np.concatenate([at_work, np.arange(self.columns, len(aim))])
            # Row 2 keeps choices below 1. A column bound would absorb a part of their reduced costs.
            upper = np.concatenate([np.full(len(at_work), 1.0 if are_all else np.inf), bounds.ub[self.columns :]])
            result = solve_linear(
                aim[at],
                may_give_up=True,
                A_eq=self.matrix[:, at],
                b_eq=self._right_side(),
                A_ub=None if above is None else above[:, at],
                b_ub=most,
                bounds=np.column_stack([bounds.lb[at], upper]),
            )
            if result is None and not are_all:
                at_work = self._usable
                continue
            if result is None:
                return None, np.zeros(self.columns), np.zeros(self.columns)
            reduced = aim - self.matrix.T @ result.eqlin.marginals
            if above is not None:
                reduced -= above.T @ result.ineqlin.marginals
            helping = self._joining(reduced, at_work)
            if not len(helping):
                break
            at_work = np.union1d(at_work, helping)
        shares = np.zeros(self.columns)
        shares[at_work] = result.x[: len(at_work)]
        self._at_work = np.union1d(self._at_work, np.flatnonzero(shares) if are_all else at_work)
        return result, shares, reduced[: self.columns]

    def _joining(self, reduced: Floats, at_work: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions of the choices to add to the linear program, because they would lower its optimum most.

        They are at most 3 for each region. ``at_work`` are the choices that are in the program already.
        """
        helps = np.zeros(self.columns, dtype=np.bool_)
        helps[self._usable] = reduced[self._usable] < -_HAIR
        helps[at_work] = False
        found = np.flatnonzero(helps)
        found = found[np.lexsort((reduced[found], self._region_of[found]))]
        _, first = np.unique(self._region_of[found], return_index=True)
        rank = np.arange(len(found)) - np.repeat(first, np.diff([*first, len(found)]))
        return found[rank < _JOINING]

    def _budget_bounds(self, budget_bytes: int) -> Bounds:
        """Return lower and upper bounds of all variables of the linear program, if the bytes of each window (stretch of the
        step) must fit a budget.
        """
        return self._bounds((budget_bytes - self.windows.fixed_bytes) / self.unit_bytes, (1.0, 1.0))

    def _bounds(self, room: Floats, last: tuple[float, float]) -> Bounds:
        lower = np.concatenate([np.zeros(self.columns), np.full(len(room), -np.inf), [last[0]]])
        return Bounds(lower, np.concatenate([self.affordable, room, [last[1]]]))

    def _right_side(self) -> Floats:
        return np.concatenate([np.ones(len(self.effects)), np.zeros(len(self.windows.spans))])

    def _rows(self) -> csc_array:
        """Return the matrix of the program's rows 2 and 3 (see the module); its columns are the variables z, load and last."""
        regions, windows = len(self.effects), len(self.windows.spans)
        window = np.arange(windows)
        rows, columns, data = [regions + window, regions + window[1:]], [window, window[:-1]], [np.ones(windows)]
        columns = [self.columns + c for c in columns]
        data.append(-np.ones(max(windows - 1, 0)))
        first = 0
        for region, added in enumerate(self.windows.added_bytes):
            choices = np.arange(added.shape[1])
            rows.append(np.full(len(choices), region))
            columns.append(first + choices)
            data.append(np.ones(len(choices)))
            changes = np.diff(added, axis=0, prepend=0)
            at, choice = np.nonzero(changes)
            rows.append(regions + at)
            columns.append(first + choice)
            data.append(-changes[at, choice] / self.unit_bytes)
            first += len(choices)
        shape = (regions + windows, self.columns + windows + 1)
        return coo_array((np.concatenate(data), (np.concatenate(rows), np.concatenate(columns))), shape=shape).tocsc()

    def _shared_rows(self) -> csr_array | None:
        """Return the rows 5 (limits on error and offloaded bytes), scaled to a right side of 1; ``None`` if neither is limited.

        Their columns are the variables z, load and last.
        """
        rows = []
        for limit, spent in (
            (self.limits.squared_error, [effect.squared_error for effects in self.effects for effect in effects]),
            (self.limits.link_bytes, [effect.link_bytes for effects in self.effects for effect in effects]),
        ):
            if limit is not None and 0 < limit < np.inf and any(spent):
                rows.append(
                    np.concatenate([np.array(spent, dtype=np.float64) / limit, np.zeros(len(self.windows.spans) + 1)])
                )
        return csr_array(np.array(rows)) if rows else None

    def _solve(
        self,
        aim: Floats,
        bounds: Bounds,
        more: list[LinearConstraint],
        gap_of_step: float,
        most_nodes: int | None = None,
    ) -> Selection:
        """Solve the mixed-integer program with HiGHS, and return the selection; ``more`` are additional constraints.

        With ``most_nodes``, the solver may visit only this many nodes in ``STAGE_SECONDS``; otherwise the deadline limits it.
        """
        if np.any(bounds.ub < bounds.lb):
            return Selection(effects=None, lower_value=np.inf, is_finished=True)
        right = self._right_side()
        shared = [] if self.shared is None else [LinearConstraint(self.shared, -np.inf, 1.0)]
        with quiet():
            result = milp(
                aim,
                integrality=np.concatenate([np.ones(self.columns), np.zeros(len(aim) - self.columns)]),
                bounds=bounds,
                constraints=[LinearConstraint(self.matrix, right, right), *shared, *more],
                options={
                    "mip_rel_gap": gap_of_step,
                    "time_limit": max(self.deadline - time.monotonic(), 0.1) if most_nodes is None else STAGE_SECONDS,
                    "node_limit": most_nodes or sys.maxsize >> 32,
                },
            )
        return self._read(result)

    def _read(self, result: Any) -> Selection:
        """Translate the result of scipy's solver into a selection: the choice taken for each region, with a lower bound."""
        assert result.status in (OPTIMAL, LIMIT, INFEASIBLE, NODES_SPENT), f"HiGHS: {result.message}"
        if result.x is None:
            return Selection(effects=None, lower_value=np.inf, is_finished=result.status == INFEASIBLE)
        taken = []
        first = 0
        for effects in self.effects:
            taken.append(effects[int(np.argmax(result.x[first : first + len(effects)]))])
            first += len(effects)
        bound = result.mip_dual_bound
        lower_value = float(result.fun if bound is None else bound)
        return Selection(tuple(taken), lower_value, is_finished=result.status == OPTIMAL)
