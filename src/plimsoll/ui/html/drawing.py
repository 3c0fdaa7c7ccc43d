"""Describes a chart before it is drawn: lines, areas and other layers, axes, notes, colours, and one unit per axis.

All parts are plain text and numbers; ``svg`` draws and escapes them. The page's style sheet sets the colours of text, grid and
axes for light, dark and paper.

Source of the colours: Okabe and Ito (2008), "Color Universal Design", without their yellow and black, which are invisible on a
light or a dark background.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plimsoll.units import GIB, KIB, MIB

BLUE = "#0072b2"
SKY = "#56b4e9"
GREEN = "#009e73"
ORANGE = "#e69f00"
VERMILION = "#d55e00"
PINK = "#cc79a7"
GREY = "#8a9099"
VIOLET = "#8e6bbf"
LINE = "#3a8fd0"
"""The blue for thin lines in charts. On a black background, thin lines need more contrast than areas do."""

DASHED, DOTTED = "6 4", "2 4"
_MOST_LETTERS = 36

Numbers = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Polyline:
    """A layer of a chart: a line through points, interrupted at missing numbers.

    With ``is_stepped``, the line jumps at each point.
    """

    xs: Sequence[float]
    ys: Numbers
    colour: str
    name: str = ""
    width: float = 1.5
    dash: str = ""
    is_stepped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """A layer of a chart: the area between two stepped lines, the lower line ``lows`` and the upper line ``ys``."""

    xs: Sequence[float]
    lows: Sequence[float]
    ys: Sequence[float]
    colour: str
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """A layer of a chart: marks, each with an optional label, hint and error bar.

    A hint is text that is shown when the mouse points at the mark. ``spreads`` has the lower and upper end of each error bar.
    """

    xs: Numbers
    ys: Numbers
    colour: str
    name: str = ""
    radius: float = 4
    is_star: bool = False
    labels: Sequence[str] = ()
    hints: Sequence[str] = ()
    spreads: Sequence[tuple[float, float]] = ()
    css_class: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """A layer of a chart: a grid, row by row.

    A cell has a colour, a letter, and a hint that is shown when the mouse points at the cell.
    """

    rows: Sequence[Sequence[tuple[str, str, str] | None]]

    @property
    def columns(self) -> int:
        """The number of cells in the longest row."""
        return max(map(len, self.rows), default=0)

    @property
    def xs(self) -> Numbers:
        """The horizontal range of the grid: the left edge of the first column and the right edge of the last column.

        A cell's centre is its index.
        """
        return (-0.5, self.columns - 0.5)

    @property
    def ys(self) -> Numbers:
        """The vertical range of the grid: the outer edges of the first and the last row. A cell's centre is its index."""
        return (-0.5, len(self.rows) - 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """A layer of a chart: a box plot with one box per group.

    A box is low whisker, lower quartile, median, upper quartile, high whisker.
    """

    boxes: Sequence[Sequence[float | None]]
    colour: str
    name: str = ""

    @property
    def xs(self) -> Numbers:
        """The horizontal range of the box plot: outer edges of the first and the last group. A group's centre is its index."""
        return (-0.5, len(self.boxes) - 0.5)

    @property
    def ys(self) -> Numbers:
        """The numbers of all boxes in one list. They determine the vertical range of the box plot."""
        return list(itertools.chain.from_iterable(self.boxes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A layer of a chart: one horizontal bar per row, with a length, a colour and a hint.

    ``spreads`` has half the width of each error bar.
    """

    lengths: Numbers
    colours: Sequence[str]
    hints: Sequence[str]
    spreads: Sequence[float] = ()

    @property
    def xs(self) -> Numbers:
        """The numbers that determine the horizontal range of the bars: zero, and both ends of each error bar, or of each bar
        without error bars.
        """
        spreads = self.spreads or [0.0] * len(self.lengths)
        known = [(each, spread) for each, spread in zip(self.lengths, spreads, strict=True) if each is not None]
        return [0.0, *(each + end for each, spread in known for end in (-spread, spread))]

    @property
    def ys(self) -> Numbers:
        """The vertical range of the bars: the outer edges of the first and the last row. A bar's centre is its index."""
        return (-0.5, len(self.lengths) - 0.5)


Layer = Polyline | Area | Points | Cells | Boxes | Bars


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a chart.

    ``span`` is the range that the axis shows; by default, it holds all numbers plus a margin. ``ticks`` are the marked
    positions with their names; by default, they are round numbers.
    """

    title: str = ""
    span: tuple[float, float] | None = None
    ticks: Sequence[tuple[float, str]] | None = None
    turned_degrees: int = 0
    """The rotation of the ticks' names in degrees."""
    is_log: bool = False
    is_downward: bool = False
    is_whole: bool = False
    has_grid: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleLine:
    """A line through the whole chart: horizontal at the height ``y``, or vertical at ``x``."""

    x: float | None = None
    y: float | None = None
    dash: str = DASHED


@dataclass(frozen=True, slots=True)
class Note:
    """Lines of text in a chart, by default at its top, at the side that ``anchor`` names.

    With ``is_peak``, the position gets a marker.
    """

    lines: Sequence[str]
    x: float | None = None
    y: float | None = None
    anchor: str = "start"
    is_peak: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A chart with its texts, ready to be drawn.

    ``description`` says in words what the chart shows. ``lead`` is the text above the chart, and ``caption`` the text below it.
    ``key`` explains the colours: each entry has a colour, a letter, a name and a remark.
    """

    layers: Sequence[Layer]
    x: Axis
    y: Axis
    height: int = 380
    rules: Sequence[RuleLine] = ()
    notes: Sequence[Note] = ()
    description: str
    lead: str = ""
    caption: str = ""
    key: Sequence[tuple[str, str, str, str]] = ()
    pulled: Sequence[tuple[str, str]] = ()
    """The budgets that a slider below the chart can choose, each as its name and a text about what that budget costs.

    They belong to the chart's points of the CSS class ``budget-point``.
    """
    pulled_at: int = 0
    """The index in ``pulled`` at which the slider starts."""


def shorten(text: str, most_letters: int = _MOST_LETTERS) -> str:
    """Shorten a name by cutting out its middle, because the names in one model differ mostly at their ends.

    Example:
        >>> shorten("model.layers.31.self_attn.q_proj", 16)
        'model.l…n.q_proj'
    """
    if len(text) <= most_letters:
        return text
    head = (most_letters - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most_letters - 1 - head) :]}"


@dataclass(frozen=True, slots=True)
class Scale:
    """The unit for all amounts of bytes on one axis."""

    unit: str
    bytes_per_unit: int

    def of(self, bytes_: float) -> float:
        """Return the bytes as a number in this unit, rounded to 4 digits after the point."""
        return round(bytes_ / self.bytes_per_unit, 4)


def byte_scale(amounts: Iterable[int]) -> Scale:
    """Return the largest unit (B, KiB, MiB or GiB) that is not larger than the largest of the amounts."""
    largest = max(amounts, default=0)
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if largest >= size:
            return Scale(unit, size)
    return Scale("B", 1)


def drawable(number: float | None) -> float | None:
    """Return the number, or ``None`` if it is not finite, because a chart cannot show such a number."""
    return number if number is not None and math.isfinite(number) else None
