"""Gradient norms of two runs in, charts out: their distributions block by block, as boxes from quantiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plimsoll.artifacts.verdict import NormComparison, NormSummary
from plimsoll.ui.html.colours import LINE, VERMILION
from plimsoll.ui.html.content import Chart
from plimsoll.ui.html.figure import figure
from plimsoll.ui.html.labels import drawable, label

_NAMED_BLOCKS = 60
_DECADES_IN_STEPS = 5


def draw_norms(comparisons: Sequence[NormComparison], name: str) -> Chart:
    """A pair of boxes for every block: quartiles and median, whiskers from 5% to 95%.

    Args:
        comparisons: the blocks, the whole model first.
        name: the chart's name on its page.
    """
    positions = list(range(len(comparisons)))
    ticks: dict[str, Any] = {
        "tickmode": "array",
        "tickvals": positions,
        "ticktext": [label(entry.block) for entry in comparisons],
        "tickangle": -40,
    }
    chart = figure(
        [
            _boxes([entry.baseline for entry in comparisons], "unmanaged", LINE),
            _boxes([entry.plan for entry in comparisons], "with the plan", VERMILION),
        ],
        x={"showgrid": False, **(ticks if len(comparisons) <= _NAMED_BLOCKS else {"title": {"text": "block"}})},
        y={"title": {"text": "norm of the gradient"}, "type": "log", **_log_ticks(comparisons)},
        height=480,
        boxmode="group",
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
    )
    return Chart(
        name, chart, f"Distributions of the gradient's norm in {len(comparisons)} blocks, unmanaged and with the plan."
    )


def _log_ticks(comparisons: Sequence[NormComparison]) -> dict[str, Any]:
    """Ticks at 1, 2 and 5 of each decade, or at decades where these are many: plotly's own lie on top of each other."""
    norms = [norm for entry in comparisons for side in (entry.baseline, entry.plan) for norm in side.quantiles[1:6]]
    positive = [norm for norm in norms if norm > 0 and math.isfinite(norm)]
    if not positive:
        return {}
    decades = range(math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive))) + 1)
    steps = (1, 2, 5) if len(decades) <= _DECADES_IN_STEPS else (1,)
    ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
    return {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _boxes(summaries: Sequence[NormSummary], name: str, colour: str) -> dict[str, Any]:
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
