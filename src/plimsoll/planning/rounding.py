"""A relaxed optimum in, whole choices that fit the budget out: round towards less memory, then spend what is left."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plimsoll.planning.effects import Effect
from plimsoll.planning.limits import Limits
from plimsoll.planning.windows import Windows

_SUPPORT = 1e-6
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
    effects = windows.effects
    taken: list[int] = []
    first = 0
    for choices in effects:
        support = np.flatnonzero(shares[first : first + len(choices)] > _SUPPORT)
        taken.append(min((int(c) for c in support), key=lambda c: (choices[c].retained_bytes, choices[c].seconds)))
        first += len(choices)
    load = windows.fixed_bytes + sum(added[:, c] for added, c in zip(windows.added_bytes, taken, strict=True))
    error = sum(choices[c].squared_error for choices, c in zip(effects, taken, strict=True))
    sent = sum(choices[c].link_bytes for choices, c in zip(effects, taken, strict=True))
    if load.max() > budget_bytes or not limits.allow(error, sent):
        return None
    seconds = [np.array([effect.seconds for effect in choices]) for choices in effects]
    for _ in range(_PASSES_AT_MOST):
        before = list(taken)
        # Late regions first: what they hold is in the way for the shortest time.
        for region in reversed(range(len(effects))):
            added = windows.added_bytes[region]
            others = load - added[:, taken[region]]
            now = effects[region][taken[region]]
            fits = (others[:, None] + added <= budget_bytes).all(axis=0)
            fits &= np.array(
                [
                    limits.allow(error - now.squared_error + e.squared_error, sent - now.link_bytes + e.link_bytes)
                    for e in effects[region]
                ]
            )
            best = int(np.argmin(np.where(fits, seconds[region], np.inf)))
            if seconds[region][best] < seconds[region][taken[region]]:
                taken[region] = best
                chosen = effects[region][best]
                error += chosen.squared_error - now.squared_error
                sent += chosen.link_bytes - now.link_bytes
                load = others + added[:, best]
        if taken == before:
            break
    return tuple(choices[c] for choices, c in zip(effects, taken, strict=True))
