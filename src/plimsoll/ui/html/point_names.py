"""Chooses the side of each point on which its name is written, so that no name covers another name, a point or a line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.ui.html.drawing import Scale, label, shorten
from plimsoll.units import format_bytes

MOST_LETTERS = 28
_LETTER_SHARE = 0.0085
"""The width of a letter as a share of the chart's, on a laptop."""
_LINE_SHARE = 0.06
_MARK = (0.008, 0.02)
"""Half the width and half the height of a point's mark."""
_LINE_MARK = (0.004, 0.006)
"""The same for a place on a line."""
_SAMPLES = 12
_PLACES = ("middle right", "middle left", "top right", "bottom right", "top left", "bottom left")
"""Beside a point: above and below it lies its interval."""

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in shares of the chart."""


@dataclass(frozen=True, slots=True)
class NamedPoint:
    """One step in the plane of peak and time; ``low`` and ``high`` bound its ratio where it was measured."""

    name: str
    peak_bytes: int
    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def words(self) -> str:
        """What the hover says."""
        spread = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"<b>{label(self.name, 70)}</b><br>{format_bytes(self.peak_bytes)}, {self.ratio:.3f} ×{spread}"


@dataclass(frozen=True, slots=True)
class Plane:
    """The part of the plane that a chart shows."""

    scale: Scale
    x_range: list[float]
    y_range: list[float]

    def place(self, peak_bytes: float, ratio: float) -> tuple[float, float]:
        """Where a point lies, in shares of the chart."""
        (left, right), (low, high) = self.x_range, self.y_range
        return (self.scale.of(peak_bytes) - left) / (right - left), (ratio - low) / (high - low)


def place_names(
    points: Sequence[NamedPoint], curves: Sequence[Sequence[NamedPoint]], budgets: Sequence[int], plane: Plane
) -> list[str]:
    """For each point the side on which its name hurts least, as plotly's ``textposition``.

    Args:
        points: those that have names.
        curves: lines that names should not cover.
        budgets: bytes at which a line goes through the whole chart.
        plane: what the chart shows.
    """
    taken = [_mark(plane.place(point.peak_bytes, point.ratio), _MARK) for point in points]
    for curve in curves:
        taken += [_mark(place, _LINE_MARK) for place in _along(curve, plane)]
    for budget_bytes in budgets:
        x, _ = plane.place(budget_bytes, 1.0)
        taken.append((x, 0.0, x, 1.0))
    names: list[Box] = []
    found = []
    for point in points:
        x, y = plane.place(point.peak_bytes, point.ratio)
        width = _LETTER_SHARE * len(shorten(point.name, MOST_LETTERS))
        boxes = [(place, _box(x, y, width, place)) for place in _PLACES]
        inside = [entry for entry in boxes if entry[1][0] >= 0 and entry[1][2] <= 1] or boxes
        # Another name hurts more than a line, and of equal places the first one is the best.
        place, box = min(inside, key=lambda entry: (_covered(entry[1], names), _covered(entry[1], taken)))
        names.append(box)
        found.append(place)
    return found


def _covered(box: Box, others: Sequence[Box]) -> int:
    """How many of the others a name would lie on."""
    return sum(_overlap(box, other) for other in others)


def _along(curve: Sequence[NamedPoint], plane: Plane) -> list[tuple[float, float]]:
    """Places on a line through points, close enough together that no name fits between them."""
    places = []
    for one, other in itertools.pairwise(curve):
        (x, y), (to_x, to_y) = plane.place(one.peak_bytes, one.ratio), plane.place(other.peak_bytes, other.ratio)
        places += [(x + (to_x - x) * k / _SAMPLES, y + (to_y - y) * k / _SAMPLES) for k in range(_SAMPLES)]
    return places


def _mark(place: tuple[float, float], half: tuple[float, float]) -> Box:
    return place[0] - half[0], place[1] - half[1], place[0] + half[0], place[1] + half[1]


def _box(x: float, y: float, width: float, place: str) -> Box:
    """Where a name lies that is written at ``place`` of a point."""
    vertical, horizontal = place.split()
    left = x + 0.01 if horizontal == "right" else x - width - 0.01
    bottom = y - {"middle": _LINE_SHARE / 2, "top": -0.01, "bottom": _LINE_SHARE + 0.01}[vertical]
    return left, bottom, left + width, bottom + _LINE_SHARE


def _overlap(one: Box, other: Box) -> bool:
    return one[0] <= other[2] and other[0] <= one[2] and one[1] <= other[3] and other[1] <= one[3]
