"""An explanation in, its picture for a terminal out: the answer, where the memory is, and what would lower the peak."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.artifacts.explained import Explanation
from plimsoll.artifacts.explained_summary import (
    CHANGE_HEADER,
    change_rows,
    figure_rows,
    peak_rows,
    place_rows,
    recomputed_rows,
    title_of,
    useless_lines,
)
from plimsoll.ui.timeline import Timeline

_NUMBERS = (1, 2)
_HOW = len(CHANGE_HEADER) - 1


def render_explanation(explanation: Explanation) -> RenderableType:
    """The explanation as people read it."""
    parts: list[RenderableType] = [
        Text(title_of(explanation), style="bold"),
        Padding(Text(explanation.verdict), (0, 2)),
        Text(),
        _grid(figure_rows(explanation)),
        _heading(f"At the peak ({explanation.peak.moment})"),
        _rows(peak_rows(explanation.peak)),
        _heading("Resident after forward"),
        _rows(place_rows(explanation.resident)),
    ]
    if explanation.recomputed:
        parts += [_heading("Made again in backward"), _rows(recomputed_rows(explanation))]
    parts.append(_heading("What would lower it"))
    if explanation.helpful:
        parts += [
            render_changes(explanation),
            Text(),
            _grid([[row[0], row[_HOW]] for row in _change_rows(explanation)]),
        ]
    parts += [Padding(Text(line, style="dim"), (0, 2)) for line in useless_lines(explanation)]
    if explanation.timeline:
        parts += [_heading("Memory over the step"), Timeline(explanation.timeline)]
    parts += [Text(f"\nNote: {note}") for note in explanation.notes]
    return Group(*parts)


def render_changes(explanation: Explanation) -> Table:
    """The changes that move the peak, the best one marked."""
    table = Table(box=None, header_style="dim")
    for position, column in enumerate(CHANGE_HEADER[:_HOW]):
        is_number = position in _NUMBERS
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for place, row in enumerate(_change_rows(explanation)):
        table.add_row(Text(f" {row[0]}", style="bold green" if place == 0 else ""), *row[1:_HOW])
    return table


def _change_rows(explanation: Explanation) -> list[list[str]]:
    return change_rows(explanation.helpful, explanation.peak.bytes)


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _grid(rows: Sequence[Sequence[str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(f"  {name}"), Text(text))
    return table


def _rows(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, show_header=False)
    for position in range(max(map(len, rows), default=0)):
        table.add_column(justify="right" if position in _NUMBERS else "left", no_wrap=position > 0, overflow="fold")
    for first, *others in rows:
        table.add_row(Text(f" {first}"), *others)
    return table
