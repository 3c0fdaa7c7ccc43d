"""Renders a document (the content of a saved result) as a piece of HTML for notebooks: its first lines, its charts of memory
and time, and the rest as text.

A notebook sets its own colours, so texts and lines take the colour of the text around them. It runs no script.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from plimsoll.ui.document import Document, Element, FrontierChart, MemoryChart, Table
from plimsoll.ui.html.drawing import Drawing
from plimsoll.ui.html.frontier_chart import draw_frontier
from plimsoll.ui.html.memory_chart import draw_memory
from plimsoll.ui.html.svg import draw_svg, legend
from plimsoll.ui.plain import render_plain

_STYLE = """<style>
.plimsoll svg { width: 100%; max-width: 720px; height: auto; display: block; }
.plimsoll text { fill: currentColor; font: 12px sans-serif; }
.plimsoll .grid { stroke: currentColor; stroke-opacity: 0.15; fill: none; }
.plimsoll .axis, .plimsoll .mark, .plimsoll .peak { stroke: currentColor; fill: none; }
.plimsoll .number { text-align: right; }
</style>"""


def render_notebook(document: Document | None, *, text: str = "") -> str:
    """Return a document (the content of a saved result) as a piece of HTML.

    Args:
        document: the content of an artifact; ``None`` if only ``text`` is shown.
        text: lines to show first, unchanged.
    """
    parts = [f"<pre>{html.escape(text)}</pre>"] if text else []
    if document is not None:
        parts += [f"<strong>{html.escape(document.headline)}</strong>"]
        parts += [f"<div>{html.escape(line)}</div>" for line in document.lines]
        for section in document.sections:
            body = "".join(_pictures(section.elements))
            parts += [f"<p><em>{html.escape(section.title)}</em></p>{body}"] if "<svg" in body else []
        whole = html.escape(render_plain(document))
        parts.append(f"<details><summary>Everything as text</summary><pre>{whole}</pre></details>")
    return f'{_STYLE}<div class="plimsoll">{"".join(parts)}</div>'


def _pictures(elements: Sequence[Element]) -> Iterator[str]:
    """Yield the charts of memory and of time against memory, and the tables that have a header."""
    for element in elements:
        match element:
            case MemoryChart():
                yield _picture(draw_memory(element))
            case FrontierChart() if any(len(plan.frontier) > 1 for plan in element.plans):
                yield _picture(draw_frontier(element))
            case Table() if element.header:
                yield _table(element)
            case _:
                pass


def _picture(drawing: Drawing) -> str:
    names = [
        f'<span style="color: {colour}">■</span> {html.escape(name)}' for colour, _, name, _ in legend(drawing) if name
    ]
    return f"<div>{' &nbsp; '.join(names)}</div>{draw_svg(drawing, ['wide'])}"


def _table(table: Table) -> str:
    """Return a table as HTML, its numbers aligned right."""

    def row(cells: Sequence[str], tag: str) -> str:
        looks = [' class="number"' if place in table.numbers else "" for place in range(len(cells))]
        made = [f"<{tag}{look}>{html.escape(cell)}</{tag}>" for look, cell in zip(looks, cells, strict=True)]
        return f"<tr>{''.join(made)}</tr>"

    return f"<table>{row(table.header, 'th')}{''.join(row(cells, 'td') for cells in table.shown_rows())}</table>"
