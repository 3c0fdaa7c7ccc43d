"""Draws a chart as two inline SVG pictures, without a script or a library: one for wide windows and paper, one for narrow
windows.

A text that would overlap another text is moved or left out. Nothing is lost, because tables contain the same names.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import TypeGuard

from plimsoll.ui.html.drawing import (
    Area,
    Axis,
    Bars,
    Boxes,
    Cells,
    Drawing,
    Layer,
    Points,
    Polyline,
    shorten,
)

WIDTHS = {"wide": 760, "narrow": 350}
"""The width of each picture in SVG units. The style sheet shows the picture that fits the window."""
_LINE, _LETTER = 15, 6.7
_RIGHT = 8
_SMALLEST_CELL = 10
_TURNED_LETTERS = 24
_SAMPLES = 12
_SIDES = ((1, 4), (-1, 4), (1, -8), (1, 18), (-1, -8), (-1, 18), (0, -12), (0, 24))
"""Positions to try for the name of a point: right, left, the corners, above, below.

Each is the side (1: right of the point, -1: left, 0: centred) and the shift down in SVG units.
"""
_LETTERED_CELLS = 1500
"""A grid with more cells than this is drawn without letters, because its cells are too small."""

_Box = tuple[float, float, float, float]


def draw_svg(drawing: Drawing, names: Iterable[str] = WIDTHS) -> str:
    """Return the SVG text of the named pictures of a chart; by default both, wide and narrow."""
    return "".join(_Picture(drawing, name, WIDTHS[name]).draw() for name in names)


def legend(drawing: Drawing) -> list[tuple[str, str, str, str]]:
    """Return the entries that explain a chart's layers above the chart: for each layer with a name, its colour and its name."""
    named = [layer for layer in drawing.layers if not isinstance(layer, Cells | Bars) and layer.name]
    return [(layer.colour, "", layer.name, "") for layer in named]


