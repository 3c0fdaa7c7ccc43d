"""A comparison in, a table for a terminal out."""

from __future__ import annotations

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.comparison_summary import (
    COMPARISON_HEADER,
    comparison_cells,
    comparison_notes,
    describe_baseline,
)

_NUMBERS = ("predicted", "measured", "step time ×")
_LEAST_STRATEGY = 10
"""Columns for the name of a strategy, which is folded where the terminal is narrow."""


def render_comparison(comparison: Comparison) -> RenderableType:
    """Strategies side by side, predicted beside measured."""
    title = f"Strategies on {comparison.model}, {comparison.device}, {comparison.steps} steps each"
    table = Table(box=None, header_style="dim")
    for column in COMPARISON_HEADER:
        is_name = column == "strategy"
        justify: JustifyMethod = "right" if column in _NUMBERS else "left"
        table.add_column(
            column,
            justify=justify,
            overflow="fold",
            no_wrap=not is_name,
            min_width=_LEAST_STRATEGY if is_name else None,
        )
    for row in comparison.rows:
        cells = [Text(cell) for cell in comparison_cells(row)]
        if row.is_wrong:
            cells[COMPARISON_HEADER.index("gradients")] = Text("DIFFER", style="bold red")
        table.add_row(*cells)
    parts: list[RenderableType] = [Text(title, style="bold"), Text(f"  {describe_baseline(comparison)}"), Text(), table]
    parts += [Text(f"\nNote: {note}") for note in comparison_notes(comparison)]
    return Group(*parts)
