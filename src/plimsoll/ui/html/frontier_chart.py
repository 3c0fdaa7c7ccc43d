"""Draws step time against peak memory: what the planner can do, the plans, measured strategies, each point named.

A name stands on the side of its point where it covers no other name, no point and no line, as far as there is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.plan import Plan
from plimsoll.ui.document import FrontierChart
from plimsoll.ui.html.drawing import LINE, ORANGE, VERMILION, Drawing, Scale, byte_scale, figure, label, shorten
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


def _curve_points(plan: Plan) -> tuple[NamedPoint, ...]:
    """The planner's own curve; nothing for a plan whose unmanaged step takes no time."""
    if not plan.baseline_seconds:
        return ()
    return tuple(NamedPoint("planner", p.peak_bytes, p.step_seconds / plan.baseline_seconds) for p in plan.frontier)


def _chosen_point(plan: Plan, *, is_alone: bool) -> NamedPoint:
    """The plan itself as predicted; where there are several, its budget tells them apart."""
    is_named = is_alone or plan.budget_bytes is None
    limit = "" if is_named else f", {format_bytes(plan.budget_bytes or 0)}"
    return NamedPoint(f"plan {plan.strategy}{limit}", plan.predicted_peak_bytes, 1 + plan.predicted_overhead)


def _measured_points(comparison: Comparison) -> tuple[NamedPoint, ...]:
    """The unmanaged step and every strategy that was measured."""
    rows = [point for row in comparison.rows if (point := _measured(row)) is not None]
    return (NamedPoint("unmanaged", comparison.baseline_peak_bytes, 1.0), *rows)


def draw_frontier(chart: FrontierChart) -> Drawing:
    """Time against peak for all that is known."""
    plans = chart.plans
    curves = [_curve_points(plan) for plan in plans]
    usable = [plan for plan in plans if plan.status.is_usable]
    chosen = [_chosen_point(plan, is_alone=len(usable) == 1) for plan in usable]
    measured = [point for comparison in chart.comparisons for point in _measured_points(comparison)]
    every = [*(point for curve in curves for point in curve), *chosen, *measured]
    scale = byte_scale(point.peak_bytes for point in every)
    x_range = _room([scale.of(point.peak_bytes) for point in every])
    y_range = _room([ratio for p in every for ratio in (p.ratio, p.low, p.high) if ratio is not None])
    plane = Plane(scale, x_range, y_range)
    budgets = sorted({plan.budget_bytes for plan in plans if plan.budget_bytes is not None})
    shown = [budget for budget in budgets if x_range[0] <= scale.of(budget) <= x_range[1]]
    labels = place_names([*chosen, *measured], curves, shown, plane)
    traces = [_curve(curve, scale, index) for index, curve in enumerate(curves) if curve]
    if measured:
        traces.append(_measured_trace(measured, scale, labels[len(chosen) :]))
    if chosen:
        traces.append(_chosen_trace(chosen, scale, labels[: len(chosen)]))
    return Drawing(
        figure=figure(
            traces,
            x={"title": {"text": f"peak memory of the step, {scale.unit}"}, "range": x_range},
            y={"title": {"text": "step time, × unmanaged"}, "range": y_range},
            height=440,
            shapes=[_budget_line(scale.of(budget)) for budget in shown],
            annotations=[_budget_note(budget, scale) for budget in shown],
        ),
        description="Step time against peak memory: the planner's curve, the chosen plan, measured strategies.",
        lead=(
            "Lower and further left is better. Step time is given as a multiple of the unmanaged step's; measured points "
            "carry the interval of their paired median."
        ),
    )


def _measured(row: ComparisonRow) -> NamedPoint | None:
    if row.measured_peak_bytes is None or row.measured_ratio is None:
        return None
    return NamedPoint(
        row.strategy, row.measured_peak_bytes, row.measured_ratio, row.measured_ratio_low, row.measured_ratio_high
    )


def _curve(points: Sequence[NamedPoint], scale: Scale, index: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": "what the planner can do, predicted" if not index else f"the same for plan {index + 1}",
        "x": [scale.of(point.peak_bytes) for point in points],
        "y": [point.ratio for point in points],
        "mode": "lines+markers",
        "line": {"color": LINE, "width": 2, "dash": "solid" if not index else "dot"},
        "marker": {"size": 5},
        "customdata": [point.words for point in points],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _measured_trace(points: Sequence[NamedPoint], scale: Scale, places: Sequence[str]) -> dict[str, Any]:
    return _named(points, scale, places) | {
        "name": "strategies, measured (95% interval)",
        "marker": {"size": 9, "color": ORANGE, "symbol": "circle"},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [0 if p.high is None else max(p.high - p.ratio, 0) for p in points],
            "arrayminus": [0 if p.low is None else max(p.ratio - p.low, 0) for p in points],
            "thickness": 1.2,
            "width": 4,
            "color": ORANGE,
        },
    }


def _chosen_trace(points: Sequence[NamedPoint], scale: Scale, places: Sequence[str]) -> dict[str, Any]:
    return _named(points, scale, places) | {
        "name": "the plan, predicted",
        "marker": {"size": 16, "color": VERMILION, "symbol": "star"},
    }


def _named(points: Sequence[NamedPoint], scale: Scale, places: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [scale.of(point.peak_bytes) for point in points],
        "y": [point.ratio for point in points],
        "mode": "markers+text",
        "text": [label(point.name, MOST_LETTERS) for point in points],
        "textposition": list(places),
        "customdata": [point.words for point in points],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _room(numbers: Sequence[float]) -> list[float]:
    """A range with room for labels around the numbers."""
    low, high = min(numbers), max(numbers)
    margin = 0.1 * (high - low) or 0.05 * max(abs(high), 1.0)
    return [low - margin, high + margin]


def _budget_line(x: float) -> dict[str, Any]:
    return {"type": "line", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": {"width": 1.5, "dash": "dash"}}


def _budget_note(budget_bytes: int, scale: Scale) -> dict[str, Any]:
    return {
        "text": f"budget {format_bytes(budget_bytes)}",
        "x": scale.of(budget_bytes),
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
    }
