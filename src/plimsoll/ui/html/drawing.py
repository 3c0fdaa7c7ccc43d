"""What all charts share: a figure as plain data, colours, names that fit an axis, one unit per axis.

Colours of text, grid and lines are left to the page's style sheet, which knows light, dark and paper. Texts inside a figure
are escaped here, because bold words and line breaks in them are tags; everything else is escaped by the page's template.

Source of the colours: Okabe and Ito (2008), "Color Universal Design", without their yellow and black, which vanish on one of
both grounds.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.units import GIB, KIB, MIB

BLUE = "#0072b2"
SKY = "#56b4e9"
GREEN = "#009e73"
ORANGE = "#e69f00"
VERMILION = "#d55e00"
PINK = "#cc79a7"
GREY = "#8a9099"
LINE = "#3a8fd0"
"""The blue of thin lines, which need more contrast on black than areas do."""

_HOVER = {"bgcolor": "#23272e", "bordercolor": "#5b636f", "font": {"color": "#ffffff", "size": 13}, "align": "left"}
_MOST_LETTERS = 36

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A chart as a page shows it: a figure in plotly's words, and in plain words what it shows.

    ``lead`` stands above it, ``caption`` below; ``key`` has colour, letter, name and remark for each of its colours.
    """

    figure: dict[str, Any]
    description: str
    lead: str = ""
    caption: str = ""
    key: Sequence[tuple[str, str, str, str]] = ()
    pulled: Sequence[str] = ()
    """What a slider beside the chart says at each of the points that are classed ``budget-point``."""


def figure(traces: list[Trace], *, x: dict[str, Any], y: dict[str, Any], height: int = 380, **layout: Any) -> Trace:
    """A figure with a horizontal legend under it.

    Args:
        traces: lines, areas, boxes, bars or a grid, in plotly's words; ``svg`` knows which.
        x: the horizontal axis, beyond what all axes share.
        y: the vertical axis.
        height: pixels.
        layout: whatever else the layout needs.
    """
    return {
        "data": traces,
        "layout": {
            "height": height,
            "margin": {"l": 8, "r": 20, "t": 28, "b": 8},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif", "size": 13},
            "legend": {"orientation": "h", "x": 0, "y": -0.21, "yanchor": "top", "bgcolor": "rgba(0,0,0,0)"},
            "hoverlabel": _HOVER,
            "xaxis": _axis(x),
            "yaxis": _axis(y),
            **layout,
        },
    }


def _axis(special: dict[str, Any]) -> dict[str, Any]:
    """What all axes share, overlaid; titles keep the settings of both."""
    title = {"standoff": 8, **special.get("title", {})}
    return {"automargin": True, "zeroline": False, "ticks": "", **special, "title": title}


def named_ticks(names: Sequence[str]) -> dict[str, Any]:
    """An axis of positions with names at them: as categories, equal short names would fall together."""
    return {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": [label(name) for name in names]}


def escape(text: str) -> str:
    """A text that a picture shows letter by letter: tags in it would be markup.

    Example:
        >>> escape("<b>layer</b>")
        '&lt;b&gt;layer&lt;/b&gt;'
    """
    return html.escape(" ".join(text.split()), quote=False)


def shorten(text: str, most_letters: int = _MOST_LETTERS) -> str:
    """A name cut in its middle, where names of one model are most alike.

    Example:
        >>> shorten("model.layers.31.self_attn.q_proj", 16)
        'model.l…n.q_proj'
    """
    if len(text) <= most_letters:
        return text
    head = (most_letters - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most_letters - 1 - head) :]}"


def label(text: str, most_letters: int = _MOST_LETTERS) -> str:
    """A name as an axis or an annotation shows it: short and escaped."""
    return escape(shorten(text, most_letters))


@dataclass(frozen=True, slots=True)
class Scale:
    """One unit for all amounts of an axis."""

    unit: str
    bytes_per_unit: int

    def of(self, bytes_: float) -> float:
        """The amount in the unit, with enough digits to draw it."""
        return round(bytes_ / self.bytes_per_unit, 4)


def byte_scale(amounts: Iterable[int]) -> Scale:
    """The largest unit in which the largest amount is at least one."""
    largest = max(amounts, default=0)
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if largest >= size:
            return Scale(unit, size)
    return Scale("B", 1)


def drawable(number: float | None) -> float | None:
    """The number, or ``None`` for what no chart can draw: JSON has neither infinity nor NaN."""
    return number if number is not None and math.isfinite(number) else None
