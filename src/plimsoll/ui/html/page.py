"""Artifacts of one model in, the page's content out: what it comes to first, then pictures, tables, and the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.artifacts.advice import Advice
from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.comparison_summary import comparison_notes
from plimsoll.artifacts.finding import Finding
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.store import Reportable
from plimsoll.artifacts.verdict import Verdict
from plimsoll.ui.html.advice_sections import advice_section, advice_statement, checklist_section
from plimsoll.ui.html.comparison_sections import comparison_statement, comparison_table
from plimsoll.ui.html.content import Element, Figures, Page, Paragraph, Section, Statement
from plimsoll.ui.html.finding_sections import finding_section, finding_statement
from plimsoll.ui.html.frontier_chart import draw_frontier
from plimsoll.ui.html.identity import Subject
from plimsoll.ui.html.plan_sections import (
    decisions_section,
    frontier_table,
    map_section,
    memory_section,
    plan_statement,
)
from plimsoll.ui.html.receipt_sections import receipt_section, receipt_statement
from plimsoll.ui.html.verdict_sections import verdict_section, verdict_statement
from plimsoll.units import format_bytes


@dataclass(frozen=True, slots=True)
class _Given:
    """The artifacts of a page by kind."""

    plans: tuple[Plan, ...]
    receipts: tuple[Receipt, ...]
    comparisons: tuple[Comparison, ...]
    verdicts: tuple[Verdict, ...]
    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...]


def compose_page(artifacts: Sequence[Reportable], subject: Subject) -> Page:
    """Everything that the artifacts hold, in the order in which people ask for it."""
    given = _Given(
        plans=tuple(artifact for artifact in artifacts if isinstance(artifact, Plan)),
        receipts=tuple(artifact for artifact in artifacts if isinstance(artifact, Receipt)),
        comparisons=tuple(artifact for artifact in artifacts if isinstance(artifact, Comparison)),
        verdicts=tuple(artifact for artifact in artifacts if isinstance(artifact, Verdict)),
        findings=tuple(artifact for artifact in artifacts if isinstance(artifact, Finding)),
        advice=tuple(artifact for artifact in artifacts if isinstance(artifact, Advice)),
    )
    statements = tuple(_statement(artifact) for artifact in artifacts)
    sections = [*_pictures(given), *_evidence(given), *_details(given), *_remarks(artifacts), _machine(artifacts)]
    return Page(subject.model or "A model without a name", _facts(artifacts, subject), statements, tuple(sections))


def _statement(artifact: Reportable) -> Statement:
    if isinstance(artifact, Plan):
        return plan_statement(artifact)
    if isinstance(artifact, Receipt):
        return receipt_statement(artifact)
    if isinstance(artifact, Comparison):
        return comparison_statement(artifact)
    if isinstance(artifact, Verdict):
        return verdict_statement(artifact)
    if isinstance(artifact, Finding):
        return finding_statement(artifact)
    return advice_statement(artifact)


def _pictures(given: _Given) -> list[Section]:
    """Memory, decisions, time against memory."""
    sections = []
    for index, plan in enumerate(given.plans):
        sections.append(memory_section(plan, f"memory-{index}", _titled("Memory over the step", index, given.plans)))
    for index, plan in enumerate(given.plans):
        if plan.regions:
            title = _titled("What happens to each value", index, given.plans)
            sections.append(map_section(plan, f"map-{index}", title))
    return [*sections, *_frontier(given.plans, given.comparisons)]


def _evidence(given: _Given) -> list[Section]:
    """What was measured and checked."""
    sections = []
    for index, receipt in enumerate(given.receipts):
        title = _titled("Measured beside the unmanaged step", index, given.receipts)
        sections.append(receipt_section(receipt, f"receipt-{index}", title))
    for index, verdict in enumerate(given.verdicts):
        title = _numbered("Training with and without the plan", index, given.verdicts)
        sections.append(verdict_section(verdict, f"probe-{index}", title))
    for index, finding in enumerate(given.findings):
        title = _numbered("Where the overhead goes", index, given.findings)
        sections.append(finding_section(finding, f"overhead-{index}", title))
    for index, advice in enumerate(given.advice):
        sections.append(advice_section(advice, _numbered("What to do", index, given.advice)))
        sections.append(checklist_section(advice, _numbered("Checklist", index, given.advice)))
    return sections


def _details(given: _Given) -> list[Section]:
    return [decisions_section(plan, _titled("Decisions", index, given.plans)) for index, plan in enumerate(given.plans)]


def _titled(title: str, index: int, all_: Sequence[Plan] | Sequence[Receipt]) -> str:
    """The title, with the plan's name and budget where there are several."""
    if len(all_) == 1:
        return title
    budget_bytes = all_[index].budget_bytes
    limit = "no budget" if budget_bytes is None else format_bytes(budget_bytes)
    return f"{_numbered(title, index, all_)} ({all_[index].strategy}, {limit})"


def _numbered(title: str, index: int, all_: Sequence[object]) -> str:
    return title if len(all_) == 1 else f"{title}, {index + 1} of {len(all_)}"


def _facts(artifacts: Sequence[Reportable], subject: Subject) -> tuple[tuple[str, str], ...]:
    """What the page is about: device, budget, batch, fingerprint."""
    devices = ", ".join(dict.fromkeys(artifact.device for artifact in artifacts if artifact.device))
    budgets = [
        a.budget_bytes for a in artifacts if isinstance(a, Plan | Receipt | Advice) and a.budget_bytes is not None
    ]
    rows = [("device", devices)] if devices else []
    if budgets:
        rows.append(("budget", ", ".join(dict.fromkeys(format_bytes(budget) for budget in budgets))))
    if subject.signature:
        rows.append(("batch", subject.signature))
    if subject.fingerprint:
        rows.append(("model's fingerprint", subject.fingerprint))
    return tuple(rows)


def _frontier(plans: Sequence[Plan], comparisons: Sequence[Comparison]) -> list[Section]:
    """Time against peak, where there is more than one point to draw."""
    curves = [plan for plan in plans if len(plan.frontier) > 1]
    if not curves and not comparisons:
        return []
    elements: list[Element] = [
        Paragraph(
            "Lower and further left is better. Step time is given as a multiple of the unmanaged step's; measured points "
            "carry the interval of their paired median."
        ),
        draw_frontier(plans, comparisons, "frontier"),
        *(comparison_table(comparison) for comparison in comparisons),
        *(frontier_table(plan) for plan in curves),
    ]
    return [Section("Time against memory", tuple(elements))]


def _remarks(artifacts: Sequence[Reportable]) -> list[Section]:
    notes = [note for artifact in artifacts for note in _notes(artifact)]
    return [Section("Notes", tuple(Paragraph(note) for note in dict.fromkeys(notes)))] if notes else []


def _notes(artifact: Reportable) -> Sequence[str]:
    return comparison_notes(artifact) if isinstance(artifact, Comparison) else artifact.notes


def _machine(artifacts: Sequence[Reportable]) -> Section:
    """Where the figures come from."""
    rows: dict[str, str] = {}
    for artifact in artifacts:
        if isinstance(artifact, Plan):
            rows["costs"] = f"{artifact.cost_source} on {artifact.cost_device}"
        else:
            rows |= artifact.versions
    rows |= {f"device of the {artifact.KIND}": artifact.device for artifact in artifacts if artifact.device}
    return Section("Machine and versions", (Figures(tuple(rows.items())),))
