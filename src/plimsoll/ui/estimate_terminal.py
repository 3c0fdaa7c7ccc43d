"""An estimate in, its picture for a terminal out: does it fit, what holds the memory, how fast it would be."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.artifacts.basis import Basis
from plimsoll.artifacts.estimate import Estimate, StageEstimate
from plimsoll.artifacts.estimate_summary import (
    peak_lines,
    remark_lines,
    remark_of,
    remarks,
    setting_lines,
    shown_items,
    speed_lines,
    stage_rows,
    stages_heading,
    tightest_heading,
    title,
    verdict,
)
from plimsoll.ui.timeline import draw_bar
from plimsoll.units import format_bytes

_VERDICT_STYLE = {True: "bold green", False: "bold red", None: "bold yellow"}

_REGIONS = 1
"""The column of a stage's regions."""


def render_estimate(estimate: Estimate) -> RenderableType:
    """The estimate as people read it: verdict, items with their errors, stages, speed."""
    parts: list[RenderableType] = [
        Text.assemble(
            ("Estimate ", "bold"), f"of {title(estimate)}: ", (verdict(estimate), _VERDICT_STYLE[estimate.does_fit])
        ),
        *(Text(line, style="dim") for line in setting_lines(estimate)),
        _heading(tightest_heading(estimate)),
        render_items(estimate.tightest),
        *(Padding(Text(line, style="dim"), (0, 0, 0, 2)) for line in remark_lines(estimate.tightest)),
        Text(),
        *(Padding(Text(line), (0, 0, 0, 2)) for line in peak_lines(estimate)),
    ]
    if len(estimate.stages) > 1:
        parts += [_heading(stages_heading(estimate)), _table(stage_rows(estimate))]
    parts += [Text(), *map(Text, speed_lines(estimate))]
    parts += [Text(f"\nNote: {note}") for note in estimate.notes]
    return Group(*parts)


def render_items(stage: StageEstimate) -> Table:
    """What one rank holds at its peak, item by item, as bars with errors."""
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left", "left"):
        table.add_column(justify=justify)
    total, texts = max(stage.total_bytes, 1), remarks(stage)
    for item in shown_items(stage):
        remark = Text(remark_of(item, texts), style="dim")
        if item.bytes is None:
            table.add_row(f"  {item.name}", Text(Basis.UNSUPPORTED.value, style="yellow"), "", "", remark)
        else:
            error = f"± {format_bytes(item.error_bytes)}" if item.error_bytes else item.basis.value
            table.add_row(f"  {item.name}", format_bytes(item.bytes), error, draw_bar(item.bytes / total), remark)
    table.add_row(
        Text("  total", style="bold"), Text(format_bytes(total), style="bold"), f"± {format_bytes(stage.error_bytes)}"
    )
    return table


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _table(rows: Sequence[Sequence[str]]) -> Table:
    """Numbers whole and regions folded, also where the terminal is narrow; headers break between words."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for position, name in enumerate(rows[0]):
        width = max(len(row[position]) for row in rows[1:])
        if position == _REGIONS:
            table.add_column(name, overflow="fold", ratio=1)
        else:
            longest = max(map(len, name.split()))
            table.add_column(name, justify="right" if position else "left", min_width=max(width, longest))
    for row in rows[1:]:
        table.add_row(*row)
    return table
