"""Draws what was measured: numbers of both runs step by step, their gradients' norms, the parts of an overhead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plimsoll.artifacts.finding import OverheadPart
from plimsoll.artifacts.verdict import NormComparison, NormSummary
from plimsoll.ui.document import CurvesChart, NormsChart, PartsChart
from plimsoll.ui.html.drawing import (
    GREEN,
    GREY,
    LINE,
    ORANGE,
    SKY,
    VERMILION,
    Drawing,
    Trace,
    drawable,
    escape,
    figure,
    named_ticks,
)
from plimsoll.units import format_seconds

_FEW = 20
"""So few steps are marked one by one."""
_NAMED_BLOCKS = 60
_DECADES_IN_STEPS = 5
_BAR_PIXELS = 34


def draw_curves(chart: CurvesChart) -> Drawing:
    """Both curves over the steps, from the first on: the plan's as a thin line upon the broad one of the unmanaged run."""
    traces = [
        _line(chart.baseline, "unmanaged", {"color": SKY, "width": 6}),
        _line(chart.plan, "with the plan", {"color": VERMILION, "width": 1.8}),
    ]
    steps = max(len(chart.baseline), len(chart.plan))
    x: dict[str, Any] = {"title": {"text": "step"}, **({"dtick": 1} if steps <= _FEW else {})}
    return Drawing(
        figure=figure(traces, x=x, y={"title": {"text": chart.title}}, height=320, hovermode="x unified"),
        description=f"{chart.title} over {steps} steps, unmanaged and with the plan.",
    )


def _line(numbers: Sequence[float | None], name: str, line: dict[str, Any]) -> Trace:
    return {
        "type": "scatter",
        "name": name,
        "x": list(range(1, len(numbers) + 1)),
        "y": [drawable(number) for number in numbers],
        "mode": "lines+markers" if len(numbers) <= _FEW else "lines",
        "line": line,
        "marker": {"size": line["width"] + 3},
    }


def draw_norms(chart: NormsChart) -> Drawing:
    """A pair of boxes for every block, the whole model first: quartiles and median, whiskers from 5% to 95%."""
    comparisons = chart.comparisons
    is_named = len(comparisons) <= _NAMED_BLOCKS
    ticks = {**named_ticks([entry.block for entry in comparisons]), "tickangle": -40}
    return Drawing(
        figure=figure(
            [
                _boxes([entry.baseline for entry in comparisons], "unmanaged", LINE),
                _boxes([entry.plan for entry in comparisons], "with the plan", VERMILION),
            ],
            x={"showgrid": False, **(ticks if is_named else {"title": {"text": "block"}})},
            y={"title": {"text": "norm of the gradient"}, "type": "log", **_log_ticks(comparisons)},
            height=480,
            boxmode="group",
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        ),
        description=f"Distributions of the gradient's norm in {len(comparisons)} blocks, unmanaged and with the plan.",
        caption="A box spans the middle half of the steps, its line is the median, whiskers reach from 5% to 95%.",
    )


def _log_ticks(comparisons: Sequence[NormComparison]) -> Trace:
    """Ticks at 1, 2 and 5 of each decade, or at decades where these are many."""
    norms = [norm for entry in comparisons for side in (entry.baseline, entry.plan) for norm in side.quantiles[1:6]]
    positive = [norm for norm in norms if norm > 0 and math.isfinite(norm)]
    if not positive:
        return {}
    decades = range(math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive))) + 1)
    steps = (1, 2, 5) if len(decades) <= _DECADES_IN_STEPS else (1,)
    ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
    return {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _boxes(summaries: Sequence[NormSummary], name: str, colour: str) -> Trace:
    columns = list(zip(*(summary.quantiles for summary in summaries), strict=True))
    low, first, median, third, high = ([drawable(number) for number in column] for column in columns[1:6])
    return {
        "type": "box",
        "name": name,
        "x": list(range(len(summaries))),
        "lowerfence": low,
        "q1": first,
        "median": median,
        "q3": third,
        "upperfence": high,
        "line": {"color": colour, "width": 1.5},
        "fillcolor": colour + "55",
        "hoverinfo": "y",
    }


def draw_parts(chart: PartsChart) -> Drawing:
    """A bar for every part; what the plan saves goes to the left."""
    parts = chart.parts
    trace: Trace = {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(parts))),
        "x": [round(part.seconds * 1e3, 6) for part in parts],
        "marker": {"color": [ORANGE if part.seconds >= 0 else GREEN for part in parts]},
        "customdata": [_words(part) for part in parts],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    if any(part.spread_seconds is not None for part in parts):
        spreads = [round((part.spread_seconds or 0.0) * 1e3, 6) for part in parts]
        trace["error_x"] = {"type": "data", "array": spreads, "thickness": 1.2, "width": 4, "color": GREY}
    return Drawing(
        figure=figure(
            [trace],
            x={"title": {"text": "more time a step, ms"}, "zeroline": True},
            y={**named_ticks([part.cause for part in parts]), "autorange": "reversed", "showgrid": False},
            height=100 + _BAR_PIXELS * len(parts),
            showlegend=False,
        ),
        description="What the extra time of a step is made of.",
    )


def _words(part: OverheadPart) -> str:
    lines = [f"<b>{escape(part.cause)}</b> {format_seconds(part.seconds)}", escape(part.cause.meaning)]
    return "<br>".join([*lines, *map(escape, part.details)])
