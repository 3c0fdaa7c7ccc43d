"""A finding in, its parts of a page out: what the overhead is made of, phases, thresholds, layers, and what to do."""

from __future__ import annotations

from plimsoll.artifacts.finding import Finding
from plimsoll.artifacts.finding_summary import (
    LAYERS_HEADER,
    PARTS_HEADER,
    PHASES_HEADER,
    advice_lines,
    finding_figures,
    finding_title,
    layer_rows,
    layers_title,
    part_rows,
    phase_rows,
    sign_rows,
)
from plimsoll.reports.html.content import (
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

_TONES = {True: Tone.BAD, False: Tone.GOOD, None: Tone.NEUTRAL}


def finding_statement(finding: Finding) -> Statement:
    """What the overhead comes to, in one line."""
    largest = max(finding.parts, key=lambda part: part.seconds)
    what = f"{finding_title(finding)}. The largest part is {largest.cause}."
    return Statement(Tone.NEUTRAL, "Diagnosis", largest.cause, what)


def finding_section(finding: Finding, title: str) -> Section:
    """Where the time goes."""
    elements: list[Element] = [
        Figures(finding_figures(finding)),
        Table(PARTS_HEADER, tuple(part_rows(finding)), (1, 2)),
        *(Paragraph(line) for line in advice_lines(finding)),
        Checks(tuple(_checks(finding))),
        Table(PHASES_HEADER, tuple(phase_rows(finding)), (1, 2, 3, 4), "Busy time by phase"),
        Fold(layers_title(finding), (Table(LAYERS_HEADER, tuple(layer_rows(finding)), (1, 2, 3, 4, 5)),)),
    ]
    return Section(title, tuple(elements))


def _checks(finding: Finding) -> list[Check]:
    rows = sign_rows(finding)
    return [
        Check(_TONES[sign.is_raised], word, name, text)
        for sign, (name, word, text) in zip(finding.signs, rows, strict=True)
    ]
