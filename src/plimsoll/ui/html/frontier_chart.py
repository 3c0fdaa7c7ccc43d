"""Draws step time against peak memory: what the planner can do, the plans, measured strategies, each point named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.plan import Plan
from plimsoll.ui.document import FrontierChart
from plimsoll.ui.html.drawing import LINE, ORANGE, VERMILION, Drawing, Scale, byte_scale, figure, label
from plimsoll.units import format_bytes

MOST_LETTERS = 28


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
    budgets = sorted({plan.budget_bytes for plan in plans if plan.budget_bytes is not None})
    shown = [budget for budget in budgets if x_range[0] <= scale.of(budget) <= x_range[1]]
    traces = [_curve(curve, scale, index) for index, curve in enumerate(curves) if curve]
    if measured:
        traces.append(_measured_trace(measured, scale))
    if chosen:
        traces.append(_chosen_trace(chosen, scale))
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
        pulled=_budgets_to_pull(plans[0]) if plans and curves[0] else (),
    )


def _budgets_to_pull(plan: Plan) -> list[str]:
    """For every point of the planner's curve what a budget of that size gives, in words."""
    return [
        f"A budget of {format_bytes(point.peak_bytes)}: the step takes {point.step_seconds / plan.baseline_seconds:.3f} times "
        f"the unmanaged one, and {format_bytes(max(plan.baseline_peak_bytes - point.peak_bytes, 0))} of its "
        f"{format_bytes(plan.baseline_peak_bytes)} are dropped, compressed or moved away at the peak."
        for point in plan.frontier
    ]


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
        "class": "" if index else "budget-point",
        "customdata": [point.words for point in points],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _measured_trace(points: Sequence[NamedPoint], scale: Scale) -> dict[str, Any]:
    return _named(points, scale) | {
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


def _chosen_trace(points: Sequence[NamedPoint], scale: Scale) -> dict[str, Any]:
    return _named(points, scale) | {
        "name": "the plan, predicted",
        "marker": {"size": 16, "color": VERMILION, "symbol": "star"},
    }


def _named(points: Sequence[NamedPoint], scale: Scale) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [scale.of(point.peak_bytes) for point in points],
        "y": [point.ratio for point in points],
        "mode": "markers+text",
        "text": [label(point.name, MOST_LETTERS) for point in points],
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
