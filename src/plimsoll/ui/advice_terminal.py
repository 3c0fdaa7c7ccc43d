"""Advice in, its picture for a terminal out: what to do first, then the numbers that it rests on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.artifacts.advice import Advice, CheckItem, CheckOutcome, FailureMode, FailureSign, Kind
from plimsoll.artifacts.advice_summary import (
    CANDIDATE_HEADER,
    LAYER_HEADER,
    candidate_cells,
    compiler_lines,
    hazard_lines,
    layer_rows,
    next_steps,
    untold,
)
from plimsoll.ui.timeline import draw_bar
from plimsoll.units import format_bytes

_KIND_STYLE = {
    Kind.DO_NOTHING: "bold green",
    Kind.MANAGE: "bold green",
    Kind.LOOK_ELSEWHERE: "bold yellow",
    Kind.DOES_NOT_FIT: "bold red",
}
_WORD_STYLE = {
    str(CheckOutcome.PASS): "green",
    str(CheckOutcome.FAIL): "bold red",
    str(CheckOutcome.NOT_CHECKED): "yellow",
    str(FailureSign.FOUND): "bold red",
    str(FailureSign.NOT_FOUND): "green",
}


def render_advice(advice: Advice) -> RenderableType:
    """The advice as people read it: verdict, memory, plans, compiler, checklist."""
    parts = _verdict(advice)
    parts += [_heading(f"Where the memory is ({advice.bottleneck.moment})"), render_parts(advice)]
    parts += _bullets(untold(advice))
    parts += [_heading("Layers: what autograd saves in each"), _table(LAYER_HEADER, layer_rows(advice.layers))]
    parts += [_heading("Plans that were made"), render_candidates(advice)]
    parts += [_heading("torch.compile"), *map(_indented, compiler_lines(advice.compiler))]
    parts += [_heading("CUDA graphs"), *map(_indented, hazard_lines(advice))]
    parts += [_heading("Checklist"), render_entries([(str(item.outcome), item) for item in advice.checklist])]
    parts += [_heading("Failure modes"), render_entries([(str(mode.sign), mode) for mode in advice.failure_modes])]
    parts += [Text(f"\nNote: {note}") for note in advice.notes]
    return Group(*parts)


def _verdict(advice: Advice) -> list[RenderableType]:
    recommendation = advice.recommendation
    title = Text.assemble(
        ("Advice ", "bold"),
        f"for {advice.model} on {advice.device}: ",
        (recommendation.headline, _KIND_STYLE[recommendation.kind]),
    )
    parts: list[RenderableType] = [title, *_bullets(recommendation.reasons)]
    if recommendation.command:
        parts += [Text(), _indented(Text(recommendation.command, style="bold cyan"))]
    return parts


def render_parts(advice: Advice) -> Table:
    """What each part holds at the unmanaged peak, as bars."""
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for part in advice.bottleneck.parts:
        if part.bytes:
            bar = Text(draw_bar(part.share), style="cyan")
            table.add_row(Text(f" {part.name}"), format_bytes(part.bytes), bar, f"{part.share:.0%}", Text(part.largest))
    return table


def render_candidates(advice: Advice) -> Table:
    """The plans side by side, the chosen one marked."""
    table = _empty_table(CANDIDATE_HEADER)
    for candidate in advice.candidates:
        style = "bold green" if candidate.is_chosen else ""
        table.add_row(*(Text(cell, style=style) for cell in candidate_cells(candidate)))
    return table


def render_entries(entries: Sequence[tuple[str, CheckItem | FailureMode]]) -> Table:
    """Items with their outcome in front and their next step below."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for (word, entry), step in zip(entries, next_steps([entry for _, entry in entries]), strict=True):
        text = Text.assemble((entry.title, "bold"), ": ", entry.evidence)
        if step:
            text.append(f"\nnext  {step}", style="dim")
        table.add_row(Text(f"  {word}", style=_WORD_STYLE[word]), text)
    return table


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = _empty_table(header)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _empty_table(header: Sequence[str]) -> Table:
    """Names to the left, numbers to the right, and a last column without a title for words."""
    table = Table(box=None, header_style="dim")
    for position, column in enumerate(header):
        is_number = position > 0 and bool(column)
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _indented(text: str | Text) -> Padding:
    return Padding(text if isinstance(text, Text) else Text(text), (0, 0, 0, 2))


def _bullets(lines: Sequence[str]) -> list[RenderableType]:
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row(Text("  -"), Text(line))
    return [table] if lines else []
