"""Renders a document (the content of a saved result) on a terminal: colours for success and failure, bars, and a picture of
memory over the step.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from plimsoll.artifacts.plan import TimelinePoint
from plimsoll.artifacts.store import Artifact
from plimsoll.ui.document import (
    Checks,
    Document,
    Element,
    Fold,
    MemoryChart,
    NamedFigures,
    Paragraph,
    ShellCommand,
    Table,
    Tone,
    opened,
    starts_of,
)
from plimsoll.ui.views import view
from plimsoll.units import format_bytes

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LABEL_WIDTH = 10
_BUDGET = " budget"
_MOST_COLUMNS = 96


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """A memory chart for ``rich``, drawn to fit the width of the terminal."""

    chart: MemoryChart

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - _LABEL_WIDTH - 1 - len(_BUDGET)
        width = max(8, min(room, _MOST_COLUMNS))
        yield draw_timeline(self.chart.points, budget_bytes=self.chart.drawn_budget_bytes, width=width)


def draw_timeline(
    points: Sequence[TimelinePoint], *, budget_bytes: int | None = None, width: int = 72, height: int = 8
) -> Text:
    r"""Return memory over the step as bars. Each bar shows the highest point of its part of the step.

    Args:
        points: the timeline of a plan, in order.
        budget_bytes: drawn as a dashed line.
        width: columns of bars.
        height: rows of bars.

    Example:
        >>> draw_timeline([TimelinePoint(tick=0, moment="forward", bytes=8, by_category={})], width=1, height=1).plain
        '       8 B █\n           ▲\n           peak 8 B, forward'
    """
    if not points:
        return Text("the plan has no timeline")
    columns = [max(part, key=lambda point: point.bytes) for part in _split(points, min(width, len(points)))]
    highest_bytes = max(point.bytes for point in columns)
    top_bytes = max(highest_bytes, budget_bytes or 0, 1)
    picture = Text()
    for row in range(height - 1, -1, -1):
        _draw_row(picture, columns, row=row, row_bytes=top_bytes / height, budget_bytes=budget_bytes)
    peak_at = max(range(len(columns)), key=lambda index: columns[index].bytes)
    picture.append(_name_peak(columns[peak_at], column=_LABEL_WIDTH + 1 + peak_at, width=width), style="bold red")
    return picture


def _name_peak(peak: TimelinePoint, *, column: int, width: int) -> str:
    """Return the text under the peak's bar: a marker, and the peak's bytes and moment.

    The text is to the right of the marker if it fits there, else to the left, else below.
    """
    name = f"peak {format_bytes(peak.bytes)}, {peak.moment}"
    if column + 2 + len(name) <= _LABEL_WIDTH + 1 + width:
        return f"{' ' * column}▲ {name}"
    if column >= len(name) + 1:
        return f"{name} ▲".rjust(column + 1)
    return f"{' ' * column}▲\n{' ' * (_LABEL_WIDTH + 1)}{name}"


def _split(points: Sequence[TimelinePoint], count: int) -> list[Sequence[TimelinePoint]]:
    """Return the points of each column. All columns are equally long in time, so an operation may be in several of them."""
    starts, _ = starts_of(points)
    edges = [starts[0] + (starts[-1] - starts[0]) * index / count for index in range(count)]
    # A column begins with the operation that runs at its edge.
    firsts = [min(bisect.bisect_left(starts, edge), bisect.bisect_right(starts, edge) - 1) for edge in edges]
    ends = [*(bisect.bisect_left(starts, edge) for edge in edges[1:]), len(points)]
    return [points[first : max(first + 1, end)] for first, end in zip(firsts, ends, strict=True)]


def _draw_row(
    picture: Text, columns: Sequence[TimelinePoint], *, row: int, row_bytes: float, budget_bytes: int | None
) -> None:
    """Append one row of the picture: a label with the bytes at the row's upper edge, then the bars.

    In the row that contains the budget, places without a bar show a dash.
    """
    picture.append(f"{format_bytes(row_bytes * (row + 1)):>{_LABEL_WIDTH}} ", style="dim")
    is_budget_row = budget_bytes is not None and row_bytes * row < budget_bytes <= row_bytes * (row + 1)
    for point in columns:
        eighths = round(max(0.0, min(1.0, point.bytes / row_bytes - row)) * 8)
        if is_budget_row and eighths == 0:
            picture.append("┄", style="yellow")
        else:
            picture.append(_EIGHTHS[eighths], style="cyan")
    if is_budget_row:
        picture.append(_BUDGET, style="yellow")
    picture.append("\n")


def draw_bar(share: float, *, width: int = 24) -> str:
    """Return a bar of ``width`` characters. Its left part is filled, as large as ``share`` (0 to 1)."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return "█" * filled + "░" * (width - filled)


