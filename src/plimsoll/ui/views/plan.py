"""Makes the document (the content to show) of a plan: figures, memory over the step and its holders, and each decision with its
reason.

A region is a module that the plan decides about. A holder is a module, parameter or tensor that owns memory at the moment of
the peak.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.naming import compress_names, kind_of, name_call, plain_name, region_in_label, with_rest
from plimsoll.artifacts.other_budgets import HEADER, TITLE, OtherBudgets
from plimsoll.artifacts.plan import Holder, Peak, Plan, RegionPlan, ValueDecision
from plimsoll.ui.document import (
    UNKNOWN,
    DecisionMap,
    Document,
    Element,
    Fold,
    FrontierChart,
    MemoryChart,
    NamedFigures,
    Paragraph,
    Place,
    Section,
    Table,
    Tone,
    format_budget,
    name_budget,
    subject_of,
    table_of_known,
)
from plimsoll.units import GIB, MIB, format_bytes, format_bytes_up, format_more, format_seconds, format_share

_TONES = {Status.INFEASIBLE: Tone.BAD, Status.TIMED_OUT: Tone.NEUTRAL}
_HOLDERS_SHOWN = 5
_OUTPUT = re.compile(r"#\d+(\.\d+)?$")
"""Matches the end of a label such as ``mm#3.1``: the number of the op's call, and the number of the call's output."""
_REBUILT = " rebuilt "
"""The word between a region and a value in the label of a tensor that backward has rebuilt."""


def view_plan(plan: Plan) -> Document:
    """Make the document (the content to show) of a plan: status, figures, memory and decisions.

    Reasons and the costs of other budgets are details.
    """
    sections = [
        Section("Figures", [NamedFigures(plan_figures(plan))], Place.DETAIL),
        Section("Memory over the step", _memory(plan), Place.PICTURE),
        Section("Time against memory", _frontier(plan), Place.PICTURE),
    ]
    if plan.regions:
        sections += [
            Section("What happens to each value", [DecisionMap(plan.regions)], Place.PICTURE),
            Section("Decisions", [decisions_table(plan), *map(_values, group_regions(plan.regions))], Place.DETAIL),
        ]
    return Document(
        source="Plan",
        subject=f"{plan.strategy!r} for {plan.model} on {plan.device}",
        word=plan.status,
        tone=_TONES.get(plan.status, Tone.GOOD),
        about=subject_of(
            plan,
            label=f"{plan.strategy}, {format_budget(plan.budget_bytes, 'no budget')}",
            origins={"costs": f"{plan.cost_source} on {plan.cost_device}"},
        ),
        lines=_lines(plan),
        statement=_statement(plan),
        sections=sections,
        notes=plan.notes,
    )


def _lines(plan: Plan) -> list[str]:
    if not plan.status.is_usable:
        return [plan.status.advice]
    advice = [plan.status.advice] if _has_bound(plan) else []  # it speaks of the bound
    return [*plan.limits, _lead(plan), *advice]


def _lead(plan: Plan) -> str:
    """Return one line with peak, budget and cost, which renderers show right below the headline."""
    return (
        f"Peak {format_bytes(plan.predicted_peak_bytes)}, {name_budget(plan.budget_bytes)}, "
        f"{format_bytes(plan.baseline_peak_bytes)} without a plan; "
        f"cost {format_more(plan.predicted_overhead)} time a step."
    )


def _statement(plan: Plan) -> str:
    if not plan.status.is_usable:
        return plan.status.advice
    limit = "without a budget" if plan.budget_bytes is None else f"under a budget of {format_bytes(plan.budget_bytes)}"
    text = (
        f"The plan {plan.strategy!r}, made {limit}, is predicted to peak at {format_bytes(plan.predicted_peak_bytes)} "
        f"instead of {format_bytes(plan.baseline_peak_bytes)}, for {format_more(plan.predicted_overhead)} time a step. "
    )
    decided = (
        ("tiles", plan.tiles),
        ("offloaded state", plan.state is not None),
        ("order of steps", plan.backward_steps is not None),
    )
    fixed = [name for name, has in decided if has]
    beside = f" with {'these' if plan.tiles else 'this'} {' and '.join(fixed)}" if fixed else ""
    if not _has_bound(plan):
        return text.strip()
    if plan.status is Status.OPTIMAL:
        return text + f"With these costs, no other plan of this engine{beside} is faster."
    return (
        text
        + f"With these costs, no plan of this engine{beside} is faster by more than {plan.gap_of_step:.2%} of the step."
    )


