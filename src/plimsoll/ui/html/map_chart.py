"""A plan's regions in, a chart out: region calls by values as a grid, coloured and lettered by decision."""

from __future__ import annotations

from collections import Counter
from typing import Any

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.explanation import describe_reason
from plimsoll.artifacts.grouping import name_call
from plimsoll.artifacts.plan import Plan, RegionPlan, ValueDecision
from plimsoll.ui.html.colours import DECISIONS
from plimsoll.ui.html.content import Chart, Key
from plimsoll.ui.html.figure import figure
from plimsoll.ui.html.labels import escape, label
from plimsoll.units import MIB, format_bytes, format_seconds

_LETTERED_CELLS = 1500
"""Grids of more cells have no letters in them: there is no room."""
NAMED_COLUMNS = 60
"""So many values have their names under the grid; more have no room."""
_ROW_PIXELS = 26
_NARROW_ROW_PIXELS = 14
_WIDE_ROWS = 32
_LABEL_PIXELS = 230


def draw_map(plan: Plan, name: str) -> Chart:
    """The grid of a plan that has regions.

    Args:
        plan: the plan.
        name: the chart's name on its page.
    """
    values = saved_values(plan)
    column_of = {value: column for column, value in enumerate(values)}
    codes = list(DECISIONS)
    grid: list[list[int | None]] = []
    hovers: list[list[str]] = []
    letters: list[list[str]] = []
    for region in plan.regions:
        cells: list[ValueDecision | None] = [None] * len(values)
        for decision in region.decisions:
            cells[column_of[decision.value]] = decision
        grid.append([None if cell is None else codes.index(cell.decision) for cell in cells])
        letters.append(["" if cell is None else cell.decision[0] for cell in cells])
        hovers.append(["" if cell is None else _words(region, cell) for cell in cells])
    is_lettered = len(values) * len(plan.regions) <= _LETTERED_CELLS
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": grid,
        "customdata": hovers,
        "hovertemplate": "%{customdata}<extra></extra>",
        "hoverongaps": False,
        "colorscale": _bands([DECISIONS[code] for code in codes]),
        "zmin": -0.5,
        "zmax": len(codes) - 0.5,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }
    if is_lettered:
        trace |= {"text": letters, "texttemplate": "%{text}", "textfont": {"size": 11, "color": "#111111"}}
    chart = figure(
        [trace],
        x=_axis(values, is_named=len(values) <= NAMED_COLUMNS) | {"tickangle": -55, "side": "bottom"},
        y=_axis([name_call(r.name, r.call) for r in plan.regions], is_named=True) | {"autorange": "reversed"},
        height=_height(len(plan.regions)),
    )
    return Chart(name, chart, f"Decisions for {len(values)} kinds of saved values in {len(plan.regions)} regions.")


def saved_values(plan: Plan) -> list[str]:
    """The names of the values that regions save, each once, in the order of saving."""
    return list(dict.fromkeys(decision.value for region in plan.regions for decision in region.decisions))


def decision_key(plan: Plan) -> Key:
    """What the colours mean, how many values each decision has, and their bytes."""
    counts: Counter[Decision] = Counter()
    sizes: Counter[Decision] = Counter()
    for region in plan.regions:
        for decision in region.decisions:
            counts[decision.decision] += 1
            sizes[decision.decision] += decision.bytes
    return Key(
        tuple(
            (colour, decision[0], str(decision), f"{counts[decision]} values, {format_bytes(sizes[decision])}")
            for decision, colour in DECISIONS.items()
            if counts[decision]
        )
    )


def _words(region: RegionPlan, cell: ValueDecision) -> str:
    """Everything about one cell."""
    held = ""
    if cell.is_packed:
        held = f", {format_bytes(cell.held_bytes)} stay as {escape(cell.form)}"
    lines = [
        f"<b>{cell.decision}</b>  {label(cell.value, 70)}",
        f"in {label(name_call(region.name, region.call), 70)}",
        f"{format_bytes(cell.bytes)}{held}",
    ]
    if cell.seconds:
        lines.append(f"costs {format_seconds(cell.seconds)} a step")
    if region.price_seconds_per_byte is not None:
        lines.append(f"price of memory {format_seconds(region.price_seconds_per_byte * MIB)} per MiB")
    lines.append(escape(describe_reason(cell)))
    return "<br>".join(line for line in lines if line)


def _bands(colours: list[str]) -> list[list[object]]:
    """A colour scale of equal bands without transitions."""
    scale: list[list[object]] = []
    for position, colour in enumerate(colours):
        scale += [[position / len(colours), colour], [(position + 1) / len(colours), colour]]
    return scale


def _axis(names: list[str], *, is_named: bool) -> dict[str, Any]:
    """An axis of positions with names at them: as categories, equal short names would fall together."""
    ticks = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": [label(name) for name in names]}
    return {"showgrid": False, **(ticks if is_named else {"showticklabels": False})}


def _height(rows: int) -> int:
    return _LABEL_PIXELS + 40 + rows * (_ROW_PIXELS if rows <= _WIDE_ROWS else _NARROW_ROW_PIXELS)