_STYLES = {Tone.GOOD: "bold green", Tone.BAD: "bold red", Tone.NEUTRAL: "bold yellow"}
_PIECE = re.compile(r"(?:[^\s./_,:|=]|\.(?=\d))*(?:[/_,:|=]|\.(?!\d))*\s*")
"""Matches the pieces of a text between which a line may break: a word, or a part of a long name up to a dot or another sign."""
_BAR_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class _Words:
    """A text for ``rich`` that wraps between words, or inside a long name after a dot or another sign, but never elsewhere.

    Lines after the first are indented by ``hang`` columns. With ``is_headline``, the text is not wrapped in a file or a pipe,
    because programs search for the headline there.
    """

    text: Text
    hang: int = 0
    is_headline: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.is_headline and not console.is_terminal:
            yield Text.assemble(self.text, no_wrap=True, overflow="ignore")
            return
        start, column = 0, 0
        for piece in _PIECE.finditer(self.text.plain):
            is_first = start == 0
            if column and column + len(piece.group().rstrip()) + (0 if is_first else self.hang) > options.max_width:
                yield self._line(start, piece.start())
                start, column = piece.start(), 0
            column += len(piece.group())
        yield self._line(start, len(self.text))

    def _line(self, start: int, stop: int) -> Text:
        line = self.text[start:stop]
        line.rstrip()
        return Text.assemble(" " * self.hang if start else "", line)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        pieces = [len(piece.group().rstrip()) for piece in _PIECE.finditer(self.text.plain)]
        return Measurement(max(pieces, default=0) + self.hang, len(self.text))


def render_artifact(artifact: Artifact, *, with_details: bool = False) -> RenderableType:
    """Render an artifact for a terminal.

    ``with_details`` also shows details, such as each decision of a plan with its reason.
    """
    return render_document(view(artifact), with_details=with_details)


def render_document(document: Document, *, with_details: bool = False) -> RenderableType:
    """Render the headline, the sections and the notes of a document (the content of a saved result) for a terminal."""
    title = Text.assemble((document.source, "bold"), f" {document.subject}: ", (document.word, _STYLES[document.tone]))
    parts: list[RenderableType] = [
        _Words(title, hang=2, is_headline=True),
        *(_indented(Text(line, style="dim")) for line in document.lines),
    ]
    for section in document.sections:
        body = render_elements(section.elements, with_details=with_details)
        if body:
            # Indentation pads lines with spaces, and a space after a backslash would end a command: see `_ShellLines`.
            shown = (part if isinstance(part, _ShellLines) else _indented(part) for part in body)
            parts += [Text(f"\n{section.title}", style="bold"), *shown]
    parts += [Text(f"\nNote: {note}") for note in document.notes]
    return Group(*parts)


