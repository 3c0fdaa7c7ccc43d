"""Draws a chart's figure as inline SVG, once for wide windows and paper and once for narrow ones: no script, no library.

A figure is plain data in plotly's words: lines, areas, points with names, boxes, bars, a grid of cells, axes, notes. Texts in
it are escaped already. A text that would lie on another one moves or is left out: tables hold the same names.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from plimsoll.ui.html.drawing import shorten

WIDTHS = {"wide": 760, "narrow": 350}
"""Units of each picture; a style sheet shows the one that fits."""
_LINE, _LETTER = 15, 6.7
_SMALLEST_CELL = 10
_TURNED_LETTERS = 24
_SAMPLES = 12
_SIDES = ((1, 4), (-1, 4), (1, -8), (1, 18), (-1, -8), (-1, 18), (0, -12), (0, 24))
"""Where the name of a point may stand: right, left, and the corners."""
_LETTERED_CELLS = 1500

Trace = dict[str, Any]


def draw_svg(figure: Trace) -> str:
    """Both pictures of a figure."""
    return "".join(_Picture(figure, name, width).draw() for name, width in WIDTHS.items())


def legend(figure: Trace) -> list[tuple[str, str, str, str]]:
    """Colour and name of every trace that has one, for a key above the chart."""
    named = [trace for trace in figure["data"] if trace.get("name") and trace.get("showlegend", True)]
    return [(_colour(trace), "", html.unescape(trace["name"]), "") for trace in named]


def _colour(trace: Trace) -> str:
    colour = trace.get("fillcolor") if "stackgroup" in trace else None
    found = colour or trace.get("line", {}).get("color") or trace.get("marker", {}).get("color")
    return str(found or "#888888")


@dataclass(slots=True)
class _Axis:
    """One axis: its range in numbers and in pixels, and its ticks."""

    low: float
    high: float
    start: float = 0.0
    end: float = 1.0
    is_log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a number."""
        low, high, value = (
            (math.log10(n) for n in (self.low, self.high, value)) if self.is_log else (self.low, self.high, value)
        )
        share = (value - low) / (high - low)
        return round(self.start + min(max(share, -0.02), 1.02) * (self.end - self.start), 1)

    def ticks(self, about: int) -> list[tuple[float, str]]:
        """Round numbers within the range."""
        step = _round_step((self.high - self.low) / about)
        first = math.ceil(self.low / step)
        values = [step * number for number in range(first, first + 4 * about) if step * number <= self.high]
        return [(value, f"{value:.6g}") for value in values]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _axis(settings: Trace, values: Iterable[float], room: float) -> _Axis:
    """The axis over what it shows: its own range, or that of the numbers with some room."""
    is_log = settings.get("type") == "log"
    known = [value for value in settings.get("range") or values if _is_drawable(value) and (value > 0 or not is_log)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if is_log:
        return _Axis(low / 1.3, high * 1.3, is_log=True)
    if "range" not in settings:
        low, high = low - room * (high - low), high + room * (high - low)
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    return _Axis(low, high)


def _is_drawable(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e200 and value == value


@dataclass(slots=True)
class _Picture:
    """One figure at one width."""

    figure: Trace
    name: str
    width: int
    parts: list[str] = field(default_factory=list)
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)
    x: _Axis = field(default_factory=lambda: _Axis(0, 1))
    y: _Axis = field(default_factory=lambda: _Axis(0, 1))

    def draw(self) -> str:
        layout, data = self.figure["layout"], self.figure["data"]
        height = layout["height"] if self.name == "wide" else max(300, int(layout["height"] * 0.9))
        self.x = _axis(layout["xaxis"], itertools.chain.from_iterable(map(_xs, data)), 0.02)
        self.y = _axis(layout["yaxis"], itertools.chain.from_iterable(map(_ys, data)), 0.06)
        left, bottom = self._margins(layout)
        self.x.start, self.x.end = left, self.width - 8
        self.y.start, self.y.end = height - bottom, 26
        if layout["yaxis"].get("autorange") == "reversed":
            self.y.start, self.y.end = self.y.end, self.y.start
        self._axes(layout, height)
        nothing: dict[int, float] = {}
        for trace, below in zip(data, itertools.accumulate(data, _stack, initial=nothing), strict=False):
            _DRAW[trace["type"]](self, trace, below)
        self._notes(layout)
        self._names(data)
        return f'<svg class="{self.name}" viewBox="0 0 {self.width} {height}" aria-hidden="true">{"".join(self.parts)}</svg>'

    def _margins(self, layout: Trace) -> tuple[float, float]:
        names = layout["yaxis"].get("ticktext") if _is_named(layout["yaxis"]) else None
        left = min(self.width * 0.36, 12 + _LETTER * max(map(_length, names), default=0)) if names else 62.0
        below = layout["xaxis"].get("ticktext") if layout["xaxis"].get("tickangle") else None
        bottom = min(160.0, 22 + 0.84 * _LETTER * max(map(_length, below), default=0)) if below else 26.0
        return left, bottom + (18 if layout["xaxis"]["title"].get("text") else 0)

    def add(self, tag: str, text: str = "", **attributes: object) -> None:
        """An element; ``_`` in names of attributes stands for ``-``, and at their end for nothing."""
        words = "".join(
            f' {name.rstrip("_").replace("_", "-")}="{value}"' for name, value in attributes.items() if value != ""
        )
        self.parts.append(f"<{tag}{words}>{text}</{tag}>" if text else f"<{tag}{words}/>")

    def words(self, x: float, y: float, text: str, anchor: str = "start", *, is_free: bool = True) -> bool:
        """A text of one or more lines whose last stands at ``y``, inside of the picture, unless it would lie on another."""
        lines = [_short(line, int(self.width / _LETTER)) for line in text.split("<br>")]
        wide = max(map(_length, lines)) * _LETTER
        left = min(
            max(x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor], 1), max(1.0, self.width - wide - 1)
        )
        box = (left, y - _LINE * len(lines), left + wide, y + 3)
        if box[1] < 0 or (is_free and any(_overlap(box, other) for other in self.taken)):
            return False
        self.taken.append(box)
        for index, (line, raw) in enumerate(zip(lines, text.split("<br>"), strict=True)):
            at = round(y - _LINE * (len(lines) - 1 - index), 1)
            self.add("text", line, x=round(left, 1), y=at, class_="strong" if raw.startswith("<b>") else "")
        return True

    def _axes(self, layout: Trace, height: int) -> None:
        bottom, top = max(self.y.start, self.y.end), min(self.y.start, self.y.end)
        for value, text in self._ticks(layout["yaxis"], self.y, 5):
            y = self.y.at(value)
            if layout["yaxis"].get("showgrid", True):
                self.add("path", d=f"M{self.x.start} {y}H{self.x.end}", class_="grid")
            most = int((self.x.start - 8) / _LETTER)
            self.add("text", _short(text, most), x=self.x.start - 6, y=y + 4, text_anchor="end")
        angle = layout["xaxis"].get("tickangle")
        ticks = self._ticks(layout["xaxis"], self.x, 7 if self.name == "wide" else 4)
        has_room = len(ticks) * _LINE < self.x.end - self.x.start
        for value, text in ticks if has_room or not angle else []:
            x = self.x.at(value)
            if angle:
                self.add(
                    "text",
                    _short(text, _TURNED_LETTERS),
                    text_anchor="end",
                    transform=f"translate({x + 4} {bottom + 14}) rotate({angle})",
                )
            else:
                self.words(x, bottom + 18, text, "middle")
        self.add("path", d=f"M{self.x.start} {bottom}H{self.x.end}", class_="axis")
        if title := layout["xaxis"]["title"].get("text"):
            self.words((self.x.start + self.x.end) / 2, height - 6, title, "middle")
        if title := layout["yaxis"]["title"].get("text"):
            self.add("text", title, text_anchor="middle", transform=f"translate(13 {(bottom + top) / 2}) rotate(-90)")

    def _ticks(self, settings: Trace, axis: _Axis, about: int) -> list[tuple[float, str]]:
        if settings.get("showticklabels") is False:
            return []
        if settings.get("tickmode") == "array":
            shown = zip(settings["tickvals"], settings["ticktext"], strict=True)
            return [tick for tick in shown if axis.low <= tick[0] <= axis.high]
        if axis.is_log:
            return [(axis.low * 1.3, f"{axis.low * 1.3:.3g}"), (axis.high / 1.3, f"{axis.high / 1.3:.3g}")]
        whole = settings.get("dtick")
        return [tick for tick in axis.ticks(about) if not whole or tick[0] == int(tick[0])]

    def _notes(self, layout: Trace) -> None:
        """Lines through the picture, and words in it: the peak's first, which are never left out."""
        for line in layout.get("shapes", ()):
            dash = {"dash": "6 4", "dot": "2 3"}[line["line"]["dash"]]
            way = (
                f"M{self.x.start} {self.y.at(line['y0'])}H{self.x.end}"
                if line.get("xref") == "paper"
                else f"M{self.x.at(line['x0'])} {self.y.start}V{self.y.end}"
            )
            self.add("path", d=way, class_="mark", stroke_dasharray=dash)
        for note in sorted(layout.get("annotations", ()), key=lambda note: not note["showarrow"]):
            anchor = {"left": "start", "right": "end"}.get(note.get("xanchor", ""), "middle")
            x = {0: self.x.start, 1: self.x.end}[note["x"]] if note.get("xref") == "paper" else self.x.at(note["x"])
            y = self.y.end if note.get("yref") == "paper" else self.y.at(note["y"])
            if note["showarrow"]:
                self.add("circle", cx=x, cy=y, r=4, class_="peak")
                self.words(x + note["ax"] / 3, y - 10, note["text"], anchor)
            else:
                _ = any(self.words(x, y - 5 + shift, note["text"], anchor) for shift in (0, 20, -_LINE))

    def _names(self, data: Sequence[Trace]) -> None:
        """The names of points, each where it is free, if it is free anywhere."""
        named = [trace for trace in data if trace["type"] == "scatter" and "text" in trace]
        points = [
            (x, y, text)
            for trace in reversed(named)
            for x, y, text in zip(trace["x"], trace["y"], trace["text"], strict=True)
        ]
        places = [(self.x.at(x), self.y.at(y), text) for x, y, text in points if _is_drawable(x) and _is_drawable(y)]
        self.taken += [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in places]
        lines = [box for trace in data if trace["type"] == "scatter" for box in self._along(trace)]
        for x, y, text in places:
            before, self.taken = self.taken, [*self.taken, *lines]
            is_written = self._name(x, y, text)
            self.taken = [*before, self.taken[-1]] if is_written else before
            if not is_written:
                self._name(x, y, text)  # a name on a line is better than none

    def _along(self, trace: Trace) -> Iterator[tuple[float, float, float, float]]:
        """Small boxes along the lines of a trace, close enough together that no name fits between them."""
        if "stackgroup" in trace or "lines" not in trace["mode"]:
            return
        points = [point for point in zip(trace["x"], trace["y"], strict=True) if all(map(_is_drawable, point))]
        known = [(self.x.at(x), self.y.at(y)) for x, y in points]
        for (x, y), (to_x, to_y) in itertools.pairwise(known):
            for part in range(_SAMPLES):
                at = x + (to_x - x) * part / _SAMPLES, y + (to_y - y) * part / _SAMPLES
                yield at[0] - 2, at[1] - 2, at[0] + 2, at[1] + 2

    def _name(self, x: float, y: float, text: str) -> bool:
        """Write the name of a point on the first side that is free; whether there was one."""
        wide = _length(text) * _LETTER
        for side, down in _SIDES:
            at = x + 10 * side
            is_inside = self.x.start < at - wide * (side < 0) and at + wide * (side > 0) < self.x.end
            if is_inside and self.words(at, y + down, text, {1: "start", -1: "end", 0: "middle"}[side]):
                return True
        return False


