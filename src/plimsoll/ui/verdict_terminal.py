"""A verdict in, its picture for a terminal out: the ruling in colour, the rules, both arms, the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.artifacts.verdict import Outcome, Ruling, Verdict
from plimsoll.artifacts.verdict_summary import (
    ARM_HEADER,
    GRADIENT_HEADER,
    NORM_HEADER,
    RULE_HEADER,
    arm_rows,
    describe_run,
    gradient_cells,
    norm_cells,
    rule_cells,
    shown_gradients,
    shown_norms,
)

_STYLES = {Outcome.CLEAR: "green", Outcome.BROKEN: "bold red", Outcome.OPEN: "yellow", Outcome.NOT_MEASURED: "dim"}


def render_verdict(verdict: Verdict) -> RenderableType:
    """Everything that a verdict says."""
    head = Text.assemble(
        ("Probe ", "bold"),
        f"of plan {verdict.strategy}, {verdict.model} on {verdict.device}: ",
        (str(verdict.ruling), _style(verdict.ruling)),
    )
    below = [verdict.ruling.advice, verdict.reason, describe_run(verdict)]
    parts: list[RenderableType] = [head, *(Padding(Text(line, style="dim"), (0, 2)) for line in below)]
    parts += [Padding(Text(f"missing: {line}", style="yellow"), (0, 2)) for line in verdict.missing]
    rules = [[Text(cell) for cell in rule_cells(rule)] for rule in verdict.rules]
    for cells, rule in zip(rules, verdict.rules, strict=True):
        cells[RULE_HEADER.index("outcome")].stylize(_STYLES[rule.outcome])
    parts += [Text(), _table(RULE_HEADER, rules), Text(), _table(ARM_HEADER, _texts(arm_rows(verdict)))]
    if verdict.comparisons:
        parts += [Text(), _table(NORM_HEADER, _texts(map(norm_cells, shown_norms(verdict))))]
    if verdict.gradients:
        parts += [Text(), _table(GRADIENT_HEADER, _texts(map(gradient_cells, shown_gradients(verdict))))]
    parts += [Text(f"\nNote: {note}") for note in verdict.notes]
    return Group(*parts)


def _style(ruling: Ruling) -> str:
    if ruling.is_pass:
        return "bold green"
    return "bold yellow" if ruling is Ruling.UNDECIDED else "bold red"


def _texts(rows: Iterable[Sequence[str]]) -> list[list[Text]]:
    return [[Text(cell) for cell in row] for row in rows]


def _table(header: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in header:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
