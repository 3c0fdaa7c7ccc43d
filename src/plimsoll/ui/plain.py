"""Renders a document (the content of a saved result) as plain text, as for ``print(plan)``. Lines are not wrapped, so that the
text can be searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plimsoll.ui.document import Checks, Document, Element, Fold, NamedFigures, Paragraph, ShellCommand, Table, opened

_INDENT = "  "


def render_plain(document: Document, *, with_details: bool = False) -> str:
    """Return a document (the content of a saved result) as plain text.

    Args:
        document: the content of an artifact.
        with_details: also show details, such as every decision of a plan with its reason.
    """
    lines = [document.headline, *_indented(document.lines)]
    for section in document.sections:
        body = list(_lines(section.elements, with_details=with_details))
        if body:
            lines += ["", section.title, *_indented(body)]
    lines += [f"\nNote: {note}" for note in document.notes]
    return "\n".join(lines)


def summarize(document: Document) -> str:
    """Return the first lines of a document (the content of a saved result) as plain text, and a line that says how to see the
    rest.
    """
    return "\n".join([document.headline, *_indented([*document.lines, "print() shows the whole."])])


def align(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Return one line per row. Cells are padded with spaces, so that all cells of a column have the same width.

    Args:
        rows: the cells; rows may differ in length.
        right: indices of the columns that are aligned right (numbers).

    Example:
        >>> align([["a", "1"], ["bb", "22"]], right=[1])
        ['a    1', 'bb  22']
    """
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows), default=0))]
    lines = []
    for row in rows:
        cells = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _lines(elements: Sequence[Element], *, with_details: bool) -> Iterator[str]:
    """Yield the text lines of the elements, with an empty line before each element that is not a paragraph."""
    is_first = True
    for element in opened(elements, with_details=with_details):
        title, body = _block(element, with_details=with_details)
        if not body:
            continue
        if not is_first and not isinstance(element, Paragraph | ShellCommand):
            yield ""
        is_first = False
        yield from [title, *_indented(body)] if title else body


def _block(element: Element, *, with_details: bool) -> tuple[str, list[str]]:
    """Return the title and the text lines of an element.

    For a chart, both are empty, because plain text does not show charts.
    """
    match element:
        case Paragraph() | ShellCommand():
            return "", [element.text]
        case NamedFigures():
            return "", align(element.rows)
        case Table():
            header = [list(element.header)] if element.header else []
            return element.title, align([*header, *element.shown_rows()], right=element.numbers)
        case Checks():
            width = max((len(check.mark) for check in element.checks), default=0)
            lines = []
            for check in element.checks:
                lines.append(f"{check.mark:<{width}}  {check.title}: {check.detail}")
                lines += [f"{'':<{width}}  next: {check.next}"] if check.next else []
            return element.title, lines
        case Fold():
            return element.title, list(_lines(element.elements, with_details=with_details))
        case _:
            return "", []


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"{_INDENT}{line}" if line else "" for line in lines]
