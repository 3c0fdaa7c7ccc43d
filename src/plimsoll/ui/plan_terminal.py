"""A plan in, its picture for a terminal out: figures, bars per memory class, decisions, the memory of the step."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.grouping import group_regions
from plimsoll.artifacts.holder_summary import holder_rows
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.summary import decision_row, plan_figures
from plimsoll.ui.timeline import Timeline, draw_bar
from plimsoll.units import format_bytes

_STATUS_STYLE = {
    Status.OPTIMAL: "bold green",
    Status.FEASIBLE: "bold green",
    Status.INFEASIBLE: "bold red",
    Status.TIMED_OUT: "bold yellow",
}


def render_plan(plan: Plan) -> RenderableType:
    """Everything that a plan says about itself."""
    title = Text.assemble(
        ("Plan ", "bold"),
        (plan.strategy, "bold cyan"),
        f" for {plan.model} on {plan.device}: ",
        (str(plan.status), _STATUS_STYLE[plan.status]),
    )
    parts: list[RenderableType] = [
        title,
        Padding(Text(plan.status.advice, style="dim"), (0, 2)),
        Text(),
        render_figures(plan_figures(plan)),
        Text(),
        render_classes(plan),
        Text(f"\nWho holds it ({plan.peak.moment})", style="bold"),
        render_holders(plan),
    ]
    if plan.regions:
        parts += [Text(), render_decisions(plan)]
    if plan.timeline:
        parts += [Text(), Text("Memory over the step", style="bold")]
        parts.append(Timeline(plan.timeline, plan.budget_bytes))
    parts += [Text(f"\nNote: {note}") for note in plan.notes]
    return Group(*parts)


def render_figures(figures: tuple[tuple[str, str], ...]) -> Table:
    """Pairs of name and text as two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, text in figures:
        table.add_row(Text(f"  {name}"), Text(text))
    return table


def render_classes(plan: Plan) -> Table:
    """What each memory class holds at the peak, as bars."""
    table = Table(title="At the peak", title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_column(justify="right")
    total = sum(plan.classes.values())
    for name, bytes_ in sorted(plan.classes.items(), key=lambda item: -item[1]):
        if bytes_:
            bar = Text(draw_bar(bytes_ / total), style="cyan")
            table.add_row(Text(f" {name}"), format_bytes(bytes_), bar, f"{bytes_ / total:.0%}")
    return table


def render_holders(plan: Plan) -> Table:
    """Who holds the memory at the moment of the peak."""
    table = Table(box=None, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for label, size in holder_rows(plan, plan.peak):
        table.add_row(Text(f" {label}"), size)
    return table


def render_decisions(plan: Plan) -> Table:
    """One row per group of identical regions."""
    table = Table(title="Decisions", title_justify="left", title_style="bold", box=None, header_style="dim")
    for column in (" regions", "decision", "held until backward", "replay"):
        table.add_column(column, overflow="fold")
    for group in group_regions(plan.regions):
        label, decision, held, replay = decision_row(group)
        style = "" if group.first.is_untouched else "cyan"
        held = held.removeprefix("holds ")
        table.add_row(Text(f" {label}"), Text(decision, style=style), held, replay.removeprefix("replay "))
    return table
