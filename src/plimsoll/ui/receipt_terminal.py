"""A receipt in, its picture for a terminal out: the verdict in colour, then claim beside evidence."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.receipt_summary import (
    describe_subject,
    engine_rows,
    intermediate_row,
    mismatch_row,
    receipt_figures,
)
from plimsoll.ui.plan_terminal import render_figures

_MISMATCHES_SHOWN = 10
_FAULTS_SHOWN = 5


def render_receipt(receipt: Receipt) -> RenderableType:
    """Everything that a receipt says."""
    style = "bold green" if receipt.verdict.is_pass else "bold red"
    title = Text.assemble(
        ("Receipt ", "bold"),
        f"for {describe_subject(receipt)}, {receipt.model} on {receipt.device}: ",
        (str(receipt.verdict), style),
    )
    parts: list[RenderableType] = [
        title,
        Padding(Text(receipt.verdict.advice, style="dim"), (0, 2)),
        Text(),
        render_figures(receipt_figures(receipt)),
    ]
    mismatches = receipt.unexpected_mismatches
    if mismatches:
        rows = [mismatch_row(mismatch) for mismatch in mismatches[:_MISMATCHES_SHOWN]]
        if len(mismatches) > _MISMATCHES_SHOWN:
            rows.append([f"and {len(mismatches) - _MISMATCHES_SHOWN} more", "", "", ""])
        parts += [Text(), _table("Not equal bit for bit", ("tensor", "difference", "", ""), rows)]
    if receipt.faults:
        parts += [Text(), Text("Saved tensors that came back as something else", style="bold")]
        parts += [Padding(Text(str(fault)), (0, 2)) for fault in receipt.faults[:_FAULTS_SHOWN]]
        if len(receipt.faults) > _FAULTS_SHOWN:
            parts.append(Padding(Text(f"and {len(receipt.faults) - _FAULTS_SHOWN} more", style="dim"), (0, 2)))
    if receipt.intermediates:
        rows = [intermediate_row(intermediate) for intermediate in receipt.intermediates]
        parts += [Text(), _table("Intermediates", ("tensor", "difference", ""), rows)]
    if receipt.regions:
        header = ("engine", "regions", "memory", "why")
        parts += [Text(), _table("How regions were served", header, engine_rows(receipt))]
    parts += [Text(f"\nNote: {note}") for note in receipt.notes]
    return Group(*parts)


def _table(title: str, header: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim")
    for column in header:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
