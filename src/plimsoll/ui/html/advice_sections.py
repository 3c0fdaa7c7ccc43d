"""Advice in, its parts of a page out: what to do, where the memory is, the plans that were made, the checklist."""

from __future__ import annotations

from plimsoll.artifacts.advice import Advice, CheckItem, CheckOutcome, FailureMode, FailureSign, Kind
from plimsoll.artifacts.advice_summary import (
    CANDIDATE_HEADER,
    LAYER_HEADER,
    candidate_cells,
    compiler_lines,
    hazard_lines,
    layer_rows,
    part_rows,
)
from plimsoll.ui.html.content import Check, Checks, Element, Fold, Paragraph, Section, Statement, Table, Tone
from plimsoll.ui.html.labels import sentence

_TONES = {
    CheckOutcome.PASS: Tone.GOOD,
    CheckOutcome.FAIL: Tone.BAD,
    CheckOutcome.NOT_CHECKED: Tone.NEUTRAL,
    FailureSign.FOUND: Tone.BAD,
    FailureSign.NOT_FOUND: Tone.GOOD,
}


def advice_statement(advice: Advice) -> Statement:
    """What to do, in one line."""
    tone = {Kind.DOES_NOT_FIT: Tone.BAD, Kind.LOOK_ELSEWHERE: Tone.NEUTRAL}.get(advice.recommendation.kind, Tone.GOOD)
    passed = sum(item.outcome is CheckOutcome.PASS for item in advice.checklist)
    checks = f"{passed} of {len(advice.checklist)} items of the checklist pass."
    text = f"{sentence(advice.recommendation.headline)} {checks}"
    return Statement(tone, "Advice", advice.recommendation.kind, text)


def advice_section(advice: Advice, title: str) -> Section:
    """Why, with the numbers that decided it."""
    recommendation, bottleneck = advice.recommendation, advice.bottleneck
    reasons = dict.fromkeys([*recommendation.reasons, bottleneck.summary])
    elements: list[Element] = [Paragraph(sentence(reason)) for reason in reasons]
    if recommendation.command:
        elements.append(Paragraph(f"Command: {recommendation.command}"))
    parts = ("at the unmanaged peak", "bytes", "share", "held mostly by")
    elements.append(_table(parts, part_rows(advice), (1, 2)))
    elements += [Paragraph(sentence(remedy)) for remedy in bottleneck.remedies]
    candidates = [[cell.strip() for cell in candidate_cells(candidate)] for candidate in advice.candidates]
    elements.append(_table(CANDIDATE_HEADER, candidates, (1, 2, 3), "Plans that were made, predicted"))
    layers = _table(LAYER_HEADER, layer_rows(advice.layers), (1, 2, 3, 4))
    elements.append(Fold("Layers: what autograd saves in each", (layers,)))
    elements.append(Fold("torch.compile", tuple(Paragraph(line) for line in compiler_lines(advice.compiler))))
    elements.append(Fold("CUDA graphs", tuple(Paragraph(line) for line in hazard_lines(advice) if line)))
    return Section(title, tuple(elements))


def checklist_section(advice: Advice, title: str) -> Section:
    """What was checked, and which failure modes show."""
    items = Checks(tuple(_check(item.outcome, item) for item in advice.checklist))
    modes = Checks(tuple(_check(mode.sign, mode) for mode in advice.failure_modes))
    return Section(title, (items, Fold("Failure modes", (modes,))))


def _check(word: CheckOutcome | FailureSign, entry: CheckItem | FailureMode) -> Check:
    return Check(_TONES.get(word, Tone.NEUTRAL), word, entry.title, entry.evidence, entry.next)


def _table(header: tuple[str, ...], rows: list[list[str]], numbers: tuple[int, ...] = (), caption: str = "") -> Table:
    return Table(header, tuple(tuple(row) for row in rows), numbers, caption)
