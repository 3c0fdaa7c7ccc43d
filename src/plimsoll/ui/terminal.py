"""Shows a document on a terminal: colours for what holds and what does not, bars, and memory over the step as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from plimsoll.artifacts.store import Artifact
from plimsoll.ui.document import (
    Checks,
    Document,
    Element,
    Fold,
    MemoryChart,
    NamedFigures,
    Paragraph,
    Table,
    Tone,
    opened,
)
from plimsoll.ui.timeline import MemoryTimeline, draw_bar
from plimsoll.ui.views import view

_STYLES = {Tone.GOOD: "bold green", Tone.BAD: "bold red", Tone.NEUTRAL: "bold yellow"}
_LEAST_WORDS = 10
"""Columns for a name, which is folded where the terminal is narrow."""
_BAR_COLUMNS = 16
_ROOMY_COLUMNS = 78
"""A table of up to this width has two spaces between its columns, a wider one has one."""


def render_artifact(artifact: Artifact) -> RenderableType:
    """The artifact as people read it on a terminal."""
    return render_document(view(artifact))


def render_document(document: Document) -> RenderableType:
    """Headline, sections, notes."""
    title = Text.assemble((document.source, "bold"), f" {document.subject}: ", (document.word, _STYLES[document.tone]))
    parts: list[RenderableType] = [title, *(_indented(Text(line, style="dim")) for line in document.lines)]
    for section in document.sections:
        body = render_elements(section.elements)
        if body:
            parts += [Text(f"\n{section.title}", style="bold"), _indented(Group(*body))]
    parts += [Text(f"\nNote: {note}") for note in document.notes]
    return Group(*parts)


def render_elements(elements: Sequence[Element]) -> list[RenderableType]:
    """One below the other, with an empty line before each that is more than a paragraph; most charts need a page."""
    parts: list[RenderableType] = []
    for element in opened(elements, with_details=False):
        body = _render(element)
        if body is None:
            continue
        if parts and not isinstance(element, Paragraph):
            parts.append(Text())
        title = element.title if isinstance(element, Table | Checks | Fold) else ""
        parts += [Text(title, style="underline"), body] if title else [body]
    return parts


def _render(element: Element) -> RenderableType | None:
    match element:
        case Paragraph():
            return Text(element.text)
        case NamedFigures():
            grid = Grid.grid(padding=(0, 2))
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, text in element.rows:
                grid.add_row(Text(name), Text(text))
            return grid
        case Table():
            return _render_table(element) if element.rows else None
        case Checks():
            return _render_checks(element) if element.checks else None
        case Fold():
            return Group(*render_elements(element.elements))
        case MemoryChart():
            return MemoryTimeline(element.points, element.budget_bytes)
        case _:
            return None


def _render_table(table: Table) -> Grid:
    """Numbers whole and words folded, also where the terminal is narrow; headers break between words."""
    rows = table.shown_rows()
    header = table.header or [""] * len(rows[0])
    bar_at = max(table.numbers, default=0) + 1 if table.bars else None
    widths = [max(len(row[position]) for row in rows) for position in range(len(header))]
    between = 2 if sum(widths) + 2 * len(widths) <= _ROOMY_COLUMNS else 1
    grid = Grid(
        box=None, padding=(0, between, 0, 0), pad_edge=False, header_style="dim", show_header=bool(table.header)
    )
    for position, name in enumerate(header):
        if position == bar_at:
            grid.add_column("", no_wrap=True)
        if position in table.numbers:
            grid.add_column(name, justify="right", min_width=max([widths[position], *map(len, name.split())]))
        else:
            grid.add_column(name, overflow="fold", min_width=min(widths[position], _LEAST_WORDS))
    if bar_at == len(header):
        grid.add_column("", no_wrap=True)
    for place, row in enumerate(rows):
        cells = [Text(cell, style=_STYLES[table.tones[cell]] if cell in table.tones else "") for cell in row]
        if bar_at is not None:
            cells.insert(bar_at, _bar(table.bars[place]) if place < len(table.bars) else Text())
        grid.add_row(*cells, style="bold green" if place == table.marked else None)
    return grid


def _bar(share: float) -> Text:
    """What is saved is green."""
    return Text(draw_bar(abs(share), width=_BAR_COLUMNS), style="cyan" if share >= 0 else "green") if share else Text()


def _render_checks(checks: Checks) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checks.checks:
        text = Text.assemble((check.title, "bold"), ": ", check.detail)
        if check.next:
            text.append(f"\nnext  {check.next}", style="dim")
        grid.add_row(Text(check.mark, style=_STYLES[check.tone]), text)
    return grid


def _indented(body: RenderableType) -> Padding:
    return Padding(body, (0, 0, 0, 2))
