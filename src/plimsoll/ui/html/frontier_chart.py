"""Draws step time against peak memory: the planner's curve, the chosen plans, and measured strategies, with a name at each
point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.artifacts.comparison import Comparison, ComparisonRow
from plimsoll.artifacts.plan import Plan
from plimsoll.ui.document import FrontierChart
from plimsoll.ui.html.drawing import (
    DOTTED,
    LINE,
    ORANGE,
    VERMILION,
    Axis,
    Drawing,
    Note,
    Points,
    Polyline,
    RuleLine,
    byte_scale,
    shorten,
)
from plimsoll.units import format_bytes, format_bytes_up

MOST_LETTERS = 28


@dataclass(frozen=True, slots=True)
class NamedPoint:
    """Data: one point of the chart of step time against peak memory: a peak, and a step time as a multiple of the step without
    a plan.

    ``low`` and ``high`` are the confidence interval of that multiple if it was measured.
    """

    name: str
    peak_bytes: int
    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and upper end of the error bar. If the interval is unknown, both are the ratio itself."""
        return self.low or self.ratio, self.high or self.ratio

    @property
    def hint(self) -> str:
        """The text that is shown when the mouse points at this point."""
        spread = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{shorten(self.name, 70)}\n{format_bytes(self.peak_bytes)}, {self.ratio:.3f} ×{spread}"


def _curve_points(plan: Plan) -> tuple[NamedPoint, ...]:
    """Return the points of the plan's frontier (the shortest step time for each peak), and the plan itself if it is usable.

    Points that are too near to the plan are left out: the slider's mark was next to the plan's. The result is empty if the time
    of the step without a plan is 0, or if the plan does not have a frontier.
    """
    if not plan.baseline_seconds:
        return ()
    found = [NamedPoint("planner", p.peak_bytes, p.step_seconds / plan.baseline_seconds) for p in plan.frontier]
    if found and plan.status.is_usable:
        own = NamedPoint("planner", plan.predicted_peak_bytes, 1 + plan.predicted_overhead)
        least_bytes = _NEAR * (found[-1].peak_bytes - found[0].peak_bytes)
        found = [each for each in found if abs(each.peak_bytes - own.peak_bytes) > least_bytes]
        found = sorted([*found, own], key=lambda each: each.peak_bytes)
    return tuple(found)


def _chosen_point(plan: Plan, *, is_alone: bool) -> NamedPoint:
    """Return the point that shows the plan itself: its predicted peak and time.

    Unless it is the only plan, the point's name includes the budget.
    """
    is_named = is_alone or plan.budget_bytes is None
    limit = "" if is_named else f", {format_bytes(plan.budget_bytes or 0)}"
    return NamedPoint(f"plan {plan.strategy}{limit}", plan.predicted_peak_bytes, 1 + plan.predicted_overhead)


def _measured_points(comparison: Comparison) -> tuple[NamedPoint, ...]:
    """Return the points that show measurements: one for the step without a plan, and one for each measured strategy."""
    rows = [point for row in comparison.rows if (point := _measured(row)) is not None]
    return (NamedPoint("unmanaged", comparison.baseline_peak_bytes, 1.0), *rows)


def _measured(row: ComparisonRow) -> NamedPoint | None:
    if row.measured_peak_bytes is None or row.measured_ratio is None:
        return None
    return NamedPoint(
        row.strategy, row.measured_peak_bytes, row.measured_ratio, row.measured_ratio_low, row.measured_ratio_high
    )


