"""Rounds a relaxed optimum to whole choices that fit the budget: towards less memory, then repair, then spend what is left.

A vertex of the relaxed program splits no more regions between choices than there are windows at the budget, so rounding changes
little. Where the result is within the gap, nothing has to be branched.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plimsoll.planning.choice import Limits
from plimsoll.planning.effects import Effect
from plimsoll.planning.step import Ints
from plimsoll.planning.windows import Windows

_SUPPORT = 1e-6
"""Shares below are noise of the linear program, no choices."""
_PASSES_AT_MOST = 4


def round_down(
    windows: Windows, shares: npt.NDArray[np.float64], budget_bytes: int, limits: Limits
) -> tuple[Effect, ...] | None:
    """Whole choices near a relaxed optimum.

    Args:
        windows: the choices of every region, and what they add when.
        shares: per (region, choice) how much of it the relaxed optimum takes.
        budget_bytes: what no window may exceed.
        limits: what the choices may spend together.

    Returns:
        One effect per region, or ``None`` if rounding leaves the budget.
    """
    taken: list[int] = []
    first = 0
    for choices in windows.effects:
        support = np.flatnonzero(shares[first : first + len(choices)] > _SUPPORT)
        taken.append(min((int(c) for c in support), key=lambda c: (choices[c].retained_bytes, choices[c].seconds)))
        first += len(choices)
    search = _Search(windows, taken, budget_bytes, limits)
    if not search.repair():
        return None
    search.improve()
    return tuple(choices[c] for choices, c in zip(windows.effects, search.taken, strict=True))


class _Search:
    """One choice per region, changed one by one."""

    def __init__(self, windows: Windows, taken: list[int], budget_bytes: int, limits: Limits) -> None:
        self.taken = taken
        self._added = windows.added_bytes
        self._budget_bytes = budget_bytes
        self._limits = limits
        self._seconds = [np.array([e.seconds for e in choices]) for choices in windows.effects]
        self._errors = [np.array([e.squared_error for e in choices]) for choices in windows.effects]
        self._sent = [np.array([e.link_bytes for e in choices]) for choices in windows.effects]
        self._load = windows.fixed_bytes + sum(a[:, c] for a, c in zip(self._added, taken, strict=True))
        self._error = sum(errors[c] for errors, c in zip(self._errors, taken, strict=True))
        self._link = sum(sent[c] for sent, c in zip(self._sent, taken, strict=True))

    def repair(self) -> bool:
        """Take choices that exceed the budget by less, until none does; whether that succeeds."""
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
        """Take faster choices that fit, as long as there are any."""
        for _ in range(_PASSES_AT_MOST):
            before = list(self.taken)
            # Late regions first: what they hold is in the way for the shortest time.
            for region in reversed(range(len(self.taken))):
                fits = (self._loads(region) <= self._budget_bytes).all(axis=0) & self._is_allowed(region)
                best = int(np.argmin(np.where(fits, self._seconds[region], np.inf)))
                if self._seconds[region][best] < self._seconds[region][self.taken[region]]:
                    self._take(region, best)
            if self.taken == before:
                break

    def _loads(self, region: int) -> Ints:
        """The load of every window with each choice of one region."""
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