def _short(text: str, most: int) -> str:
    """A text of a figure without its markup, no longer than that."""
    plain = html.unescape(re.sub("</?b>", "", text))
    return html.escape(shorten(plain, max(most, 4)), quote=False)


def _length(text: str) -> int:
    return max(len(html.unescape(re.sub("</?b>", "", line))) for line in text.split("<br>"))


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _is_named(settings: Trace) -> bool:
    return settings.get("tickmode") == "array" and settings.get("type") != "log"


def _xs(trace: Trace) -> Iterator[float]:
    if trace["type"] == "heatmap":
        yield from (-0.5, max(map(len, trace["z"]), default=1) - 0.5)
    elif trace["type"] == "box":
        yield from (-0.5, len(trace["x"]) - 0.5)
    else:
        yield from trace["x"]
        if trace["type"] == "bar":
            yield 0.0


def _ys(trace: Trace) -> Iterator[float]:
    if trace["type"] in ("heatmap", "bar"):
        yield from (-0.5, len(trace.get("z", trace.get("y"))) - 0.5)  # type: ignore[arg-type]
    elif trace["type"] == "box":
        yield from (*trace["lowerfence"], *trace["upperfence"])
    else:
        yield from trace["y"]


def _stack(below: dict[int, float], trace: Trace) -> dict[int, float]:
    """Heights that the stacked areas so far have reached, by the number of the point."""
    if "stackgroup" not in trace:
        return below
    return {index: below.get(index, 0.0) + y for index, y in enumerate(trace["y"])}