def plan_figures(plan: Plan) -> list[tuple[str, str]]:
    """Return the plan's figures (budget, peak, time and others) as pairs of name and text."""
    share = plan.predicted_peak_bytes / plan.baseline_peak_bytes if plan.baseline_peak_bytes else 1.0
    solved = f"; solved in {format_seconds(plan.solve_seconds)}" if plan.solve_seconds else ""
    return [
        ("budget", f"{format_budget(plan.budget_bytes)} (floor {format_bytes_up(plan.floor_bytes)})"),
        (
            "predicted peak",
            f"{format_bytes(plan.predicted_peak_bytes)}, {share:.0%} of the unmanaged "
            f"{format_bytes(plan.baseline_peak_bytes)}",
        ),
        (
            "predicted step",
            f"{format_seconds(plan.predicted_seconds)}, {format_share(plan.predicted_overhead)} over the unmanaged "
            f"{format_seconds(plan.baseline_seconds)}",
        ),
        *_bound_figures(plan),
        *_tiles(plan),
        *_state(plan),
        *_backward_steps(plan),
        *_packing_figures(plan),
        ("costs", f"{plan.cost_source} on {plan.cost_device}{solved}"),
    ]


def _has_bound(plan: Plan) -> bool:
    """Return whether the plan has a lower bound and a price of memory.

    A plan that `attach` derives for the loop's own step has neither.
    """
    return plan.lower_bound_seconds > 0


def _bound_figures(plan: Plan) -> list[tuple[str, str]]:
    if not _has_bound(plan):
        return []
    gap = f"the gap is {plan.gap_of_step:.2%} of the step, {plan.gap_of_overhead:.1%} of the overhead"
    return [
        ("lower bound", f"{format_seconds(plan.lower_bound_seconds)}: {gap}"),
        ("price of memory", _price(plan)),
    ]


def _price(plan: Plan) -> str:
    """Return a text with the price of memory, which is the time per step that more budget would save: the seconds for one more
    MiB, and the seconds for one more GiB, or for keeping everything if that takes less than a GiB.
    """
    if plan.price_seconds_per_byte <= 0:
        return "nothing: more memory would not make this step faster"
    price = f"{format_seconds(plan.price_seconds_per_byte * MIB)} per MiB"
    if plan.strategy != "auto":
        return f"{price} for strategy auto at this peak; strategy {plan.strategy} does not use more memory"
    overhead_seconds = max(plan.predicted_seconds - plan.baseline_seconds, 0.0)
    gain_seconds = plan.price_seconds_per_byte * GIB
    if gain_seconds >= overhead_seconds:
        return f"{price}; to keep everything would save {format_seconds(overhead_seconds)} a step"
    return f"{price}: one more GiB would save {format_seconds(gain_seconds)} a step"


def _tiles(plan: Plan) -> list[tuple[str, str]]:
    """Return one row of a table for all module calls that run in the same number of tiles (parts with some of the rows) of the
    same size.
    """
    groups: dict[tuple[int, int], list[str]] = {}
    for tile in plan.tiles:
        groups.setdefault((tile.count, tile.rows_per_tile), []).append(tile.path)
    return [
        ("tiles", f"{compress_names(paths)}: {count} tiles of {rows} rows, so gradients are equal up to rounding")
        for (count, rows), paths in groups.items()
    ]


def _state(plan: Plan) -> list[tuple[str, str]]:
    """Return one row of a table, as a pair of name and text, about the optimizer state that is offloaded."""
    state = plan.state
    if state is None:
        return []
    where = "on disk" if state.link == "disk" else "in host memory"
    share = state.seconds / plan.baseline_seconds if plan.baseline_seconds else 0.0
    text = (
        f"{format_bytes(state.offloaded_bytes)} of {format_bytes(state.state_bytes)} of {state.optimizer}'s state {where}, "
        f"{format_share(share)} a step; stepped in {len(state.chunks)} chunks"
    )
    return [("optimizer state", text)]


def _backward_steps(plan: Plan) -> list[tuple[str, str]]:
    """Return one row of a table, as a pair of name and text, about the parameters that are stepped in backward."""
    steps = plan.backward_steps
    if steps is None:
        return []
    share = steps.seconds / plan.baseline_seconds if plan.baseline_seconds else 0.0
    text = (
        f"{steps.optimizer} steps {len(steps.parameters)} parameters in backward, each when its gradient is complete: "
        f"{format_bytes(steps.freed_bytes)} of {format_bytes(steps.gradient_bytes)} of gradients are freed there, "
        f"{format_share(share)} a step"
    )
    return [("optimizer step", text)]


