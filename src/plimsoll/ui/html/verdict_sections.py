"""A probe's verdict in, its parts of a page out: the ruling, its rules, both runs side by side, losses and gradient norms."""

from __future__ import annotations

from plimsoll.artifacts.verdict import Ruling, Verdict
from plimsoll.artifacts.verdict_summary import (
    ARM_HEADER,
    GRADIENT_HEADER,
    NORM_HEADER,
    RULE_HEADER,
    arm_rows,
    describe_run,
    gradient_cells,
    norm_cells,
    rule_cells,
)
from plimsoll.ui.html.content import Element, Fold, Paragraph, Section, Statement, Table, Tone
from plimsoll.ui.html.curve_chart import draw_curves
from plimsoll.ui.html.labels import sentence
from plimsoll.ui.html.norm_chart import draw_norms


def verdict_statement(verdict: Verdict) -> Statement:
    """The ruling, and why."""
    if verdict.ruling.is_pass:
        tone = Tone.GOOD
    else:
        tone = Tone.NEUTRAL if verdict.ruling is Ruling.UNDECIDED else Tone.BAD
    return Statement(tone, "Probe", verdict.ruling, f"{verdict.ruling.advice} {sentence(verdict.reason)}")


def verdict_section(verdict: Verdict, name: str, title: str) -> Section:
    """Everything that the probe found; ``name`` begins the names of its charts."""
    curves = verdict.curves
    elements: list[Element] = [Paragraph(describe_run(verdict))]
    elements += [Paragraph(f"Missing: {missing}") for missing in verdict.missing]
    elements.append(_table(RULE_HEADER, [rule_cells(rule) for rule in verdict.rules], caption="Rules"))
    elements.append(_table(ARM_HEADER, arm_rows(verdict), (1, 2), "Both runs"))
    if curves.baseline_losses:
        elements.append(draw_curves(f"{name}-losses", "loss", curves.baseline_losses, curves.plan_losses))
    if curves.baseline_norms:
        title_of_norms = "norm of the whole gradient"
        elements.append(draw_curves(f"{name}-norms", title_of_norms, curves.baseline_norms, curves.plan_norms))
    if verdict.comparisons:
        elements.append(draw_norms(verdict.comparisons, f"{name}-boxes"))
        elements.append(
            Paragraph(
                "A box spans the middle half of the steps, its line is the median, whiskers reach from 5% to 95%."
            )
        )
        rows = [norm_cells(entry) for entry in verdict.comparisons]
        elements.append(Fold("Gradient norms as numbers", (_table(NORM_HEADER, rows, (1, 2, 3, 4)),)))
    if verdict.gradients:
        rows = [gradient_cells(entry) for entry in verdict.gradients]
        elements.append(Fold("Gradients at equal parameters", (_table(GRADIENT_HEADER, rows, (1, 2)),)))
    return Section(title, tuple(elements))


def _table(header: tuple[str, ...], rows: list[list[str]], numbers: tuple[int, ...] = (), caption: str = "") -> Table:
    return Table(header, tuple(tuple(row) for row in rows), numbers, caption)
