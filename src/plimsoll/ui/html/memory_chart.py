"""Draws memory over the step: bytes stacked by category, the budget as a line, the peak marked and named."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

from plimsoll.artifacts.plan import TimelinePoint
from plimsoll.ui.document import MemoryChart
from plimsoll.ui.html.drawing import (
    BLUE,
    GREEN,
    GREY,
    LINE,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    Drawing,
    Scale,
    byte_scale,
    escape,
    figure,
    label,
    shorten,
)
from plimsoll.units import format_bytes

CATEGORIES = {
    "parameter": BLUE,
    "optimizer state": SKY,
    "buffer": GREY,
    "input": PINK,
    "gradient": GREEN,
    "activation": ORANGE,
    "temporary": VERMILION,
    "communication": LINE,
}
"""torch's memory categories, what stays longest first: the order in which they are stacked. Others come last, in pink."""

_MOST_ROOM = 2.0
"""A budget that is more than so many times the peak is not drawn."""
_HEADROOM = 1.3
"""The chart is so many times as high as the peak: the words about it stand above."""
_LINE_LETTERS = 28
_MOST_LETTERS = 84


def draw_memory(chart: MemoryChart) -> Drawing:
    """The memory of a step."""
    points = chart.points
    peak = max(points, key=lambda point: point.bytes)
    scale = byte_scale(point.bytes for point in points)
    budget_bytes = _drawn_budget(chart.budget_bytes, peak.bytes)
    highest = max(peak.bytes, budget_bytes or 0, *(point.unmanaged_bytes or 0 for point in points))
    top = _HEADROOM * scale.of(highest)
    is_left = peak.tick - points[0].tick < points[-1].tick - peak.tick
    shapes, annotations = _phases(points)
    if budget_bytes is not None:
        y = scale.of(budget_bytes)
        side: dict[str, Any] = {"x": 0, "xanchor": "left"} if is_left else {"x": 1, "xanchor": "right"}
        shapes.append(_line(y=y))
        annotations.append(_note(f"budget {format_bytes(budget_bytes)}", y=y, xref="paper", **side))
    annotations.append(_mark(peak, scale, is_left=is_left))
    is_hidden = chart.budget_bytes is not None and budget_bytes is None
    above = f" The budget, {format_bytes(chart.budget_bytes or 0)}, lies above the chart." if is_hidden else ""
    return Drawing(
        figure=figure(
            [*_areas(points, scale), *_unmanaged(points, scale), _total(points, scale)],
            x={"title": {"text": "operation of the training step"}, "range": [points[0].tick, points[-1].tick]},
            y={"title": {"text": f"memory, {scale.unit}"}, "range": [0, top]},
            height=440,
            hovermode="x",
            shapes=shapes,
            annotations=annotations,
        ),
        description=f"Memory over the step by category; the peak is {format_bytes(peak.bytes)}, {peak.moment}.",
        caption=(
            "Simulated: what is alive while each operation of the step runs, in the order of execution. Rebuilt values and "
            f"compressed ones count as activations, workspaces as temporary.{above}"
        ),
    )


def _drawn_budget(budget_bytes: int | None, peak_bytes: int) -> int | None:
    """The budget, unless it lies so far above the peak that a line for it would leave no room for the rest."""
    return None if budget_bytes is None or budget_bytes > _MOST_ROOM * peak_bytes else budget_bytes


def _areas(points: Sequence[TimelinePoint], scale: Scale) -> list[dict[str, Any]]:
    ticks = [point.tick for point in points]
    found = {name for point in points for name in point.by_category}
    names = [*(name for name in CATEGORIES if name in found), *sorted(found - CATEGORIES.keys())]
    return [
        {
            "type": "scatter",
            "name": escape(category),
            "x": ticks,
            "y": [scale.of(point.by_category.get(category, 0)) for point in points],
            "mode": "lines",
            "line": {"width": 0, "shape": "hv"},
            "fillcolor": CATEGORIES.get(category, PINK),
            "stackgroup": "memory",
            "hoverinfo": "skip",
        }
        for category in names
    ]


def _unmanaged(points: Sequence[TimelinePoint], scale: Scale) -> list[dict[str, Any]]:
    """The outline of the step without a plan, where the plan knows it."""
    if any(point.unmanaged_bytes is None for point in points):
        return []
    return [
        {
            "type": "scatter",
            "name": "the whole step without a plan",
            "x": [point.tick for point in points],
            "y": [scale.of(point.unmanaged_bytes or 0) for point in points],
            "mode": "lines",
            "line": {"width": 1.5, "shape": "hv", "color": GREY, "dash": "dash"},
            "hoverinfo": "skip",
        }
    ]


def _total(points: Sequence[TimelinePoint], scale: Scale) -> dict[str, Any]:
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


def _phases(points: Sequence[TimelinePoint]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
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
    return {"text": text, "showarrow": False, "yanchor": "bottom", **place}


def _mark(peak: TimelinePoint, scale: Scale, *, is_left: bool) -> dict[str, Any]:
    """The mark of a peak, its words on the side that has more room: to the right of one that is left."""
    lines = textwrap.wrap(shorten(peak.moment, _MOST_LETTERS), _LINE_LETTERS)
    return {
        "text": "<br>".join([f"<b>peak {format_bytes(peak.bytes)}</b>", *map(escape, lines)]),
        "x": peak.tick,
        "y": scale.of(peak.bytes),
        "ax": 30 if is_left else -30,
        "ay": -18,
        "xanchor": "left" if is_left else "right",
        "yanchor": "bottom",
        "align": "left" if is_left else "right",
        "showarrow": True,
        "arrowhead": 2,
        "arrowwidth": 1.5,
    }
