"""Plans and comparisons in, a chart out: step time against peak, predicted and measured, each point named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.plan import Plan
from plimsoll.reports.html.colours import BLUE, ORANGE, VERMILION
from plimsoll.reports.html.content import Chart
from plimsoll.reports.html.figure import figure
from plimsoll.reports.html.labels import Scale, byte_scale, label, shorten
from plimsoll.units import format_bytes

_LETTER_SHARE = 0.0085
"""The width of a letter as a share of the chart's, on a laptop."""
_LINE_SHARE = 0.06
_MOST_LETTERS = 28
_PLACES = ("middle right", "middle left", "top right", "bottom right", "top left", "bottom left")
"""Beside a point first: above and below it lies its interval."""


@dataclass(frozen=True, slots=True)
class Point:
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


def frontier_points(plan: Plan) -> tuple[Point, ...]:
    """The planner's own curve; nothing for a plan whose unmanaged step takes no time."""
    if not plan.baseline_seconds:
        return ()
    return tuple(Point("planner", p.peak_bytes, p.step_seconds / plan.baseline_seconds) for p in plan.frontier)


def chosen_point(plan: Plan) -> Point:
    """The plan itself as predicted."""
    return Point(f"plan {plan.strategy}", plan.predicted_peak_bytes, 1 + plan.predicted_overhead)


def measured_points(comparison: Comparison) -> tuple[Point, ...]:
    """The unmanaged step and every strategy that was measured."""
    rows = [point for row in comparison.rows if (point := _measured(row)) is not None]
    return (Point("unmanaged", comparison.baseline_peak_bytes, 1.0), *rows)


def draw_frontier(plans: Sequence[Plan], comparisons: Sequence[Comparison], name: str) -> Chart:
    """Time against peak for all that is known; ``name`` is the chart's name on its page."""
    curves = [frontier_points(plan) for plan in plans]
    chosen = [chosen_point(plan) for plan in plans if plan.status.is_usable]
    measured = [point for comparison in comparisons for point in measured_points(comparison)]
    every = [*(point for curve in curves for point in curve), *chosen, *measured]
    scale = byte_scale(point.peak_bytes for point in every)
    x_range = _room([scale.of(point.peak_bytes) for point in every])
    y_range = _room([ratio for p in every for ratio in (p.ratio, p.low, p.high) if ratio is not None])
    labels = _places([*chosen, *measured], scale, x_range, y_range)
    traces = [_curve(curve, scale, index) for index, curve in enumerate(curves) if curve]
    if measured:
        traces.append(_measured_trace(measured, scale, labels[len(chosen) :]))
    if chosen:
        traces.append(_chosen_trace(chosen, scale, labels[: len(chosen)]))
    budgets = sorted({plan.budget_bytes for plan in plans if plan.budget_bytes is not None})
    shown = [budget for budget in budgets if x_range[0] <= scale.of(budget) <= x_range[1]]
    chart = figure(
        traces,
        x={"title": {"text": f"peak memory of the step, {scale.unit}"}, "range": x_range},
        y={"title": {"text": "step time, × unmanaged"}, "range": y_range},
        height=440,
        shapes=[_budget_line(scale.of(budget)) for budget in shown],
        annotations=[_budget_note(budget, scale) for budget in shown],
    )
    return Chart(
        name, chart, "Step time against peak memory: the planner's curve, the chosen plan, measured strategies."
    )


def _measured(row: ComparisonRow) -> Point | None:
    if row.measured_peak_bytes is None or row.measured_ratio is None:
        return None
    return Point(
        row.strategy, row.measured_peak_bytes, row.measured_ratio, row.measured_ratio_low, row.measured_ratio_high
    )


def _curve(points: Sequence[Point], scale: Scale, index: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": "what the planner can do, predicted" if not index else f"the same for plan {index + 1}",
        "x": [scale.of(point.peak_bytes) for point in points],
        "y": [point.ratio for point in points],
        "mode": "lines+markers",
        "line": {"color": BLUE, "width": 2, "dash": "solid" if not index else "dot"},
        "marker": {"size": 5},
        "customdata": [point.words for point in points],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _measured_trace(points: Sequence[Point], scale: Scale, places: Sequence[str]) -> dict[str, Any]:
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


def _chosen_trace(points: Sequence[Point], scale: Scale, places: Sequence[str]) -> dict[str, Any]:
    return _named(points, scale, places) | {
        "name": "the plan, predicted",
        "marker": {"size": 16, "color": VERMILION, "symbol": "star"},
    }


def _named(points: Sequence[Point], scale: Scale, places: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [scale.of(point.peak_bytes) for point in points],
        "y": [point.ratio for point in points],
        "mode": "markers+text",
        "text": [label(point.name, _MOST_LETTERS) for point in points],
        "textposition": list(places),
        "customdata": [point.words for point in points],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _room(numbers: Sequence[float]) -> list[float]:
    """A range with room for labels around the numbers."""
    low, high = min(numbers), max(numbers)
    margin = 0.1 * (high - low) or 0.05 * max(abs(high), 1.0)
    return [low - margin, high + margin]


def _places(points: Sequence[Point], scale: Scale, x_range: list[float], y_range: list[float]) -> list[str]:
    """For each point the first side on which its name covers no other name and no other point."""
    where = [
        (
            (scale.of(point.peak_bytes) - x_range[0]) / (x_range[1] - x_range[0]),
            (point.ratio - y_range[0]) / (y_range[1] - y_range[0]),
        )
        for point in points
    ]
    taken = [(x - 0.008, y - 0.02, x + 0.008, y + 0.02) for x, y in where]
    found = []
    for (x, y), point in zip(where, points, strict=True):
        width = _LETTER_SHARE * len(shorten(point.name, _MOST_LETTERS))
        boxes = [(place, _box(x, y, width, place)) for place in _PLACES]
        inside = [entry for entry in boxes if entry[1][0] >= 0 and entry[1][2] <= 1]
        free = [entry for entry in inside if not any(_overlap(entry[1], other) for other in taken)]
        place, box = (free or inside or boxes)[0]
        taken.append(box)
        found.append(place)
    return found


Box = tuple[float, float, float, float]


def _box(x: float, y: float, width: float, place: str) -> Box:
    """Where a name lies that is set at ``place`` of a point, in shares of the chart."""
    vertical, horizontal = place.split()
    left = x + 0.01 if horizontal == "right" else x - width - 0.01
    bottom = y - {"middle": _LINE_SHARE / 2, "top": -0.01, "bottom": _LINE_SHARE + 0.01}[vertical]
    return left, bottom, left + width, bottom + _LINE_SHARE


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


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
