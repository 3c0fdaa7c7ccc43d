"""Draws memory over the step: bytes stacked by category, the budget as a line, and the peak with a marker and its name."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence

from plimsoll.artifacts.plan import TimelinePoint
from plimsoll.ui.document import MemoryChart, starts_of
from plimsoll.ui.html.drawing import (
    BLUE,
    DASHED,
    DOTTED,
    GREEN,
    GREY,
    LINE,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    VIOLET,
    Area,
    Axis,
    Drawing,
    Note,
    Polyline,
    RuleLine,
    Scale,
    byte_scale,
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
"""The colours of torch's memory categories. Areas are stacked in this order, the longest-lived category first.

Categories that are not in this table come last, in pink.
"""

_HEADROOM = 1.3
"""The height of the chart as a multiple of the peak. The space above the peak is for the words about it."""
_LINE_LETTERS = 28
_MOST_LETTERS = 84


def draw_memory(chart: MemoryChart) -> Drawing:
    """Draw the chart of a step's memory."""
    points = chart.points
    peak = max(points, key=lambda point: point.bytes)
    scale = byte_scale(point.bytes for point in points)
    budget_bytes = chart.drawn_budget_bytes
    highest = max(peak.bytes, budget_bytes or 0, *(point.unmanaged_bytes or 0 for point in points))
    xs, title = starts_of(points)
    peak_x = xs[points.index(peak)]
    side = "start" if peak_x - xs[0] < xs[-1] - peak_x else "end"
    rules, notes = _phases(points, xs)
    if budget_bytes is not None:
        y = scale.of(budget_bytes)
        rules.append(RuleLine(y=y))
        notes.append(Note([f"budget {format_bytes(budget_bytes)}"], y=y, anchor=side))
    words = textwrap.wrap(shorten(peak.moment, _MOST_LETTERS), _LINE_LETTERS)
    lines = [f"peak {format_bytes(peak.bytes)}", *words]
    notes.append(Note(lines, x=peak_x, y=scale.of(peak.bytes), anchor=side, is_peak=True))
    is_hidden = chart.budget_bytes is not None and budget_bytes is None
    above = f" The budget, {format_bytes(chart.budget_bytes or 0)}, lies above the chart." if is_hidden else ""
    return Drawing(
        layers=[*_areas(points, xs, scale), *_outlines(points, xs, scale)],
        x=Axis(title=title, span=(xs[0], xs[-1])),
        y=Axis(title=f"memory, {scale.unit}", span=(0, _HEADROOM * scale.of(highest))),
        height=440,
        rules=rules,
        notes=notes,
        description=f"Memory over the step by category; the peak is {format_bytes(peak.bytes)}, {peak.moment}.",
        caption=(
            "Simulated: the bytes that are alive while each operation of the step runs, in the order of execution. Recomputed "
            f"and compressed values count as activations, workspaces as temporary.{above}"
        ),
    )


def _areas(points: Sequence[TimelinePoint], xs: Sequence[float], scale: Scale) -> Iterator[Area]:
    """Yield one area of the chart for each memory category (parameters, gradients and others). The areas are stacked on each
    other.
    """
    found = {name for point in points for name in point.by_category}
    lows = [0.0] * len(points)
    for name in [*(name for name in CATEGORIES if name in found), *sorted(found - CATEGORIES.keys())]:
        tops = [low + scale.of(point.by_category.get(name, 0)) for low, point in zip(lows, points, strict=True)]
        yield Area(name=name, xs=xs, lows=lows, ys=tops, colour=CATEGORIES.get(name, PINK))
        lows = tops


def _outlines(points: Sequence[TimelinePoint], xs: Sequence[float], scale: Scale) -> Iterator[Polyline]:
    """Yield lines of total bytes over the step: one without a plan, if the plan contains these figures, and one with the
    plan.
    """
    unmanaged = [scale.of(point.unmanaged_bytes) for point in points if point.unmanaged_bytes is not None]
    if len(unmanaged) == len(points):
        name = "total without a plan"
        yield Polyline(name=name, xs=xs, ys=unmanaged, colour=VIOLET, dash=DASHED, is_stepped=True)
    total = [scale.of(point.bytes) for point in points]
    yield Polyline(xs=xs, ys=total, colour="rgba(120,120,120,0.6)", width=1, is_stepped=True)


def _phases(points: Sequence[TimelinePoint], xs: Sequence[float]) -> tuple[list[RuleLine], list[Note]]:
    """Return a thin line at the start of each phase of the step, and notes with the phases' names at the top of the chart."""
    rules, notes = [], []
    for phase, members in itertools.groupby(zip(points, xs, strict=True), key=lambda each: each[0].phase):
        start = next(members)[1]
        if start > xs[0]:
            rules.append(RuleLine(x=start, dash=DOTTED))
        notes.append(Note([phase], x=start))
    return rules, notes