def _packing_figures(plan: Plan) -> list[tuple[str, str]]:
    """Return rows on the error of the gradient, if the plan compresses with loss, and on the offloaded bytes, if it
    offloads.
    """
    rows = []
    if not plan.is_lossless:
        measured = "" if plan.measured_error is None else f", measured {plan.measured_error:.2%}"
        allowed = "any error is allowed" if plan.max_error is None else f"{plan.max_error:.2%} is allowed"
        rows.append(("gradient error", f"expected {plan.predicted_error:.2%}{measured}; {allowed}"))
    if plan.offloaded_bytes:
        limit = "" if plan.host_budget_bytes is None else f" of {format_bytes(plan.host_budget_bytes)}"
        rows.append(("offloaded", f"{format_bytes(plan.offloaded_bytes)}{limit} to {plan.link}"))
    return rows


def _memory(plan: Plan) -> list[Element]:
    elements: list[Element] = [MemoryChart(plan.timeline, plan.budget_bytes)] if plan.timeline else []
    unmanaged = plan.baseline_peak
    elements += [
        classes_table(plan),
        _holders(plan, plan.peak, f"What holds the peak ({plan.peak.moment})"),
        Fold(
            f"Without a plan the peak is {format_bytes(unmanaged.bytes)}, {unmanaged.moment}",
            [_holders(plan, unmanaged, "")],
            is_detail=True,
        ),
    ]
    if plan.predicted_peak_bytes >= plan.baseline_peak_bytes and any(not r.is_untouched for r in plan.regions):
        words = (
            "The plan lowers the bytes held after forward, but not the peak: no decision frees memory at that moment."
        )
        elements.append(Paragraph(words))
    return elements


def classes_table(plan: Plan) -> Table:
    """Make a table of the bytes per memory category at the peak, the largest first."""
    total = sum(plan.classes.values())
    found = sorted(((name, size) for name, size in plan.classes.items() if size), key=lambda item: -item[1])
    return Table(
        title="At the peak",
        rows=[(name, format_bytes(size), f"{size / total:.0%}") for name, size in found],
        numbers=(1, 2),
        bars=[size / total for _, size in found],
    )


def _holders(plan: Plan, peak: Peak, title: str) -> Table:
    """Make a table of the tensors that hold the most bytes at a peak, with the sum of the rest."""
    groups = _grouped(peak.holders, [region.name for region in plan.regions if region.name])
    rows = [(label, format_bytes(size)) for label, size in with_rest(groups, _HOLDERS_SHOWN)]
    return Table(title=title, rows=rows, numbers=(1,))


def _grouped(holders: Sequence[Holder], regions: Sequence[str]) -> list[tuple[str, int]]:
    """Return pairs of a label and its bytes, the largest first. A label names a group of tensors in memory.

    Values of one kind of region form a group. Outside of regions, the outputs of one op form a group.
    """
    groups: dict[tuple[str, str], list[tuple[Holder, str]]] = {}
    for holder in holders:
        region = region_in_label(holder.label, regions)
        verb = "rebuilt in" if _REBUILT in holder.label else "saved in"
        key = (verb, kind_of(region)) if region else ("", _OUTPUT.sub("", holder.label))
        groups.setdefault(key, []).append((holder, region))
    rows = []
    for (verb, label), members in groups.items():
        if len(members) == 1:
            label = members[0][0].label
        elif verb:
            label = f"{verb} {compress_names(list(dict.fromkeys(name for _, name in members)))} ({len(members)} values)"
        else:
            label = f"{plain_name(f'{label}#0')} ({len(members)} times)"
        rows.append((label, sum(holder.bytes for holder, _ in members)))
    return sorted(rows, key=lambda row: -row[1])


def _frontier(plan: Plan) -> list[Element]:
    """Return a chart of step time against peak memory, and a table of other budgets and their costs.

    The table is a detail of a plan for a budget. Without a budget it is shown, because the user has to choose one.
    """
    chart = FrontierChart(plans=[plan])
    others = OtherBudgets.of(plan.frontier, plan.baseline_seconds)
    if len(others.points) < 2:
        return [chart]
    title = TITLE if plan.budget_bytes is None else ""
    table = Table(title=title, header=HEADER, rows=others.rows, numbers=(0, 1, 2), bars=others.shares)
    return [chart, table if plan.budget_bytes is None else Fold(TITLE, [table], is_detail=True)]


