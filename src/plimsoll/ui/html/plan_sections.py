"""A plan in, its parts of a page out: what it comes to, memory over the step, the map, every decision with its reason."""

from __future__ import annotations

from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.explanation import describe_reason
from plimsoll.artifacts.grouping import RegionGroup, group_regions
from plimsoll.artifacts.holder_summary import holder_rows
from plimsoll.artifacts.plan import Peak, Plan
from plimsoll.artifacts.summary import class_rows, decision_row, plan_figures
from plimsoll.ui.html.content import Element, Figures, Fold, Paragraph, Section, Statement, Table, Tone
from plimsoll.ui.html.map_chart import NAMED_COLUMNS, decision_key, draw_map, saved_values
from plimsoll.ui.html.memory_chart import draw_memory, drawn_budget
from plimsoll.units import format_bytes, format_seconds, format_share

_VALUE_HEADER = ("decision", "value", "bytes", "held as", "held bytes", "seconds a step", "why")


def plan_statement(plan: Plan) -> Statement:
    """What the plan promises, in sentences."""
    if not plan.status.is_usable:
        return Statement(Tone.BAD, "Plan", plan.status, plan.status.advice)
    limit = "without a budget" if plan.budget_bytes is None else f"under a budget of {format_bytes(plan.budget_bytes)}"
    more = "more" if plan.predicted_overhead >= 0 else "less"
    text = (
        f"The plan {plan.strategy!r}, made {limit}, is predicted to peak at {format_bytes(plan.predicted_peak_bytes)} "
        f"instead of {format_bytes(plan.baseline_peak_bytes)}, for {abs(plan.predicted_overhead):.1%} {more} time a step. "
    )
    if plan.status is Status.OPTIMAL:
        text += "No plan of this engine is cheaper, at these costs."
    else:
        text += f"At these costs no plan of this engine is faster by more than {plan.gap_of_step:.2%} of the step."
    return Statement(Tone.GOOD, "Plan", plan.status, text)


def memory_section(plan: Plan, name: str, title: str) -> Section:
    """Memory over the step, and who holds it at its peak; ``name`` is the chart's."""
    elements: list[Element] = []
    if plan.timeline:
        elements.append(draw_memory(plan, name))
        elements.append(Paragraph(_caption(plan)))
    elements.append(Table(("category", "bytes", "share"), _rows(class_rows(plan)), (1, 2), "By category at the peak"))
    for caption, peak in (("with this plan", plan.peak), ("without a plan", plan.baseline_peak)):
        elements.append(_holders(plan, peak, caption))
    return Section(title, tuple(elements))


def map_section(plan: Plan, name: str, title: str) -> Section:
    """The grid of decisions."""
    words = (
        "Each row is a block of the model, each column a value that autograd saves in it for backward. The table of "
        "decisions below says the same in words."
    )
    if len(saved_values(plan)) > NAMED_COLUMNS:
        words += " There are too many columns to name: point at one, or read the table."
    return Section(title, (Paragraph(words), decision_key(plan), draw_map(plan, name)))


def decisions_section(plan: Plan, title: str) -> Section:
    """The figures, then every decision; regions that share all of them stand together."""
    folds = tuple(_group(group) for group in group_regions(plan.regions))
    prices = {region.price_seconds_per_byte for region in plan.regions} - {None}
    words = "Seconds are those of one region and one step."
    if len(prices) > 1:
        words += " An early region holds its values longer than a late one, so each has a price of memory of its own."
    return Section(title, (Figures(plan_figures(plan)), Paragraph(words), *folds))


def frontier_table(plan: Plan) -> Table:
    """What other budgets would cost."""
    rows = tuple(
        (
            format_bytes(point.peak_bytes),
            format_seconds(point.step_seconds),
            format_share(point.step_seconds / plan.baseline_seconds - 1) if plan.baseline_seconds else "–",
        )
        for point in plan.frontier
    )
    return Table(("peak", "step", "over the unmanaged step"), rows, (0, 1, 2), "What the planner can do, predicted")


def _caption(plan: Plan) -> str:
    hidden = plan.budget_bytes is not None and drawn_budget(plan.budget_bytes, plan.peak.bytes) is None
    above = f" The budget, {format_bytes(plan.budget_bytes or 0)}, lies above the chart." if hidden else ""
    return (
        "Simulated: what is alive while each operation of the step runs, in the order of execution. Rebuilt values and "
        f"compressed ones count as activations, workspaces as temporary.{above}"
    )


def _holders(plan: Plan, peak: Peak, words: str) -> Table:
    caption = f"Who holds the peak {words}: {format_bytes(peak.bytes)}, {peak.moment}"
    return Table(("holder", "bytes"), _rows(holder_rows(plan, peak)), (1,), caption)


def _group(group: RegionGroup) -> Fold:
    label, decision, held, replay = decision_row(group)
    rows = tuple(
        (
            str(entry.decision),
            entry.value,
            format_bytes(entry.bytes),
            entry.form or "–",
            format_bytes(entry.held_bytes) if entry.is_packed else "–",
            format_seconds(entry.seconds) if entry.seconds else "–",
            describe_reason(entry),
        )
        for entry in group.first.decisions
    )
    count = len(group.regions)
    each = (Paragraph(f"{count} regions alike; the figures in the table are those of one."),) if count > 1 else ()
    return Fold(f"{label}: {decision}, {held}, {replay}", (*each, Table(_VALUE_HEADER, rows, (2, 4, 5))))


def _rows(rows: list[list[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row) for row in rows)
