"""A plan in, a table in plain text out: what it costs, what it decides, what holds the peak. No torch, no rich in here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from plimsoll.artifacts.columns import align
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.grouping import RegionGroup, group_regions
from plimsoll.artifacts.holder_summary import holder_rows
from plimsoll.artifacts.plan import Plan, ValueDecision
from plimsoll.units import GIB, MIB, format_bytes, format_seconds, format_share


def summarise_plan(plan: Plan) -> str:
    """The plan as people read it first: status, figures, decisions per group of regions, memory at the peak."""
    lines = [f"Plan {plan.strategy!r} for {plan.model} on {plan.device}: {plan.status}", f"  {plan.status.advice}", ""]
    lines += align([list(row) for row in plan_figures(plan)])
    lines += ["", "At the peak"]
    lines += align(class_rows(plan), right=[1, 2])
    lines += ["", f"Who holds it ({plan.peak.moment})"]
    lines += align(holder_rows(plan, plan.peak), right=[1])
    if plan.regions:
        lines += ["", "Decisions"]
        lines += align([decision_row(group) for group in group_regions(plan.regions)])
    lines += [f"\nNote: {note}" for note in plan.notes]
    return "\n".join(lines)


def plan_figures(plan: Plan) -> tuple[tuple[str, str], ...]:
    """The plan's figures as pairs of name and text."""
    budget = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    share = plan.predicted_peak_bytes / plan.baseline_peak_bytes if plan.baseline_peak_bytes else 1.0
    return (
        ("budget", f"{budget} (floor {format_bytes(plan.floor_bytes)})"),
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
        (
            "lower bound",
            f"{format_seconds(plan.lower_bound_seconds)}: the gap is {plan.gap_of_step:.2%} of the step, "
            f"{plan.gap_of_overhead:.1%} of the overhead",
        ),
        ("price of memory", describe_price(plan)),
        *_packing_figures(plan),
        ("costs", f"{plan.cost_source} on {plan.cost_device}; solved in {format_seconds(plan.solve_seconds)}"),
    )


def _packing_figures(plan: Plan) -> list[tuple[str, str]]:
    """What lossy forms and links add to the figures."""
    rows = []
    if not plan.is_lossless:
        measured = "" if plan.measured_error is None else f", measured {plan.measured_error:.2%}"
        allowed = "any is allowed" if plan.max_error is None else f"{plan.max_error:.2%} is allowed"
        rows.append(("gradient error", f"expected {plan.predicted_error:.2%}{measured}; {allowed}"))
    if plan.offloaded_bytes:
        limit = "" if plan.host_budget_bytes is None else f" of {format_bytes(plan.host_budget_bytes)}"
        rows.append(("offloaded", f"{format_bytes(plan.offloaded_bytes)}{limit} to {plan.link}"))
    return rows


def describe_price(plan: Plan) -> str:
    """What memory is worth here, and what one more GiB would buy."""
    if plan.price_seconds_per_byte <= 0:
        return "nothing: more memory would not make this step faster"
    price = f"{format_seconds(plan.price_seconds_per_byte * MIB)} per MiB"
    if plan.strategy != "auto":
        return f"{price} to the strategy auto at this peak; {plan.strategy} has no use for more"
    return f"{price}: one more GiB would save {format_seconds(gib_gain_seconds(plan))} a step"


def gib_gain_seconds(plan: Plan) -> float:
    """Seconds per step that one more GiB would save: the price, but never more than the whole overhead."""
    overhead_seconds = max(plan.predicted_seconds - plan.baseline_seconds, 0.0)
    return min(plan.price_seconds_per_byte * GIB, overhead_seconds)


def class_rows(plan: Plan) -> list[list[str]]:
    """One row per memory category at the peak, largest first: name, bytes, share."""
    total = sum(plan.classes.values())
    return [
        [name, format_bytes(bytes_), f"{bytes_ / total:.0%}"]
        for name, bytes_ in sorted(plan.classes.items(), key=lambda item: -item[1])
        if bytes_
    ]


def describe_decisions(decisions: Sequence[ValueDecision]) -> str:
    """How many values are not kept as they are: ``RECOMPUTE 6, COMPRESS 4 (int8), OFFLOAD 2 (disk)``."""
    counts = Counter((d.decision, d.form) for d in decisions if d.decision is not Decision.KEEP)
    words = [f"{decision} {count}{f' ({form})' if form else ''}" for (decision, form), count in sorted(counts.items())]
    return ", ".join(words) or f"{Decision.RECOMPUTE} 0"


def decision_row(group: RegionGroup) -> list[str]:
    """One group of regions: name, what is decided, what stays, what it costs."""
    if group.first.is_untouched:
        return [group.label, f"{Decision.KEEP} everything", f"holds {format_bytes(group.retained_bytes)}", "no replay"]
    boundary = ", input dropped" if group.first.is_boundary_dropped else ""
    return [
        group.label,
        f"{describe_decisions(group.first.decisions)} of {len(group.first.decisions)} values{boundary}",
        f"holds {format_bytes(group.retained_bytes)} of {format_bytes(group.saved_bytes)}",
        f"replay {format_seconds(group.replay_seconds)}",
    ]