def decisions_table(plan: Plan) -> Table:
    """Make a table with one row per group of regions (modules that the plan decides about) with the same decisions: decisions,
    bytes held until backward, and time to recompute.
    """
    rows = []
    for group in group_regions(plan.regions):
        if group.first.is_untouched:
            kept = f"{Decision.KEEP} everything"
            rows.append((group.label, kept, format_bytes(group.retained_bytes), "no replay", UNKNOWN))
        else:
            boundary = ", input dropped" if group.first.is_boundary_dropped else ""
            rows.append(
                (
                    group.label,
                    f"{_counted(group.first.decisions)} of {len(group.first.decisions)} values{boundary}",
                    f"{format_bytes(group.retained_bytes)} of {format_bytes(group.saved_bytes)}",
                    format_seconds(group.replay_seconds),
                    _engine(group.first),
                )
            )
    return table_of_known(("regions", "decision", "held until backward", "replay", "rebuilt by"), rows, ())


def _engine(region: RegionPlan) -> str:
    """Return in words what rebuilds the dropped values of a region in backward."""
    return f"recipe, or its forward (reads values: {region.value_read})" if region.value_read else "recipe"


def _counted(decisions: Sequence[ValueDecision]) -> str:
    """Return the number of values per decision, without kept values: ``RECOMPUTE 6, COMPRESS 4 (int8), OFFLOAD 2 (disk)``."""
    counts = Counter((d.decision, d.form) for d in decisions if d.decision is not Decision.KEEP)
    words = [f"{decision} {count}{f' ({form})' if form else ''}" for (decision, form), count in sorted(counts.items())]
    return ", ".join(words) or f"{Decision.RECOMPUTE} 0"


def _values(group: RegionGroup) -> Fold:
    """Make a fold (a table behind a title) with a row for each value of a group of regions that share their decisions. Regions
    are modules that the plan decides about.
    """
    first = group.first
    alike = f" ({len(group.regions)} with the same decisions, figures for one)" if len(group.regions) > 1 else ""
    replay = f"replay {format_seconds(first.replay_seconds)}" if first.replay_seconds else "no replay"
    boundary = "; its input is recomputed by the region before it" if first.is_boundary_dropped else ""
    rows = [
        (
            str(entry.decision),
            entry.value,
            format_bytes(entry.bytes),
            entry.form or UNKNOWN,
            format_bytes(entry.held_bytes) if entry.is_packed else UNKNOWN,
            format_seconds(entry.seconds) if entry.seconds else UNKNOWN,
            describe_reason(entry) or UNKNOWN,
        )
        for entry in first.decisions
    ]
    header = ("decision", "value", "bytes", "held as", "held bytes", "seconds a step", "why")
    table = table_of_known(header, rows, (2, 4, 5))
    return Fold(
        f"{group.label}{alike}: holds {format_bytes(first.retained_bytes)}, {replay}{boundary}", [table], is_detail=True
    )


def describe_reason(decision: ValueDecision) -> str:
    """Return the reason for the decision about a value in one sentence, or an empty text if none is known."""
    if decision.decision is Decision.RECOMPUTE and not decision.seconds:
        return "recompute costs nothing extra: another value's recomputation makes it anyway"
    if not decision.reason and decision.decision is Decision.RECOMPUTE and decision.bytes:
        return f"recompute costs {format_seconds(decision.seconds * MIB / decision.bytes)}/MiB"
    return decision.reason


@dataclass(frozen=True, slots=True)
class RegionGroup:
    """Data: regions of one kind, such as all equal blocks, that share their decisions. ``label`` names all of them."""

    label: str
    regions: tuple[RegionPlan, ...]

    @property
    def first(self) -> RegionPlan:
        """The first region of the group. Its decisions are those of all regions of the group."""
        return self.regions[0]

    @property
    def retained_bytes(self) -> int:
        """The number of bytes that this group of regions holds between forward and backward."""
        return sum(region.retained_bytes for region in self.regions)

    @property
    def saved_bytes(self) -> int:
        """The number of bytes that this group of regions would hold without a plan."""
        return sum(decision.bytes for region in self.regions for decision in region.decisions)

    @property
    def replay_seconds(self) -> float:
        """The seconds per step that this group of regions spends on running ops again."""
        return sum(region.replay_seconds for region in self.regions)


def group_regions(regions: Iterable[RegionPlan]) -> list[RegionGroup]:
    """Group the calls of regions: calls of one kind with equal decisions form a group, in the order of first appearance."""
    groups: dict[tuple[object, ...], list[RegionPlan]] = {}
    for region in regions:
        packed = tuple(sorted(region.packed.items()))
        key = (region.kind, region.dropped, packed, region.is_boundary_dropped, len(region.decisions))
        groups.setdefault(key, []).append(region)
    return [
        RegionGroup(compress_names([name_call(member.name, member.call) for member in members]), tuple(members))
        for members in groups.values()
    ]