def draw_frontier(chart: FrontierChart) -> Drawing:
    """Draw all plans and all comparisons in one chart."""
    plans = chart.plans
    curves = [_curve_points(plan) for plan in plans]
    usable = [plan for plan in plans if plan.status.is_usable]
    chosen = [_chosen_point(plan, is_alone=len(usable) == 1) for plan in usable]
    measured = [point for comparison in chart.comparisons for point in _measured_points(comparison)]
    every = [*(point for curve in curves for point in curve), *chosen, *measured]
    scale = byte_scale(point.peak_bytes for point in every)

    def points(named: Sequence[NamedPoint]) -> tuple[list[float], list[float], list[str]]:
        return [scale.of(each.peak_bytes) for each in named], [p.ratio for p in named], [p.hint for p in named]

    layers: list[Polyline | Points] = []
    for index, curve in enumerate(curve for curve in curves if curve):
        xs, ys, hints = points(curve)
        name = f"frontier of plan {index + 1}, predicted" if index else "frontier, predicted"
        layers.append(Polyline(name=name, xs=xs, ys=ys, colour=LINE, width=2, dash=DOTTED if index else ""))
        # The slider below the chart moves along the first curve only.
        css = "" if index else "budget-point"
        layers.append(Points(xs=xs, ys=ys, hints=hints, colour=LINE, radius=2.5, css_class=css))
    for named, look in ((measured, _MEASURED), (chosen, _CHOSEN)):
        if named:
            xs, ys, hints = points(named)
            labels = [shorten(each.name, MOST_LETTERS) for each in named]
            layers.append(Points(xs=xs, ys=ys, hints=hints, labels=labels, spreads=[p.spread for p in named], **look))
    span = _room([scale.of(point.peak_bytes) for point in every])
    budgets = sorted({plan.budget_bytes for plan in plans if plan.budget_bytes is not None})
    shown = {budget: scale.of(budget) for budget in budgets if span[0] <= scale.of(budget) <= span[1]}
    return Drawing(
        layers=layers,
        x=Axis(title=f"peak memory of the step, {scale.unit}", span=span),
        y=Axis(title="step time, × unmanaged", span=_room([ratio for p in every for ratio in (p.ratio, *p.spread)])),
        height=440,
        rules=[RuleLine(x=x) for x in shown.values()],
        notes=[Note([f"budget {format_bytes(budget)}"], x=x, anchor="middle") for budget, x in shown.items()],
        description="Step time against peak memory: the planner's frontier, the chosen plan, measured strategies.",
        lead=(
            "Points further down and further left are better. Step time is a multiple of the unmanaged step's time. The bar of "
            "a measured point is the confidence interval of its paired median."
        ),
        pulled=_budgets_to_pull(plans[0], curves[0]) if plans and curves[0] else (),
        pulled_at=_nearest(plans[0], curves[0]) if plans and curves[0] else 0,
    )


_NEAR = 0.03
"""Points of the curve that are nearer to the plan's peak than this share of the curve's peaks are left out."""
_MEASURED: dict[str, Any] = {"name": "strategies, measured (95% interval)", "colour": ORANGE, "radius": 4.5}
_CHOSEN: dict[str, Any] = {"name": "the plan, predicted", "colour": VERMILION, "radius": 8, "is_star": True}


def _budgets_to_pull(plan: Plan, curve: Sequence[NamedPoint]) -> list[tuple[str, str]]:
    """Return the choices of the slider below the chart: for each point of the planner's curve, its budget and a sentence about
    what it costs.
    """
    return [
        (
            format_bytes(point.peak_bytes),
            f"A budget of {format_bytes_up(point.peak_bytes)}: the step takes "
            f"{point.ratio:.3f} times as long as the unmanaged step, and its peak is "
            f"{format_bytes(max(plan.baseline_peak_bytes - point.peak_bytes, 0))} below the unmanaged peak of "
            f"{format_bytes(plan.baseline_peak_bytes)}.",
        )
        for point in curve
    ]


def _nearest(plan: Plan, curve: Sequence[NamedPoint]) -> int:
    """Return the index of the point on the planner's curve whose peak is nearest to the plan's peak."""
    away = [abs(point.peak_bytes - plan.predicted_peak_bytes) for point in curve]
    return away.index(min(away))


def _room(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis for these numbers: the lowest and the highest of them, with a margin for labels on both
    sides.
    """
    low, high = min(numbers), max(numbers)
    margin = 0.1 * (high - low) or 0.05 * max(abs(high), 1.0)
    return low - margin, high + margin
