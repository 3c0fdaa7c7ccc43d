"""Gradient traffic in, its picture for a terminal out: the ruling in colour, every method, the link, held-out losses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.artifacts.traffic import Traffic, TrafficRuling
from plimsoll.artifacts.traffic_summary import (
    LINK_HEADER,
    VALIDATION_HEADER,
    describe_step,
    link_cells,
    method_rows,
    reasons,
    validation_rows,
)

_STYLES = {TrafficRuling.KEEP: "bold green", TrafficRuling.REFUSE: "bold red", TrafficRuling.UNDECIDED: "bold yellow"}


def render_traffic(traffic: Traffic) -> RenderableType:
    """Everything that there is to say about it."""
    head = Text.assemble(
        ("Gradient traffic ", "bold"),
        f"of {traffic.model}, {traffic.ranks} ranks on {traffic.device} ({traffic.backend}): ",
        (str(traffic.ruling), _STYLES[traffic.ruling]),
    )
    below = [traffic.ruling.advice, traffic.reason, *describe_step(traffic)]
    parts: list[RenderableType] = [head, *(Padding(Text(line, style="dim"), (0, 2)) for line in below)]
    parts += [Padding(Text(f"missing: {line}", style="yellow"), (0, 2)) for line in traffic.missing]
    header, *cells = method_rows(traffic)
    rows = _texts(cells)
    for row, method in zip(rows[1:], traffic.methods[1:], strict=True):
        row[-1].stylize(_STYLES[method.ruling])
    parts += [Text(), _table(header, rows, range(1, len(header) - 1))]
    if traffic.links:
        parts += [Text(), _table(LINK_HEADER, _texts(map(link_cells, traffic.links)), (1, 2, 3))]
    validated = validation_rows(traffic)
    if validated:
        parts += [Text(), _table(VALIDATION_HEADER, _texts(validated), (1, 2, 3, 4, 5))]
    parts += [Text(), *(Text(line) for line in reasons(traffic))]
    parts += [Text(f"\nNote: {note}") for note in traffic.notes]
    return Group(*parts)


def _texts(rows: Iterable[Sequence[str]]) -> list[list[Text]]:
    return [[Text(cell) for cell in row] for row in rows]


def _table(header: Sequence[str], rows: Sequence[Sequence[Text]], right: Sequence[int]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for place, column in enumerate(header):
        table.add_column(column, justify="right" if place in right else "left", overflow="fold", no_wrap=place in right)
    for row in rows:
        table.add_row(*row)
    return table