@dataclass(slots=True)
class _Ruler:
    """The scale of one axis: its range in numbers (``low`` to ``high``), and in SVG units (``start`` to ``end``)."""

    low: float
    high: float
    start: float = 0.0
    end: float = 1.0
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a number on this axis, in SVG units."""
        low, high, value = (
            (math.log10(n) for n in (self.low, self.high, value)) if self.is_log else (self.low, self.high, value)
        )
        share = (value - low) / (high - low)
        return round(self.start + min(max(share, -0.02), 1.02) * (self.end - self.start), 1)

    def ticks(self, axis: Axis, about: int) -> Iterable[tuple[float, str]]:
        """Return the ticks that the axis names within its range. If it names none, return about ``about`` round numbers."""
        if axis.ticks is not None:
            return [tick for tick in axis.ticks if self.low <= tick[0] <= self.high]
        if self.is_log:
            return [(value, f"{value:.3g}") for value in (self.low * 1.3, self.high / 1.3)]
        step = _round_step((self.high - self.low) / about)
        first = math.ceil(self.low / step)
        values = [step * number for number in range(first, first + 4 * about) if step * number <= self.high]
        return [(value, f"{value:.6g}") for value in values if not axis.is_whole or value == int(value)]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _ruler(axis: Axis, values: Iterable[float | None], room: float) -> _Ruler:
    """Make the scale of an axis, from the axis' own span or from the range of the numbers.

    The range of the numbers gets a margin on both sides, which is ``room`` as a share of the range.
    """
    known = [value for value in axis.span or values if _is_drawable(value) and (value > 0 or not axis.is_log)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if axis.is_log:
        return _Ruler(low / 1.3, high * 1.3, is_log=True)
    if axis.span is None:
        low, high = low - room * (high - low), high + room * (high - low)
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    return _Ruler(low, high)


def _is_drawable(value: float | None) -> TypeGuard[float]:
    return value is not None and abs(value) < 1e200


@dataclass(slots=True)
class _Picture:
    """A picture that is being drawn: one chart at one width.

    ``parts`` are its SVG elements, ``taken`` the boxes that texts fill.
    """

    drawing: Drawing
    name: str
    width: int
    parts: list[str] = field(default_factory=list)
    taken: list[_Box] = field(default_factory=list)
    x: _Ruler = field(default_factory=lambda: _Ruler(0, 1))
    y: _Ruler = field(default_factory=lambda: _Ruler(0, 1))

    def draw(self) -> str:
        drawing, layers = self.drawing, self.drawing.layers
        height = drawing.height if self.name == "wide" else max(300, int(drawing.height * 0.9))
        self.x = _ruler(drawing.x, itertools.chain.from_iterable(layer.xs for layer in layers), 0.02)
        self.y = _ruler(drawing.y, itertools.chain.from_iterable(layer.ys for layer in layers), 0.06)
        left, bottom = self._margins()
        self.x.start, self.x.end = left, self.width - _RIGHT
        self.y.start, self.y.end = height - bottom, 26
        if drawing.y.is_downward:
            self.y.start, self.y.end = self.y.end, self.y.start
        self._axes(height)
        for layer in layers:
            _draw(layer, self)
        self._notes()
        self._names()
        return f'<svg class="{self.name}" viewBox="0 0 {self.width} {height}" aria-hidden="true">{"".join(self.parts)}</svg>'

    def _margins(self) -> tuple[float, float]:
        x, y = self.drawing.x, self.drawing.y
        names = [] if y.is_log else [text for _, text in y.ticks or ()]
        left = min(self.width * 0.36, 12 + _LETTER * max(map(len, names), default=0)) if names else 62.0
        below = [text for _, text in x.ticks or ()] if x.turned_degrees else []
        below = below if self._has_room(len(below), left) else []
        bottom = min(160.0, 22 + 0.84 * _LETTER * max(map(len, below))) if below else 26.0
        return left, bottom + (18 if x.title else 0)

    def _has_room(self, names: int, left: float) -> bool:
        """Return whether this many rotated tick names fit side by side, if they begin at the position ``left``. If they do not
        fit, none of them is written.
        """
        return names * _LINE < self.width - _RIGHT - left

    def add(self, tag: str, text: str = "", /, **attributes: object) -> None:
        """Add an SVG element to the picture. In attribute names, ``_`` becomes ``-``, and a trailing ``_`` is removed."""
        words = "".join(
            f' {name.rstrip("_").replace("_", "-")}="{value}"' for name, value in attributes.items() if value != ""
        )
        self.parts.append(f"<{tag}{words}>{text}</{tag}>" if text else f"<{tag}{words}/>")

    def words(
        self, x: float, y: float, lines: Sequence[str], anchor: str = "start", *, is_strong: bool = False
    ) -> bool:
        """Write lines inside the picture, unless they would overlap earlier text. Return whether they were written.

        Args:
            x: position of the lines' ``anchor``.
            y: baseline of the last line.
            lines: texts, not escaped.
            anchor: SVG's ``start``, ``middle`` or ``end``.
            is_strong: whether the first line is bold.
        """
        texts = [_short(line, int(self.width / _LETTER)) for line in lines]
        wide = max(map(len, texts)) * _LETTER
        left = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        left = min(max(left, 1), max(1.0, self.width - wide - 1))
        box = (left, y - _LINE * len(texts), left + wide, y + 3)
        if box[1] < 0 or any(_overlap(box, other) for other in self.taken):
            return False
        self.taken.append(box)
        for index, text in enumerate(texts):
            at = round(y - _LINE * (len(texts) - 1 - index), 1)
            self.text(text, x=round(left, 1), y=at, class_="strong" if is_strong and not index else "")
        return True

    def text(self, text: str, **attributes: object) -> None:
        """Add a text element to the picture. This method escapes the text."""
        self.add("text", html.escape(text, quote=False), **attributes)

    def _axes(self, height: int) -> None:
        bottom, top = max(self.y.start, self.y.end), min(self.y.start, self.y.end)
        x_axis, y_axis = self.drawing.x, self.drawing.y
        for value, name in self.y.ticks(y_axis, 5):
            y = self.y.at(value)
            if y_axis.has_grid:
                self.add("path", d=f"M{self.x.start} {y}H{self.x.end}", class_="grid")
            self.text(_short(name, int((self.x.start - 8) / _LETTER)), x=self.x.start - 6, y=y + 4, text_anchor="end")
        ticks = list(self.x.ticks(x_axis, 7 if self.name == "wide" else 4))
        turned = x_axis.turned_degrees
        for value, name in ticks if not turned or self._has_room(len(ticks), self.x.start) else []:
            x = self.x.at(value)
            if turned:
                place = f"translate({x + 4} {bottom + 14}) rotate({-turned})"
                self.text(_short(name, _TURNED_LETTERS), text_anchor="end", transform=place)
            else:
                self.words(x, bottom + 18, [name], "middle")
        self.add("path", d=f"M{self.x.start} {bottom}H{self.x.end}", class_="axis")
        if x_axis.title:
            self.words((self.x.start + self.x.end) / 2, height - 6, [x_axis.title], "middle")
        if y_axis.title:
            self.text(y_axis.title, text_anchor="middle", transform=f"translate(13 {(bottom + top) / 2}) rotate(-90)")

    def _notes(self) -> None:
        """Draw the lines through the picture, then the notes.

        The peak's note comes first, so that other notes cannot displace it.
        """
        for rule in self.drawing.rules:
            across = f"M{self.x.start} {self.y.at(rule.y)}H{self.x.end}" if rule.y is not None else ""
            way = across or f"M{self.x.at(rule.x or 0.0)} {self.y.start}V{self.y.end}"
            self.add("path", d=way, class_="mark", stroke_dasharray=rule.dash)
        for note in sorted(self.drawing.notes, key=lambda note: not note.is_peak):
            side = self.x.start if note.anchor == "start" else self.x.end
            x = side if note.x is None else self.x.at(note.x)
            y = min(self.y.start, self.y.end) if note.y is None else self.y.at(note.y)
            if note.is_peak:
                self.add("circle", cx=x, cy=y, r=4, class_="peak")
                self.words(x + (10 if note.anchor == "start" else -10), y - 10, note.lines, note.anchor, is_strong=True)
            else:
                _ = any(self.words(x, y - 5 + shift, note.lines, note.anchor) for shift in (0, 20, -_LINE))

    def _names(self) -> None:
        """Write the name of each point at a free position. If no position is free, the name is left out."""
        places = [
            (self.x.at(x), self.y.at(y), label)
            for layer in reversed(self.drawing.layers)
            if isinstance(layer, Points) and layer.labels
            for x, y, label in zip(layer.xs, layer.ys, layer.labels, strict=True)
            if _is_drawable(x) and _is_drawable(y)
        ]
        self.taken += [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in places]
        lines = [box for layer in self.drawing.layers if isinstance(layer, Polyline) for box in self._along(layer)]
        for x, y, text in places:
            before, self.taken = self.taken, [*self.taken, *lines]
            is_written = self._name(x, y, text)
            self.taken = [*before, self.taken[-1]] if is_written else before
            if not is_written:
                self._name(x, y, text)  # second try: a name across a line is better than a missing name

    def _along(self, line: Polyline) -> Iterator[_Box]:
        """Yield small boxes along a line. They are so close together that a name cannot fit between them."""
        points = zip(line.xs, line.ys, strict=True)
        known = [(self.x.at(x), self.y.at(y)) for x, y in points if _is_drawable(x) and _is_drawable(y)]
        for (x, y), (to_x, to_y) in itertools.pairwise(known):
            for part in range(_SAMPLES):
                at = x + (to_x - x) * part / _SAMPLES, y + (to_y - y) * part / _SAMPLES
                yield at[0] - 2, at[1] - 2, at[0] + 2, at[1] + 2

    def _name(self, x: float, y: float, text: str) -> bool:
        """Write the name of a point at the first free position, and return whether there was one."""
        wide = len(text) * _LETTER
        for side, down in _SIDES:
            at = x + 10 * side
            is_inside = self.x.start < at - wide * (side < 0) and at + wide * (side > 0) < self.x.end
            if is_inside and self.words(at, y + down, [text], {1: "start", -1: "end", 0: "middle"}[side]):
                return True
        return False

    def along(self, xs: Iterable[float], ys: Iterable[float], *, is_stepped: bool) -> str:
        """Return the path data of an SVG line through points. A stepped path keeps its height until the next point."""
        known = [(self.x.at(x), self.y.at(y)) for x, y in zip(xs, ys, strict=True)]
        if not is_stepped:
            return "L".join(f"{x} {y}" for x, y in known)
        corners = [f"L{x} {y}L{after} {y}" for (x, y), (after, _) in itertools.pairwise(known)]
        return "".join([*corners, f"L{known[-1][0]} {known[-1][1]}"])[1:]


def _short(text: str, most: int) -> str:
    """Return the text on one line. If it is longer than ``most`` letters, it is shortened to that number (but never to fewer
    than 4).
    """
    return shorten(" ".join(text.split()), max(most, 4))


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _hint(words: str) -> str:
    """Return a ``<title>`` element with these words. Browsers show the words when the mouse points at the shape."""
    return f"<title>{html.escape(words, quote=False)}</title>" if words else ""


@singledispatch
def _draw(layer: Layer, picture: _Picture) -> None:
    """Draw one layer of a chart into a picture."""
    raise NotImplementedError(type(layer))


@_draw.register
def _(line: Polyline, picture: _Picture) -> None:
    points = zip(line.xs, line.ys, strict=True)
    for is_drawn, run in itertools.groupby(points, lambda point: all(map(_is_drawable, point))):
        if is_drawn:
            xs, ys = zip(*run, strict=True)
            way = picture.along(xs, ys, is_stepped=line.is_stepped)
            colour, width, dash = line.colour, line.width, line.dash
            picture.add("path", d=f"M{way}", fill="none", stroke=colour, stroke_width=width, stroke_dasharray=dash)


@_draw.register
def _(area: Area, picture: _Picture) -> None:
    there = picture.along(area.xs, area.ys, is_stepped=True)
    back = picture.along(area.xs, area.lows, is_stepped=True)
    ends = "L".join([there, *reversed(back.split("L"))])
    picture.add("path", d=f"M{ends}Z", fill=area.colour)


@_draw.register
def _(points: Points, picture: _Picture) -> None:
    for index, (x, y) in enumerate(zip(points.xs, points.ys, strict=True)):
        if not (_is_drawable(x) and _is_drawable(y)):
            continue
        cx, cy, radius, colour = picture.x.at(x), picture.y.at(y), points.radius, points.colour
        hint = _hint(points.hints[index]) if points.hints else ""
        if points.spreads:
            low, high = map(picture.y.at, points.spreads[index])
            picture.add("path", d=f"M{cx} {high}V{low}", stroke=colour, stroke_width=1.5)
        if points.is_star:
            way = f"M{cx} {cy - radius}l{radius} {radius}l-{radius} {radius}l-{radius} -{radius}Z"
            picture.add("path", hint, d=way, fill=colour)
        else:
            picture.add("circle", hint, cx=cx, cy=cy, r=radius, fill=colour, class_=points.css_class)


@_draw.register
def _(cells: Cells, picture: _Picture) -> None:
    """Draw a rectangle per cell. In a grid with too many cells, neighbouring cells of one colour are drawn as one rectangle."""
    is_lettered = cells.columns * len(cells.rows) <= _LETTERED_CELLS
    for row, found in enumerate(cells.rows):
        top, low = sorted((picture.y.at(row - 0.5), picture.y.at(row + 0.5)))
        alike = itertools.groupby(enumerate(found), lambda cell: cell[0] if is_lettered else cell[1] and cell[1][0])
        for run in (list(run) for _, run in alike):
            column, cell = run[0]
            if cell is None:
                continue
            colour, letter, words = cell
            left, right = picture.x.at(column - 0.5), picture.x.at(column + len(run) - 0.5)
            hint = _hint(words) if is_lettered and picture.name == "wide" else ""
            size = {"width": round(max(right - left - 1, 0.5), 1), "height": round(max(low - top - 1.5, 1), 1)}
            picture.add("rect", hint, x=left, y=top, fill=colour, **size)
            if is_lettered and right - left >= _SMALLEST_CELL:
                middle = {"x": round((left + right) / 2, 1), "y": round((top + low) / 2 + 4, 1)}
                picture.text(letter, text_anchor="middle", class_="letter", **middle)


@_draw.register
def _(boxes: Boxes, picture: _Picture) -> None:
    """Draw the boxes of one layer of a box plot. If several layers have boxes, the boxes of one group are side by side."""
    several = [layer for layer in picture.drawing.layers if isinstance(layer, Boxes)]
    place = next(index for index, other in enumerate(several) if other is boxes)
    for index, numbers in enumerate(boxes.boxes):
        known = [picture.y.at(number) for number in numbers if _is_drawable(number) and number > 0]
        if len(known) < len(numbers):
            continue
        low, first, median, third, high = known
        left, right = (picture.x.at(index - 0.4 + 0.8 * (place + shift) / len(several)) for shift in (0.05, 0.95))
        middle, line = (left + right) / 2, boxes.colour
        picture.add("path", d=f"M{middle} {low}V{first}M{middle} {third}V{high}", stroke=line)
        size = {"width": round(right - left, 1), "height": round(first - third, 1)}
        picture.add("rect", x=left, y=third, fill=f"{line}55", stroke=line, **size)
        picture.add("path", d=f"M{left} {median}H{right}", stroke=line, stroke_width=2)


@_draw.register
def _(bars: Bars, picture: _Picture) -> None:
    zero = picture.x.at(0.0)
    for index, length in enumerate(bars.lengths):
        if not _is_drawable(length):
            continue
        end, top, low = picture.x.at(length), *sorted((picture.y.at(index - 0.35), picture.y.at(index + 0.35)))
        size = {"width": round(abs(end - zero), 1), "height": round(low - top, 1)}
        picture.add("rect", _hint(bars.hints[index]), x=min(zero, end), y=top, fill=bars.colours[index], **size)
        if bars.spreads:
            spread, middle = bars.spreads[index], (top + low) / 2
            ends = picture.x.at(length - spread), picture.x.at(length + spread)
            picture.add("path", d=f"M{ends[0]} {middle}H{ends[1]}", class_="mark")
    picture.add("path", d=f"M{zero} {picture.y.start}V{picture.y.end}", class_="axis")
