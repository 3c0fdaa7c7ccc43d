"""Makes the document (the content to show) of the longest sequences that fit: one row for each set of decisions, as a table and
as bars.
"""

from __future__ import annotations

from plimsoll.artifacts.lengths import LengthRow, SequenceLengths
from plimsoll.ui.document import (
    UNKNOWN,
    Document,
    LengthsChart,
    NamedFigures,
    Section,
    Subject,
    Table,
    Tone,
    sentence,
)
from plimsoll.units import format_bytes

_HEADER = ("", "tokens", "with its error", "×", "memory", "host")


def view_lengths(lengths: SequenceLengths) -> Document:
    """Make the document (the content to show) of the longest sequences that fit on a device."""
    longest, lines = lengths.longest, _setting(lengths)
    shortest = next((row.tokens for row in lengths.rows if row.tokens), None)
    table = Table(
        header=_HEADER,
        rows=[_cells(row, shortest, lengths.limit_tokens) for row in lengths.rows],
        numbers=range(1, 6),
        bars=[(row.tokens or 0) / longest for row in lengths.rows] if longest else (),
    )
    chart = LengthsChart([(row.name, row.tokens or 0, row.error_tokens) for row in lengths.rows])
    return Document(
        source="Longest sequence",
        subject=f"of {lengths.target} on {lengths.device}",
        word="none fits" if longest is None else f"{_tokens(longest, lengths.limit_tokens)} tokens",
        tone=Tone.BAD if longest is None else Tone.GOOD,
        about=Subject(
            model=lengths.target,
            device=lengths.device,
            budget_bytes=lengths.budget_bytes,
            label=str(lengths.techniques),
        ),
        lines=lines,
        statement=" ".join(map(sentence, lines)),
        sections=[
            Section("What fits, each row with one more decision", [chart, table]),
            Section(
                "What holds the peak at that length", [NamedFigures([(row.name, _peak(row)) for row in lengths.rows])]
            ),
        ],
        notes=lengths.notes,
    )


def _setting(lengths: SequenceLengths) -> list[str]:
    """Return the lines that say what is trained, and how much memory it may take."""
    layout = "one rank" if lengths.layout.ranks == 1 else f"layout {lengths.layout}"
    how = f", {lengths.techniques}" if str(lengths.techniques) else ""
    parts = [] if lengths.device_bytes is None else [f"device memory {format_bytes(lengths.device_bytes)}"]
    if lengths.budget_bytes is not None:
        parts.insert(0, f"budget {format_bytes(lengths.budget_bytes)} for tensors")
    samples = "1 sample" if lengths.batch == 1 else f"{lengths.batch} samples"
    traced = " and ".join(f"{tokens:,}" for tokens in lengths.traced_tokens)
    return [
        f"{lengths.model}, {samples} a step, {lengths.precision}, optimizer {lengths.optimizer}, {layout}{how}",
        f"{', '.join(parts)}; attention: {lengths.attention}",
        f"traced at {traced} tokens, other lengths derived",
    ]


def _cells(row: LengthRow, shortest: int | None, limit: int) -> tuple[str, ...]:
    """Return the table cells of one row: the longest sequence that fits under one set of memory-saving decisions."""
    if row.tokens is None:
        return (row.name, "none", *[UNKNOWN] * (len(_HEADER) - 2))
    host = format_bytes(row.host_bytes) if row.host_bytes else UNKNOWN
    return (
        row.name,
        _tokens(row.tokens, limit),
        f"{row.least_tokens:,} to {row.most_tokens:,}",
        f"{row.tokens / shortest:.1f}" if shortest else UNKNOWN,
        format_bytes(row.total_bytes),
        host,
    )


def _peak(row: LengthRow) -> str:
    """Return the memory of one row in words: its tensors, all of it with its error, and the moment of the peak."""
    if row.tokens is None:
        return "no length fits"
    if not row.is_gaining:
        return "as the row above, whose length this row does not exceed"
    total = f"{format_bytes(row.total_bytes)} ± {format_bytes(row.error_bytes)} in all"
    return f"{format_bytes(row.allocated_bytes)} of tensors in {row.moment}; {total}"


def _tokens(tokens: int, limit: int) -> str:
    return f"{tokens:,} or more" if tokens == limit else f"{tokens:,}"