def render_elements(elements: Sequence[Element], *, with_details: bool = False) -> list[RenderableType]:
    """Render elements one below the other, with an empty line before each element that is not a paragraph.

    Of the charts, only the memory chart is drawn.
    """
    parts: list[RenderableType] = []
    for element in opened(elements, with_details=with_details):
        body = _render(element)
        if body is None:
            continue
        if parts and not isinstance(element, Paragraph | ShellCommand):
            parts.append(Text())
        title = element.title if isinstance(element, Table | Checks | Fold) else ""
        parts += [Text(title, style="underline"), body] if title else [body]
    return parts


def _render(element: Element) -> RenderableType | None:
    match element:
        case Paragraph():
            return Text(element.text)
        case ShellCommand():
            return _ShellLines(element.text)
        case NamedFigures():
            grid = Grid.grid(padding=(0, 2))
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, text in element.rows:
                grid.add_row(Text(name), _Words(Text(text)))
            return grid
        case Table():
            return _Rows(element) if element.rows else None
        case Checks():
            return _render_checks(element) if element.checks else None
        case Fold():
            return Group(*render_elements(element.elements, with_details=True))
        case MemoryChart():
            return MemoryTimeline(element)
        case _:
            return None


_SHELL_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""")
"""A word of a command, with its quotes. A line that ends within quotes would be another command."""


@dataclass(frozen=True, slots=True)
class _ShellLines:
    """A command for ``rich``, with its own indentation. A line that is too long ends with a backslash, for pasting."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines, room = ["  "], options.max_width - len(" \\")
        for word in _SHELL_WORD.findall(self.text):
            joined = f"{lines[-1]} {word}" if lines[-1].strip() else f"{lines[-1]}{word}"
            if len(joined) > room and lines[-1].strip():
                lines[-1] += " \\"
                lines.append(f"      {word}")
            else:
                lines[-1] = joined
        for line in lines:
            yield Text(line, style="bold", no_wrap=True, overflow="ignore")


@dataclass(frozen=True, slots=True)
class _Rows:
    """A table for ``rich`` that is laid out again for the width at which it is printed."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _render_table(self.table, options.max_width)


def _render_table(table: Table, room: int) -> Grid:
    """Lay out a table for ``room`` columns: numbers are never broken, words are wrapped, headers break between words."""
    rows = table.shown_rows()
    header = table.header or [""] * len(rows[0])
    bar_at = max(table.numbers, default=0) + 1 if table.bars else None
    widths = [max(len(row[position]) for row in rows) for position in range(len(header))]
    folded = [max([width, *map(len, name.split())]) for width, name in zip(widths, header, strict=True)]
    whole = [max(width, len(name)) for width, name in zip(widths, header, strict=True)]
    bar_room = _BAR_COLUMNS + 2 if table.bars else 0
    has_room = sum(whole) + 2 * len(whole) + bar_room <= room
    between = 2 if sum(folded) + 2 * len(folded) + bar_room <= room else 1
    grid = Grid(
        box=None, padding=(0, between, 0, 0), pad_edge=False, header_style="dim", show_header=bool(table.header)
    )
    for position, name in enumerate(header):
        if position == bar_at:
            grid.add_column("", no_wrap=True)
        if position in table.numbers:
            grid.add_column(name, justify="right", width=(whole if has_room else folded)[position])
        else:
            grid.add_column(_Words(Text(name, style="dim")), overflow="fold")
    if bar_at == len(header):
        grid.add_column("", no_wrap=True)
    for place, row in enumerate(rows):
        cells: list[RenderableType] = [
            _Words(Text(cell, style=_STYLES[table.tones[cell]] if cell in table.tones else "")) for cell in row
        ]
        if bar_at is not None:
            cells.insert(bar_at, _bar(table.bars[place]) if place < len(table.bars) else Text())
        grid.add_row(*cells, style="bold green" if place == table.marked else None)
    return grid


def _bar(share: float) -> Text:
    """Return a bar for a table cell. Its length shows the share.

    If the share is negative (a saving), the bar is green; if the share is 0, the text is empty.
    """
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
