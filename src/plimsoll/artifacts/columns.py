"""Rows of text in, aligned plain-text columns out."""

from __future__ import annotations

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: int = 2) -> list[str]:
    """Lines with all cells of a column equally wide.

    Args:
        rows: the cells; rows may be shorter than others.
        right: indices of columns that are flush right (numbers).
        indent: spaces before the first column.

    Example:
        >>> align([["a", "1"], ["bb", "22"]], right=[1], indent=0)
        ['a    1', 'bb  22']
    """
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows), default=0))]
    lines = []
    for row in rows:
        cells = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines
