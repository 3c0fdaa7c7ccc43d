"""A plan in, its reasons in plain text out: every value's decision against the price of memory. No torch in here."""

from __future__ import annotations

from plimsoll.artifacts.columns import align
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.grouping import RegionGroup, group_regions
from plimsoll.artifacts.holder_summary import holder_rows
from plimsoll.artifacts.plan import Plan, ValueDecision
from plimsoll.artifacts.summary import describe_price
from plimsoll.units import MIB, format_bytes, format_seconds, format_share


def explain_plan(plan: Plan) -> str:
    """Why each value is kept or recomputed, what more memory would buy, what holds the peak before and after."""
    lines = [f"Why the plan {plan.strategy!r} for {plan.model} decides as it does", ""]
    lines.append(f"What memory is worth here: {describe_price(plan)}.")
    lines += _peaks(plan)
    for group in group_regions(plan.regions):
        lines += ["", *_group(group)]
    if plan.frontier:
        lines += ["", "What other budgets would cost"]
        lines += align(
            [
                [
                    format_bytes(point.peak_bytes),
                    format_seconds(point.step_seconds),
                    format_share(point.step_seconds / plan.baseline_seconds - 1) if plan.baseline_seconds else "",
                ]
                for point in plan.frontier
            ],
            right=[0, 1, 2],
        )
    lines += [f"\nNote: {note}" for note in plan.notes]
    return "\n".join(lines)


def _peaks(plan: Plan) -> list[str]:
    lines: list[str] = []
    for title, peak in (("Without a plan", plan.baseline_peak), ("With this plan", plan.peak)):
        lines += ["", f"{title} the peak is {format_bytes(peak.bytes)}, {peak.moment}"]
        lines += align(holder_rows(plan, peak), right=[1])
    if plan.predicted_peak_bytes >= plan.baseline_peak_bytes and any(not r.is_untouched for r in plan.regions):
        lines.append(
            "  The plan lowers what is held after forward, but not the peak: it lies where no decision reaches."
        )
    return lines


def _group(group: RegionGroup) -> list[str]:
    first = group.first
    count = len(group.regions)
    each = f" ({count} alike, figures for one)" if count > 1 else ""
    replay = f"replay {format_seconds(first.replay_seconds)}" if first.replay_seconds else "no replay"
    lines = [f"{group.label}{each}: holds {format_bytes(first.retained_bytes)}, {replay}"]
    if first.is_boundary_dropped:
        lines.append("  its input is not held either: it is rebuilt through the region before")
    lines += align([_value(decision) for decision in first.decisions], right=[2])
    return lines


def _value(decision: ValueDecision) -> list[str]:
    return [str(decision.decision), decision.value, format_bytes(decision.bytes), describe_reason(decision)]


def describe_reason(decision: ValueDecision) -> str:
    """Why a value is decided upon as it is, in one sentence."""
    if decision.decision is Decision.RECOMPUTE and not decision.seconds:
        return "recompute costs nothing more: it is made on the way to another value"
    if not decision.reason and decision.decision is Decision.RECOMPUTE and decision.bytes:
        return f"recompute costs {format_seconds(decision.seconds * MIB / decision.bytes)}/MiB"
    return decision.reason
