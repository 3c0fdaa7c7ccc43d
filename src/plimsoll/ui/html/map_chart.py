"""Draws a plan's decisions as a grid: a row per region call, a column per saved value, coloured and lettered by decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.naming import name_call
from plimsoll.artifacts.plan import RegionPlan, ValueDecision
from plimsoll.ui.document import DecisionMap
from plimsoll.ui.html.drawing import GREEN, GREY, ORANGE, Drawing, escape, figure, label, named_ticks
from plimsoll.ui.views.plan import describe_reason
from plimsoll.units import MIB, format_bytes, format_seconds

DECISIONS = {
    Decision.KEEP: GREY,
    Decision.RECOMPUTE: "#4a9bd9",
    Decision.COMPRESS: ORANGE,
    Decision.OFFLOAD: GREEN,
}
"""Light enough for black letters on them."""

_LETTERED_CELLS = 1500
"""Grids of more cells have no letters in them: there is no room."""
_NAMED_COLUMNS = 60
"""So many values have their names under the grid; more have no room."""
_ROW_PIXELS = 26
_NARROW_ROW_PIXELS = 14
_WIDE_ROWS = 32
_LABEL_PIXELS = 230


def draw_map(chart: DecisionMap) -> Drawing:
    """The grid, with what its colours mean."""
    regions = chart.regions
    values = list(dict.fromkeys(decision.value for region in regions for decision in region.decisions))
    column_of = {value: column for column, value in enumerate(values)}
    codes = list(DECISIONS)
    grid: list[list[int | None]] = []
    hovers: list[list[str]] = []
    letters: list[list[str]] = []
    for region in regions:
        cells: list[ValueDecision | None] = [None] * len(values)
        for decision in region.decisions:
            cells[column_of[decision.value]] = decision
        grid.append([None if cell is None else codes.index(cell.decision) for cell in cells])
        letters.append(["" if cell is None else cell.decision[0] for cell in cells])
        hovers.append(["" if cell is None else _hover(region, cell) for cell in cells])
    is_lettered = len(values) * len(regions) <= _LETTERED_CELLS
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
    is_named = len(values) <= _NAMED_COLUMNS
    ticks = named_ticks(values) if is_named else {"showticklabels": False}
    return Drawing(
        figure=figure(
            [trace],
            x={"showgrid": False, **ticks, "tickangle": -55, "side": "bottom"},
            y={"showgrid": False, **named_ticks([name_call(r.name, r.call) for r in regions]), "autorange": "reversed"},
            height=_height(len(regions)),
        ),
        description=f"Decisions for {len(values)} kinds of saved values in {len(regions)} regions.",
        lead=_words_above(regions, is_named=is_named),
        key=_key(regions),
    )


def _words_above(regions: Sequence[RegionPlan], *, is_named: bool) -> str:
    words = (
        "Each row is a block of the model, each column a value that autograd saves in it for backward. The table of "
        "decisions below says the same in words."
    )
    if not is_named:
        words += " There are too many columns to name: point at one, or read the table."
    if len({region.price_seconds_per_byte for region in regions} - {None}) > 1:
        words += " An early region holds its values longer than a late one, so each has a price of memory of its own."
    return words


def _key(regions: Sequence[RegionPlan]) -> list[tuple[str, str, str, str]]:
    """What the colours mean, how many values each decision has, and their bytes."""
    counts: Counter[Decision] = Counter()
    sizes: Counter[Decision] = Counter()
    for region in regions:
        for decision in region.decisions:
            counts[decision.decision] += 1
            sizes[decision.decision] += decision.bytes
    return [
        (colour, decision[0], str(decision), f"{counts[decision]} values, {format_bytes(sizes[decision])}")
        for decision, colour in DECISIONS.items()
        if counts[decision]
    ]


def _hover(region: RegionPlan, cell: ValueDecision) -> str:
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


def _height(rows: int) -> int:
    return _LABEL_PIXELS + 40 + rows * (_ROW_PIXELS if rows <= _WIDE_ROWS else _NARROW_ROW_PIXELS)