def _hint(words: str) -> str:
    """What pointing at something tells."""
    return f"<title>{re.sub('</?b>|<extra></extra>', '', words).replace('<br>', chr(10))}</title>" if words else ""


def _scatter(picture: _Picture, trace: Trace, below: dict[int, float]) -> None:
    xs, colour = trace["x"], _colour(trace)
    if "stackgroup" in trace:
        tops = [below.get(index, 0.0) + y for index, y in enumerate(trace["y"])]
        there = _steps(picture, xs, tops)
        back = _steps(picture, xs, [below.get(index, 0.0) for index in range(len(xs))])
        ends = "L".join([*there, *reversed(back)])
        picture.add("path", d=f"M{ends}Z", fill=colour)
        return
    if "lines" in trace["mode"]:
        line = trace["line"]
        dash = {"dot": "2 4", "dash": "6 4"}.get(line.get("dash", ""), "")
        for is_drawn, run in itertools.groupby(zip(xs, trace["y"], strict=True), lambda p: all(map(_is_drawable, p))):
            if is_drawn:
                part = list(run)
                make = _steps if line.get("shape") == "hv" else _straight
                way = "L".join(make(picture, [x for x, _ in part], [y for _, y in part]))
                picture.add(
                    "path",
                    d=f"M{way}",
                    fill="none",
                    stroke=line["color"],
                    stroke_width=line["width"],
                    stroke_dasharray=dash,
                )
    if "markers" in trace["mode"]:
        _points(picture, trace, colour)


