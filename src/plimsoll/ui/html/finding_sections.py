"""A diagnosis' finding in, its parts of a page out: where the overhead goes, phases, signs, layers."""

from __future__ import annotations

from typing import Any

from plimsoll.artifacts.finding import Finding, OverheadPart
from plimsoll.artifacts.finding_summary import (
    LAYERS_HEADER,
    PARTS_HEADER,
    PHASES_HEADER,
    advice_lines,
    finding_figures,
    layer_rows,
    layers_title,
    notable_parts,
    part_rows,
    phase_rows,
    sign_rows,
)
from plimsoll.ui.html.colours import GREEN, ORANGE
from plimsoll.ui.html.content import (
    Chart,
    Check,
    Checks,
    Element,
    Figures,
    Fold,
    Paragraph,
    Section,
    Statement,
    Table,
    Tone,
)
from plimsoll.ui.html.figure import figure
from plimsoll.ui.html.labels import escape, sentence
from plimsoll.units import format_seconds, format_share

_TONES = {"RAISED": Tone.BAD, "ok": Tone.GOOD}
_BAR_PIXELS = 34


def finding_statement(finding: Finding) -> Statement:
    """The overhead and what most of it is."""
    text = f"Under the profiler a step with the plan takes {_more(finding.overhead_share)} time"
    text += f" ({format_seconds(finding.overhead_seconds)})"
    if finding.measured_overhead_share is not None:
        text += f", without it {_more(finding.measured_overhead_share)}"
    text += "."
    largest = max(notable_parts(finding), key=lambda part: part.seconds, default=None)
    if largest is not None and largest.seconds > 0:
        text += f" The largest part is {largest.cause}: {largest.cause.meaning}."
    return Statement(Tone.NEUTRAL, "Diagnosis", format_share(finding.overhead_share), text)


def _more(share: float) -> str:
    return f"{abs(share):.1%} {'more' if share >= 0 else 'less'}"


def finding_section(finding: Finding, name: str, title: str) -> Section:
    """Everything that two profiles tell; ``name`` is the chart's."""
    elements: list[Element] = [Figures(finding_figures(finding))]
    if notable_parts(finding):
        elements.append(_draw_parts(notable_parts(finding), name))
    elements.append(Table(PARTS_HEADER, tuple(part_rows(finding)), (1, 2), "Where the overhead goes"))
    elements += [Paragraph(sentence(line)) for line in advice_lines(finding)]
    elements.append(Table(PHASES_HEADER, tuple(phase_rows(finding)), (1, 2, 3, 4), "Busy time by phase"))
    if finding.signs:
        signs = (Check(_TONES.get(word, Tone.NEUTRAL), word, sign, text) for sign, word, text in sign_rows(finding))
        elements.append(Checks(tuple(signs)))
    layers = Table(LAYERS_HEADER, tuple(layer_rows(finding)), (1, 2, 3, 4, 5))
    elements.append(Fold(layers_title(finding), (layers,)))
    return Section(title, tuple(elements))


def _draw_parts(parts: list[OverheadPart], name: str) -> Chart:
    """A bar for every part; what the plan saves goes to the left."""
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(parts))),
        "x": [round(part.seconds * 1e3, 6) for part in parts],
        "marker": {"color": [ORANGE if part.seconds >= 0 else GREEN for part in parts]},
        "customdata": [_words(part) for part in parts],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    if any(part.spread_seconds is not None for part in parts):
        spreads = [round((part.spread_seconds or 0.0) * 1e3, 6) for part in parts]
        trace["error_x"] = {"type": "data", "array": spreads, "thickness": 1.2, "width": 4, "color": "#8a9099"}
    names = [escape(part.cause) for part in parts]
    chart = figure(
        [trace],
        x={"title": {"text": "more time a step, ms"}, "zeroline": True},
        y={
            "tickmode": "array",
            "tickvals": list(range(len(parts))),
            "ticktext": names,
            "autorange": "reversed",
            "showgrid": False,
        },
        height=100 + _BAR_PIXELS * len(parts),
        showlegend=False,
    )
    return Chart(name, chart, "What the extra time of a step is made of.")


def _words(part: OverheadPart) -> str:
    lines = [f"<b>{escape(part.cause)}</b> {format_seconds(part.seconds)}", escape(part.cause.meaning)]
    return "<br>".join([*lines, *map(escape, part.details)])
