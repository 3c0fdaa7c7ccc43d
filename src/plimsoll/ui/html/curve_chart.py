"""Two series of numbers in, a chart out: the unmanaged run as a broad line, the plan's as a thin one upon it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plimsoll.ui.html.colours import SKY, VERMILION
from plimsoll.ui.html.content import Chart
from plimsoll.ui.html.figure import figure
from plimsoll.ui.html.labels import drawable

_FEW = 20
"""So few steps are marked one by one."""


def draw_curves(name: str, title: str, baseline: Sequence[float | None], plan: Sequence[float | None]) -> Chart:
    """Both curves over the steps, from the first on; where they are equal the thin one lies on the broad one.

    Args:
        name: the chart's name on its page.
        title: what the numbers are.
        baseline: the unmanaged run, step by step; ``None`` where the number is not finite.
        plan: the managed run.
    """
    traces = [
        _line(baseline, "unmanaged", {"color": SKY, "width": 6}),
        _line(plan, "with the plan", {"color": VERMILION, "width": 1.8}),
    ]
    steps = max(len(baseline), len(plan))
    x: dict[str, Any] = {"title": {"text": "step"}, **({"dtick": 1} if steps <= _FEW else {})}
    chart = figure(traces, x=x, y={"title": {"text": title}}, height=320, hovermode="x unified")
    return Chart(name, chart, f"{title} over {steps} steps, unmanaged and with the plan.")


def _line(numbers: Sequence[float | None], name: str, line: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": name,
        "x": list(range(1, len(numbers) + 1)),
        "y": [drawable(number) for number in numbers],
        "mode": "lines+markers" if len(numbers) <= _FEW else "lines",
        "line": line,
        "marker": {"size": line["width"] + 3},
    }