def _points(picture: _Picture, trace: Trace, colour: str) -> None:
    hints = trace.get("customdata") or [""] * len(trace["x"])
    bars = trace.get("error_y", {})
    for index, (x, y, words) in enumerate(zip(trace["x"], trace["y"], hints, strict=True)):
        if not (_is_drawable(x) and _is_drawable(y)):
            continue
        cx, cy = picture.x.at(x), picture.y.at(y)
        if bars and _is_drawable(bars["array"][index]) and _is_drawable(bars["arrayminus"][index]):
            top, low = picture.y.at(y + bars["array"][index]), picture.y.at(y - bars["arrayminus"][index])
            picture.add("path", d=f"M{cx} {top}V{low}", stroke=bars["color"], stroke_width=1.5)
        radius = trace.get("marker", {}).get("size", 6) / 2
        if trace.get("marker", {}).get("symbol") == "star":
            picture.add(
                "path",
                _hint(words),
                d=f"M{cx} {cy - radius}l{radius} {radius}l-{radius} {radius}l-{radius} -{radius}Z",
                fill=colour,
            )
        else:
            picture.add("circle", _hint(words), cx=cx, cy=cy, r=radius, fill=colour, class_=trace.get("class", ""))


def _straight(picture: _Picture, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    return [f"{picture.x.at(x)} {picture.y.at(y)}" for x, y in zip(xs, ys, strict=True)]


def _steps(picture: _Picture, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    """A line that keeps its height until the next point."""
    places = [f"{picture.x.at(x)} {picture.y.at(y)}" for x, y in zip(xs, ys, strict=True)]
    corners = [f"{picture.x.at(after)} {picture.y.at(y)}" for after, y in zip(xs[1:], ys, strict=False)]
    return [place for pair in itertools.zip_longest(places, corners) for place in pair if place]


def _heatmap(picture: _Picture, trace: Trace, _: object) -> None:
    """A cell for every decision, equal neighbours as one where there are too many."""
    colours = [colour for _, colour in trace["colorscale"][::2]]
    columns = max(map(len, trace["z"]), default=0)
    is_lettered = "text" in trace and columns * len(trace["z"]) <= _LETTERED_CELLS
    for row, codes in enumerate(trace["z"]):
        top, low = sorted((picture.y.at(row - 0.5), picture.y.at(row + 0.5)))
        column = 0
        for code, run in itertools.groupby(
            enumerate(codes), (lambda entry: entry) if is_lettered else (lambda entry: entry[1])
        ):
            count = len(list(run))
            left, right = picture.x.at(column - 0.5), picture.x.at(column + count - 0.5)
            found = code[1] if isinstance(code, tuple) else code
            if found is not None:
                words = trace["customdata"][row][column] if is_lettered and picture.name == "wide" else ""
                size = {"width": round(max(right - left - 1, 0.5), 1), "height": round(max(low - top - 1.5, 1), 1)}
                picture.add("rect", _hint(words), x=left, y=top, fill=colours[found], **size)
                if is_lettered and right - left >= _SMALLEST_CELL:
                    middle = {"x": round((left + right) / 2, 1), "y": round((top + low) / 2 + 4, 1)}
                    picture.add("text", trace["text"][row][column], text_anchor="middle", class_="letter", **middle)
            column += count


def _box(picture: _Picture, trace: Trace, _: object) -> None:
    boxes = [other for other in picture.figure["data"] if other["type"] == "box"]
    place = next(index for index, other in enumerate(boxes) if other is trace)
    names = ("lowerfence", "q1", "median", "q3", "upperfence")
    for index, numbers in enumerate(zip(*(trace[name] for name in names), strict=True)):
        if not all(_is_drawable(number) and number > 0 for number in numbers):
            continue
        low, first, median, third, high = map(picture.y.at, numbers)
        left, right = (picture.x.at(index - 0.4 + 0.8 * (place + shift) / len(boxes)) for shift in (0.05, 0.95))
        middle, line = (left + right) / 2, trace["line"]["color"]
        picture.add("path", d=f"M{middle} {low}V{first}M{middle} {third}V{high}", stroke=line)
        picture.add(
            "rect",
            x=left,
            y=third,
            width=round(right - left, 1),
            height=round(first - third, 1),
            fill=trace["fillcolor"],
            stroke=line,
        )
        picture.add("path", d=f"M{left} {median}H{right}", stroke=line, stroke_width=2)


def _bar(picture: _Picture, trace: Trace, _: object) -> None:
    zero, spreads = picture.x.at(0.0), trace.get("error_x", {}).get("array")
    for index, seconds in enumerate(trace["x"]):
        if not _is_drawable(seconds):
            continue
        end, top, low = picture.x.at(seconds), *sorted((picture.y.at(index - 0.35), picture.y.at(index + 0.35)))
        size = {"width": round(abs(end - zero), 1), "height": round(low - top, 1)}
        picture.add(
            "rect",
            _hint(trace["customdata"][index]),
            x=min(zero, end),
            y=top,
            fill=trace["marker"]["color"][index],
            **size,
        )
        if spreads and _is_drawable(spreads[index]):
            ends = picture.x.at(seconds - spreads[index]), picture.x.at(seconds + spreads[index])
            picture.add("path", d=f"M{ends[0]} {(top + low) / 2}H{ends[1]}", class_="mark")
    picture.add("path", d=f"M{zero} {picture.y.start}V{picture.y.end}", class_="axis")


_DRAW: dict[str, Callable[[_Picture, Trace, dict[int, float]], None]] = {
    "scatter": _scatter,
    "heatmap": _heatmap,
    "box": _box,
    "bar": _bar,
}
