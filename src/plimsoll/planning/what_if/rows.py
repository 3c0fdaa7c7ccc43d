"""The sizes of a head and what the user asked for in, the rows of one chunk out."""

from __future__ import annotations

import math

from plimsoll.errors import InvalidOption
from plimsoll.units import format_bytes, parse_bytes

LEAST_ROWS = 128
"""Fewer rows by default would keep the matrix units waiting."""


def chunk_rows_for(
    rows: int,
    features: int,
    classes: int,
    *,
    element_bytes: int,
    chunk_bytes: int | str | None = None,
    chunk_rows: int | None = None,
) -> int:
    """How many rows are computed at once.

    Without a wish the logits of one chunk take as many bytes as the hidden states, but have at least 128 rows.

    Args:
        rows: of the hidden states.
        features: of one hidden state.
        classes: of the head: the vocabulary.
        element_bytes: of one logit while the loss is computed.
        chunk_bytes: the most that the logits of one chunk may take.
        chunk_rows: the rows themselves.

    Raises:
        InvalidOption: both are given, a count below one, or less than one row's logits.
        InvalidBudget: no amount of memory.

    Example:
        >>> chunk_rows_for(8192, 4096, 131072, element_bytes=4)
        256
    """
    if chunk_bytes is not None and chunk_rows is not None:
        raise InvalidOption(
            f"chunk_bytes={chunk_bytes!r} and chunk_rows={chunk_rows!r} say the same thing twice.",
            why="the rows of a chunk follow from its bytes",
            next="give one of them, or none",
        )
    if chunk_rows is not None:
        if not isinstance(chunk_rows, int) or isinstance(chunk_rows, bool) or chunk_rows < 1:
            raise InvalidOption(
                f"chunk_rows={chunk_rows!r} is no number of rows.",
                why="it has to be a whole number, 1 or more",
                next="chunk_rows=1024, or leave it out",
            )
        return min(chunk_rows, max(rows, 1))
    row_bytes = classes * element_bytes
    if chunk_bytes is not None:
        most_bytes = parse_bytes(chunk_bytes)
        if most_bytes < row_bytes:
            raise InvalidOption(
                f"chunk_bytes={chunk_bytes!r} is less than the logits of one row.",
                why=f"{classes} classes of {element_bytes} bytes take {format_bytes(row_bytes)}",
                next=f"chunk_bytes={row_bytes} or more",
            )
        return min(most_bytes // row_bytes, max(rows, 1))
    return min(max(math.ceil(rows * features / classes), LEAST_ROWS), max(rows, 1))
