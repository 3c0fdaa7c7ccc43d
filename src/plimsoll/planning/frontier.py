"""One region in, the lower convex hull of (bytes held, seconds of replay) out, by recursive bisection over prices.

Every cut gives a point and a supporting line; a price between two neighbouring points either finds a new point below their
chord or proves that there is none. So the sweep is exact, and the lines bound *every* choice of the region, found or not.

Source: the parametric-search idea of Eisner and Severance (1976).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from plimsoll.planning.cut import Cut, Prices, solve_cut
from plimsoll.planning.step import RegionView

_POINTS_AT_MOST = 48
_TOLERANCE = 1e-6
_LEAST_STEP = 1e-4


@dataclass(frozen=True, slots=True)
class Line:
    """``seconds >= value_seconds - price · bytes - error price · error² - link price · sent`` holds for every choice."""

    price_seconds_per_byte: float
    value_seconds: float
    error_price: float = 0.0
    link_price: float = 0.0


@dataclass(frozen=True, slots=True)
class Hull:
    """The vertices of the hull, most bytes first, and the lines that bound it from below."""

    cuts: tuple[Cut, ...]
    lines: tuple[Line, ...]


def sweep_prices(view: RegionView, prices: Prices) -> Hull:
    """All vertices of a region's hull; ``seconds`` are those of replayed ops and of packing alone, without the engine's."""
    total_seconds = sum(prices.op_seconds) + sum(mode.seconds for modes in prices.modes.values() for mode in modes)
    smallest = min((b for b in _steps(prices) if b > 0), default=0.0)
    lines: list[Line] = []

    def at(price: float) -> Cut:
        cut = solve_cut(view, prices, price)
        lines.append(Line(price, cut.lower_value, prices.error_price))
        return cut

    loose = at(0.0)
    held_bytes = sum(prices.held_bytes[v] for v in view.everything)
    keep = Cut(view.everything, frozenset(), frozenset(), frozenset(), held_bytes, 0.0, 0.0)
    if smallest <= 0 or total_seconds <= 0:
        return Hull(cuts=(keep, loose), lines=tuple(lines))
    tight = at(2 * total_seconds / smallest)
    found = [keep, tight]
    pending = [(keep, tight)]
    while pending and len(found) < _POINTS_AT_MOST:
        more, less = pending.pop(0)
        if more.held_bytes <= less.held_bytes:
            continue
        price = (less.seconds - more.seconds) / (more.held_bytes - less.held_bytes)
        middle = at(price)
        chord = price * more.held_bytes + more.seconds
        if price * middle.held_bytes + middle.seconds >= chord - _TOLERANCE * max(chord, total_seconds):
            continue
        found.append(middle)
        pending += [(more, middle), (middle, less)]
    found.sort(key=lambda cut: (-cut.held_bytes, cut.seconds))
    return Hull(cuts=tuple(found), lines=tuple(lines))


def _steps(prices: Prices) -> list[float]:
    """Bytes by which two ways of holding a value differ, but for differences too small to matter."""
    steps = list(prices.held_bytes.values())
    least = sum(steps) * _LEAST_STEP
    for value, modes in prices.modes.items():
        levels = sorted({prices.held_bytes[value], *(mode.held_bytes for mode in modes)})
        steps += [more - less for less, more in itertools.pairwise(levels) if more - less > least]
    return steps
