"""A plan's timeline in, a chart out: bytes stacked by category, the budget as a line, the peak marked and named."""

from __future__ import annotations

import itertools
from typing import Any

from plimsoll.artifacts.plan import Plan, TimelinePoint
from plimsoll.reports.html.colours import category_colour, category_order
from plimsoll.reports.html.content import Chart
from plimsoll.reports.html.figure import figure
from plimsoll.reports.html.labels import Scale, byte_scale, escape, label
from plimsoll.units import format_bytes

_MOST_ROOM = 2.0
"""A budget that is more than so many times the peak is not drawn."""


def draw_memory(plan: Plan, name: str) -> Chart:
    """The memory of the step under a plan that has a timeline.

    Args:
        plan: the plan.
        name: the chart's name on its page.
    """
    points = plan.timeline
    peak = max(points, key=lambda point: point.bytes)
    scale = byte_scale(point.bytes for point in points)
    budget_bytes = drawn_budget(plan.budget_bytes, peak.bytes)
    top = 1.2 * scale.of(max(peak.bytes, budget_bytes or 0))
    shapes, annotations = _phases(points)
    if budget_bytes is not None:
        shapes.append(_line(y=scale.of(budget_bytes)))
        annotations.append(_note(f"budget {format_bytes(budget_bytes)}", x=1, y=scale.of(budget_bytes), xref="paper"))
    annotations.append(_peak(peak, points, scale))
    chart = figure(
        [*_areas(points, scale), _total(points, scale)],
        x={"title": {"text": "operation of the training step"}, "range": [points[0].tick, points[-1].tick]},
        y={"title": {"text": f"memory, {scale.unit}"}, "range": [0, top]},
        height=420,
        hovermode="x",
        shapes=shapes,
        annotations=annotations,
    )
    return Chart(
        name, chart, f"Memory over the step by category; the peak is {format_bytes(peak.bytes)}, {peak.moment}."
    )


def drawn_budget(budget_bytes: int | None, peak_bytes: int) -> int | None:
    """The budget, unless it lies so far above the peak that a line for it would leave no room for the rest."""
    return None if budget_bytes is None or budget_bytes > _MOST_ROOM * peak_bytes else budget_bytes


def _areas(points: tuple[TimelinePoint, ...], scale: Scale) -> list[dict[str, Any]]:
    ticks = [point.tick for point in points]
    names = category_order({name for point in points for name in point.by_category})
    return [
        {
            "type": "scatter",
            "name": escape(category),
            "x": ticks,
            "y": [scale.of(point.by_category.get(category, 0)) for point in points],
            "mode": "lines",
            "line": {"width": 0, "shape": "hv"},
            "fillcolor": category_colour(category),
            "stackgroup": "memory",
            "hoverinfo": "skip",
        }
        for category in names
    ]


def _total(points: tuple[TimelinePoint, ...], scale: Scale) -> dict[str, Any]:
    """An outline over the areas that carries the words of the hover."""
    return {
        "type": "scatter",
        "x": [point.tick for point in points],
        "y": [scale.of(point.bytes) for point in points],
        "mode": "lines",
        "line": {"width": 1, "shape": "hv", "color": "rgba(120,120,120,0.6)"},
        "showlegend": False,
        "customdata": [_words(point) for point in points],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _words(point: TimelinePoint) -> str:
    parts = sorted(point.by_category.items(), key=lambda item: -item[1])
    lines = [f"{escape(name)} {format_bytes(size)}" for name, size in parts]
    return "<br>".join([f"<b>{format_bytes(point.bytes)}</b>, {label(point.moment, 70)}", *lines])


def _phases(points: tuple[TimelinePoint, ...]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A thin line where a phase begins, and its name above the chart."""
    shapes, annotations = [], []
    for phase, members in itertools.groupby(points, key=lambda point: point.phase):
        start = next(members).tick
        if start > points[0].tick:
            shapes.append(_line(x=start))
        annotations.append(_note(escape(phase), x=start, y=1, yref="paper", xanchor="left"))
    return shapes, annotations


def _line(*, x: float | None = None, y: float | None = None) -> dict[str, Any]:
    """A line through the whole chart: down at ``x``, or across at ``y``."""
    line = {"width": 1.5 if x is None else 1, "dash": "dash" if x is None else "dot"}
    if x is None:
        return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}
    return {"type": "line", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line}


def _note(text: str, **place: Any) -> dict[str, Any]:
    return {"text": text, "showarrow": False, "xanchor": "right", "yanchor": "bottom", **place}


def _peak(peak: TimelinePoint, points: tuple[TimelinePoint, ...], scale: Scale) -> dict[str, Any]:
    """The mark of the peak, its words on the side that has more room."""
    span = max(points[-1].tick - points[0].tick, 1)
    is_left = (peak.tick - points[0].tick) / span < 0.5
    return {
        "text": f"<b>peak {format_bytes(peak.bytes)}</b><br>{label(peak.moment, 48)}",
        "x": peak.tick,
        "y": scale.of(peak.bytes),
        "ax": 36 if is_left else -36,
        "ay": -30,
        "xanchor": "left" if is_left else "right",
        "align": "left" if is_left else "right",
        "showarrow": True,
        "arrowhead": 2,
        "arrowwidth": 1.5,
    }
