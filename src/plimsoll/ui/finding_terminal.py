"""A finding in, its picture for a terminal out: the overhead's parts as bars, then phases, signs and layers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from plimsoll.artifacts.finding import Finding
from plimsoll.artifacts.finding_summary import (
    LAYERS_HEADER,
    PHASES_HEADER,
    advice_lines,
    finding_figures,
    finding_title,
    layer_rows,
    layers_title,
    notable_parts,
    part_rows,
    phase_rows,
    sign_rows,
)
from plimsoll.ui.plan_terminal import render_figures
from plimsoll.ui.timeline import draw_bar

_BAR = " "
_BAR_COLUMNS = 10
_TEXTS = (_BAR, "what it is")
"""Columns of words."""
_SIGN_STYLES = {"RAISED": "bold yellow", "ok": "green", "not known": "dim"}


def render_finding(finding: Finding) -> RenderableType:
    """Everything that a finding says."""
    parts: list[RenderableType] = [
        Text(finding_title(finding), style="bold"),
        render_figures(finding_figures(finding)),
        Text(),
        render_parts(finding),
        Text(),
        _table("Busy time by phase", PHASES_HEADER, phase_rows(finding)),
        Text(),
        render_signs(finding),
        Text(),
        _table(layers_title(finding), LAYERS_HEADER, layer_rows(finding)),
    ]
    parts += [Text.assemble(("\nAdvice: ", "bold green"), text) for text in advice_lines(finding)]
    parts += [Text(f"\nNote: {note}") for note in finding.notes]
    return Group(*parts)


def render_parts(finding: Finding) -> Table:
    """The overhead by cause; bars are shares of the largest part, red where the plan costs time, green where it saves."""
    table = _table("Where the overhead goes", ("cause", "per step", "of baseline", _BAR, "what it is"), [])
    largest = max((abs(part.seconds) for part in finding.parts), default=0.0)
    seconds = [part.seconds for part in notable_parts(finding)]
    for row, length in zip(part_rows(finding), [*seconds, 0.0], strict=True):
        cause, per_step, share, meaning = row
        bar = Text(
            draw_bar(abs(length) / largest, width=_BAR_COLUMNS) if largest else "",
            style="red" if length > 0 else "green",
        )
        table.add_row(Text(cause), Text(per_step), Text(share), bar, Text(meaning, style="dim"))
    return table


def render_signs(finding: Finding) -> Table:
    """The thresholds and where the plan stands."""
    table = Table(title="Signs", title_justify="left", title_style="bold", box=None, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for name, word, text in sign_rows(finding):
        table.add_row(Text(f" {name}"), Text(word, style=_SIGN_STYLES[word]), Text(text))
    return table


def _table(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim")
    for position, column in enumerate(header):
        is_text = position == 0 or column in _TEXTS
        justify: JustifyMethod = "left" if is_text else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=position > 0 and column != "what it is")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
