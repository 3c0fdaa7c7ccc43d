"""A fit in, its picture for a terminal out: the answer, the frontier with the best point marked, or what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plimsoll.artifacts.fit import Fit
from plimsoll.artifacts.fit_summary import (
    CHANGE_HEADER,
    FRONTIER_HEADER,
    change_cells,
    describe_fit,
    fit_figures,
    frontier_rows,
    frontier_title,
)
from plimsoll.ui.plan_terminal import render_figures

_NUMBERS = ("batch", "seq", "accum", "per s", "peak", "unmanaged")


def render_fit(fit: Fit) -> RenderableType:
    """Everything that a fit says."""
    parts: list[RenderableType] = [
        Text(describe_fit(fit), style="bold" if fit.best is not None else "bold red"),
        Text(),
        render_figures(fit_figures(fit)),
        Text(),
        _table(frontier_title(fit), FRONTIER_HEADER, frontier_rows(fit), fit.best),
    ]
    if fit.changes:
        rows = [change_cells(change) for change in fit.changes]
        parts += [Text(), _table("One change at a time", CHANGE_HEADER, rows, None)]
    parts += [Text(f"\nNote: {note}") for note in fit.notes]
    return Group(*parts)


def _table(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]], marked: int | None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim")
    for column in header:
        table.add_column(
            column, justify="right" if column in _NUMBERS else "left", overflow="fold", no_wrap=column in _NUMBERS
        )
    for place, row in enumerate(rows):
        table.add_row(*(Text(cell) for cell in row), style="bold green" if place == marked else None)
    return table
