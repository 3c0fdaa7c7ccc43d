"""Draws memory over a step for a terminal: columns of bars, the budget as a line, the peak marked and named."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from plimsoll.artifacts.plan import TimelinePoint
from plimsoll.units import format_bytes

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LABEL_WIDTH = 10
_BUDGET = " budget"
_MOST_COLUMNS = 96
_MOST_ROOM = 2.0
"""A budget that is more than so many times the peak is not drawn."""


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """A timeline that takes the width of the terminal that it is printed on."""

    points: Sequence[TimelinePoint]
    budget_bytes: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - _LABEL_WIDTH - 1 - len(_BUDGET)
        yield draw_timeline(self.points, budget_bytes=self.budget_bytes, width=max(8, min(room, _MOST_COLUMNS)))


def draw_timeline(
    points: Sequence[TimelinePoint], *, budget_bytes: int | None = None, width: int = 72, height: int = 8
) -> Text:
    r"""Memory over the step as bars, each showing the highest point of its share of the step.

    Args:
        points: the timeline of a plan, in order.
        budget_bytes: drawn as a dashed line, unless it lies far above the bars.
        width: columns of bars.
        height: rows of bars.

    Example:
        >>> draw_timeline([TimelinePoint(tick=0, moment="forward", bytes=8, by_category={})], width=1, height=1).plain
        '       8 B █\n           ▲\n           peak 8 B, forward'
    """
    if not points:
        return Text("no timeline was recorded")
    columns = [max(part, key=lambda point: point.bytes) for part in _split(points, min(width, len(points)))]
    highest_bytes = max(point.bytes for point in columns)
    if budget_bytes is not None and budget_bytes > _MOST_ROOM * highest_bytes:
        budget_bytes = None  # far above: a line for it would leave no room for the bars
    top_bytes = max(highest_bytes, budget_bytes or 0, 1)
    picture = Text()
    for row in range(height - 1, -1, -1):
        _draw_row(picture, columns, row=row, row_bytes=top_bytes / height, budget_bytes=budget_bytes)
    peak_at = max(range(len(columns)), key=lambda index: columns[index].bytes)
    picture.append(_name_peak(columns[peak_at], column=_LABEL_WIDTH + 1 + peak_at, width=width), style="bold red")
    return picture


def _name_peak(peak: TimelinePoint, *, column: int, width: int) -> str:
    """The marker under the peak and its name beside it, to the right where it fits, else to the left, else below."""
    name = f"peak {format_bytes(peak.bytes)}, {peak.moment}"
    if column + 2 + len(name) <= _LABEL_WIDTH + 1 + width:
        return f"{' ' * column}▲ {name}"
    if column >= len(name) + 1:
        return f"{name} ▲".rjust(column + 1)
    return f"{' ' * column}▲\n{' ' * (_LABEL_WIDTH + 1)}{name}"


def _split(points: Sequence[TimelinePoint], count: int) -> list[Sequence[TimelinePoint]]:
    edges = [index * len(points) // count for index in range(count + 1)]
    return [points[start:end] for start, end in itertools.pairwise(edges)]


def _draw_row(
    picture: Text, columns: Sequence[TimelinePoint], *, row: int, row_bytes: float, budget_bytes: int | None
) -> None:
    """One row, from its upper edge in the label to the bars; the budget's row is filled with dashes."""
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
    """A horizontal bar that fills ``share`` (0 to 1) of ``width``."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return "█" * filled + "░" * (width - filled)
