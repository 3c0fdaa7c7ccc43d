"""Draws the decisions of a plan as a grid.

A row is one call of a region (a module that the plan decides about), and a column is a saved value; the cell's colour and
letter show the decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.naming import name_call, plain_name
from plimsoll.artifacts.plan import RegionPlan, ValueDecision
from plimsoll.ui.document import DecisionMap
from plimsoll.ui.html.drawing import GREEN, GREY, ORANGE, Axis, Cells, Drawing, shorten
from plimsoll.ui.views.plan import describe_reason
from plimsoll.units import MIB, format_bytes, format_seconds

DECISIONS = {
    Decision.KEEP: GREY,
    Decision.RECOMPUTE: "#4a9bd9",
    Decision.COMPRESS: ORANGE,
    Decision.OFFLOAD: GREEN,
}
"""The colours of the cells by decision. They are light enough for black letters."""

_NAMED_COLUMNS = 60
"""If a plan has more different values than this, the names of the grid's columns do not fit and are left out."""
_ROW_PIXELS = 26
_NARROW_ROW_PIXELS = 14
_WIDE_ROWS = 32
_LABEL_PIXELS = 230


def draw_map(chart: DecisionMap) -> Drawing:
    """Draw the grid of decisions, with the key of its colours."""
    regions = chart.regions
    values = list(dict.fromkeys(decision.value for region in regions for decision in region.decisions))
    column_of = {value: column for column, value in enumerate(values)}
    rows: list[list[tuple[str, str, str] | None]] = []
    for region in regions:
        cells: list[tuple[str, str, str] | None] = [None] * len(values)
        for each in region.decisions:
            cells[column_of[each.value]] = DECISIONS[each.decision], each.decision[0], _hint(region, each)
        rows.append(cells)
    is_named = len(values) <= _NAMED_COLUMNS
    names = [name_call(region.name, region.call) for region in regions]
    return Drawing(
        layers=[Cells(rows=rows)],
        x=Axis(ticks=list(enumerate(map(plain_name, values))) if is_named else (), turned_degrees=55, has_grid=False),
        y=Axis(ticks=list(enumerate(names)), is_downward=True, has_grid=False),
        height=_height(len(regions)),
        description=f"Decisions for {len(values)} kinds of saved values in {len(regions)} regions.",
        lead=_words_above(regions, is_named=is_named),
        key=_key(regions),
    )


def _words_above(regions: Sequence[RegionPlan], *, is_named: bool) -> str:
    words = (
        "Each row is a block of the model. Each column is a value that autograd saves in a block for backward. The table of "
        "decisions below shows the same in words."
    )
    if not is_named:
        words += " There are too many columns to label. Point at a cell to see its name, or read the table."
    if len({region.price_seconds_per_byte for region in regions} - {None}) > 1:
        words += (
            " An early region holds its values longer than a late region, so each region has its own price of memory."
        )
    return words


def _key(regions: Sequence[RegionPlan]) -> list[tuple[str, str, str, str]]:
    """Return the entries that explain the colours of the grid, one for each decision: the colour, the letter, the name, and the
    number and bytes of the values with that decision.
    """
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


def _hint(region: RegionPlan, cell: ValueDecision) -> str:
    """Return the text that is shown when the mouse points at a cell of the grid: decision, value, region, bytes, cost, price
    and reason.
    """
    held = f", {format_bytes(cell.held_bytes)} held as {cell.form}" if cell.is_packed else ""
    lines = [
        f"{cell.decision}  {shorten(cell.value, 70)}",
        f"in {shorten(name_call(region.name, region.call), 70)}",
        f"{format_bytes(cell.bytes)}{held}",
    ]
    if cell.seconds:
        lines.append(f"costs {format_seconds(cell.seconds)} a step")
    if region.price_seconds_per_byte is not None:
        lines.append(f"price of memory {format_seconds(region.price_seconds_per_byte * MIB)} per MiB")
    return "\n".join([*lines, describe_reason(cell)]).strip()


def _height(rows: int) -> int:
    return _LABEL_PIXELS + 40 + rows * (_ROW_PIXELS if rows <= _WIDE_ROWS else _NARROW_ROW_PIXELS)
