"""Chooses among the plans of one step, gives the reason against each other plan, and writes the recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.artifacts.advice import Bottleneck, Candidate, Kind, Recommendation
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan
from plimsoll.units import format_bytes, format_share

_EQUAL = 0.01
"""Plans whose step times differ by at most this share of the unmanaged step count as equally fast."""
_NOTHING = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A candidate plan and its name."""

    name: str
    plan: Plan
    budget_bytes: int | None = None
    budget_text: str = ""
    """The budget as text for the command line."""
    refused: str = ""
    """Why the plan did not use the allowed forms, if known."""
    is_point: bool = False
    """Whether the plan is a point of the frontier, which is shown but cannot be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The user's limits: the budget (``None`` for no budget) and the gradient error that a plan may cause."""

    budget_bytes: int | None
    budget_text: str
    max_error: float
    target: str
    device_profile: str = ""
    options: tuple[str, ...] = ()
    """Further options that ``plimsoll plan`` needs to make the same plans: regions, host budget, link."""


def choose(made: Sequence[Made], wish: Wish, knee_bytes: int | None) -> tuple[Candidate, ...]:
    """Mark the best plan, and give the reason against each other plan.

    A plan is eligible if it keeps to the budget (without a budget, to the knee of the frontier) and to the tolerated error.
    The fastest eligible plan wins. Plans that are slower by at most 1% of the unmanaged step count as equally fast; among them
    the simplest wins: nothing, then recomputation, then other forms. The first plan must be the unmanaged step. ``knee_bytes``
    is the knee's peak, for a step without a budget.
    """
    limit_bytes = wish.budget_bytes if wish.budget_bytes is not None else knee_bytes
    eligible = [entry for entry in made if not entry.is_point and not _obstacle(entry.plan, limit_bytes, wish)]
    best = min(eligible, key=lambda entry: entry.plan.predicted_seconds, default=None)
    chosen = None
    if best is not None:
        most_seconds = best.plan.predicted_seconds + _EQUAL * best.plan.baseline_seconds
        equal = [entry for entry in eligible if entry.plan.predicted_seconds <= most_seconds]
        chosen = min(equal, key=lambda entry: (_complexity(entry.plan), entry.plan.predicted_seconds))
    return tuple(_candidate(entry, chosen, made, limit_bytes, wish) for entry in made)


def _obstacle(plan: Plan, limit_bytes: int | None, wish: Wish) -> str:
    """Why a plan cannot be chosen; empty if it can."""
    if limit_bytes is not None and plan.predicted_peak_bytes > limit_bytes:
        word = "the budget" if wish.budget_bytes is not None else "the knee of the frontier"
        return f"over {word} by {format_bytes(plan.predicted_peak_bytes - limit_bytes)}"
    if not plan.status.is_usable:
        return plan.status.advice
    if not plan.is_lossless and plan.predicted_error > wish.max_error:
        allowed = f"{wish.max_error:.2%} is tolerated" if wish.max_error else "none is tolerated"
        return f"a gradient error of {plan.predicted_error:.2%} is expected; {allowed}"
    return ""


def _complexity(plan: Plan) -> int:
    """Rank plans from simple to complex: nothing, recomputation, lossless codecs, offloading, lossy codecs."""
    decisions = {decision.decision for region in plan.regions for decision in region.decisions}
    if not plan.is_lossless:
        return 4
    if Decision.OFFLOAD in decisions:
        return 3
    if Decision.COMPRESS in decisions:
        return 2
    return 0 if all(region.is_untouched for region in plan.regions) else 1


def _candidate(
    entry: Made, chosen: Made | None, made: Sequence[Made], limit_bytes: int | None, wish: Wish
) -> Candidate:
    plan = entry.plan
    return Candidate(
        name=entry.name,
        strategy=plan.strategy,
        allow=plan.allow,
        status=plan.status,
        budget_bytes=entry.budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_seconds=plan.predicted_seconds,
        predicted_overhead=plan.predicted_overhead,
        predicted_error=plan.predicted_error,
        is_lossless=plan.is_lossless,
        is_chosen=entry is chosen,
        reason=_reason(entry, chosen, made, limit_bytes, wish),
    )


def _reason(entry: Made, chosen: Made | None, made: Sequence[Made], limit_bytes: int | None, wish: Wish) -> str:
    plan = entry.plan
    obstacle = _obstacle(plan, limit_bytes, wish)
    if chosen is None or (obstacle and wish.budget_bytes is not None):
        return obstacle
    other = chosen.plan
    if entry is chosen:
        if _complexity(plan) == 0:
            return "fits as it is" if wish.budget_bytes is not None else "no plan frees enough to be worth its time"
        return "the least time within the budget" if wish.budget_bytes is not None else "the knee of the frontier"
    if plan.effect == other.effect:
        return f"the same plan: {entry.refused}" if entry.refused else "the same plan"
    slower = f"{format_share((plan.predicted_seconds - other.predicted_seconds) / plan.baseline_seconds).lstrip('+')}"
    if _is_worse(plan, other) or wish.budget_bytes is not None:
        is_slower = plan.predicted_seconds - other.predicted_seconds > _EQUAL * plan.baseline_seconds
        return f"slower by {slower} of the step" if is_slower else "no faster, and it does more to the values"
    better = next((m for m in made if m is not entry and _is_worse(plan, m.plan)), None)
    if better is not None:
        return f"{better.name} takes less of both"
    if not plan.is_lossless and plan.predicted_error > wish.max_error:
        return obstacle
    freed_bytes = other.predicted_peak_bytes - plan.predicted_peak_bytes
    if freed_bytes > 0:
        return f"frees {format_bytes(freed_bytes)} more for {slower} of the step"
    return "if the step fits" if _complexity(plan) == 0 else f"frees {format_bytes(-freed_bytes)} less"


def _is_worse(plan: Plan, other: Plan) -> bool:
    """Whether ``other`` dominates ``plan``: not more memory and not more time, and less of at least one."""
    more_bytes = plan.predicted_peak_bytes - other.predicted_peak_bytes
    more_seconds = plan.predicted_seconds - other.predicted_seconds
    return more_bytes >= 0 and more_seconds >= 0 and (more_bytes > 0 or more_seconds > 0)


def recommend(
    made: Sequence[Made], candidates: Sequence[Candidate], bottleneck: Bottleneck, wish: Wish, *, little: float
) -> Recommendation:
    """Write the recommendation: one headline and a few reasons.

    The first plan must be the unmanaged plan. Without a budget, the recommendation is to look elsewhere if recomputation can
    remove less than the share ``little`` of the peak.
    """
    chosen = next((entry for entry, c in zip(made, candidates, strict=True) if c.is_chosen), None)
    unmanaged = made[0].plan
    if wish.budget_bytes is not None and wish.budget_bytes >= unmanaged.baseline_peak_bytes:
        return _do_nothing(unmanaged, wish)
    if chosen is None:
        return _does_not_fit(made, bottleneck, wish)
    if wish.budget_bytes is None and bottleneck.reachable_share < little:
        return Recommendation(
            kind=Kind.LOOK_ELSEWHERE,
            headline="look elsewhere: managing activations would free "
            f"{bottleneck.reachable_share:.0%} of the peak at most",
            reasons=(bottleneck.summary, *bottleneck.remedies),
        )
    return _manage(chosen, made, bottleneck, wish)


def _do_nothing(unmanaged: Plan, wish: Wish) -> Recommendation:
    assert wish.budget_bytes is not None
    spare = format_bytes(wish.budget_bytes - unmanaged.baseline_peak_bytes)
    return Recommendation(
        kind=Kind.DO_NOTHING,
        headline="do nothing: the step fits as it is",
        reasons=(
            f"its peak is {format_bytes(unmanaged.baseline_peak_bytes)}; the budget of {format_bytes(wish.budget_bytes)} "
            f"leaves {spare}",
            "any plan would only cost time",
        ),
    )


def _does_not_fit(made: Sequence[Made], bottleneck: Bottleneck, wish: Wish) -> Recommendation:
    assert wish.budget_bytes is not None
    lowest = min(made, key=lambda entry: entry.plan.floor_bytes).plan
    return Recommendation(
        kind=Kind.DOES_NOT_FIT,
        headline=f"no plan keeps to {format_bytes(wish.budget_bytes)}: "
        f"the smallest peak that was reached is {format_bytes(lowest.floor_bytes)}",
        reasons=(bottleneck.summary, *bottleneck.remedies, "a smaller micro-batch lowers everything but the state"),
    )


def _manage(chosen: Made, made: Sequence[Made], bottleneck: Bottleneck, wish: Wish) -> Recommendation:
    plan = chosen.plan
    figures = (
        f"{format_bytes(plan.predicted_peak_bytes)} instead of {format_bytes(plan.baseline_peak_bytes)} for "
        f"{format_share(plan.predicted_overhead)} time"
    )
    reasons = [bottleneck.summary]
    full = next((entry.plan for entry in made if entry.name == "full"), None)
    if full is not None and full is not plan:
        reasons.append(
            f"checkpointing every layer (full) would take {format_bytes(full.predicted_peak_bytes)} for "
            f"{format_share(full.predicted_overhead)}"
        )
    reasons += _alternatives(chosen, made)
    if not plan.is_lossless:
        reasons.append(f"it is lossy: a gradient error of {plan.predicted_error:.2%} is expected")
    if wish.budget_bytes is None:
        headline = f"if the step fits, do nothing; if memory is short, {chosen.name}: {figures}"
    else:
        headline = f"{chosen.name}: {figures}"
    return Recommendation(kind=Kind.MANAGE, headline=headline, reasons=tuple(reasons), command=_command(chosen, wish))


def _alternatives(chosen: Made, made: Sequence[Made]) -> list[str]:
    """One line for each other plan with the same budget: its overhead, or that it is the same plan and why."""
    lines = []
    for entry in made:
        if entry is chosen or not entry.budget_text:
            continue
        if entry.plan.effect == chosen.plan.effect:
            why = f": {entry.refused}" if entry.refused else ""
            lines.append(f"{entry.name} comes to the same plan{why}")
        elif entry.plan.predicted_seconds > chosen.plan.predicted_seconds:
            lines.append(f"{entry.name} would take {format_share(entry.plan.predicted_overhead)}")
    return lines


def _command(chosen: Made, wish: Wish) -> str:
    """The command that makes the chosen plan."""
    plan = chosen.plan
    words = ["plimsoll plan", wish.target]
    if plan.strategy != "auto":
        words.append(f"--strategy {plan.strategy}")
    if chosen.budget_text:
        words.append(f"--budget {chosen.budget_text}")
    if plan.allow != ("recompute",) and plan.strategy == "auto":
        words.append(f"--allow {','.join(plan.allow)}")
    if not plan.is_lossless:
        words.append(f"--max-error {wish.max_error:g}")
    if wish.device_profile:
        words.append(f"--device-profile {wish.device_profile}")
    return " ".join([*words, *wish.options, "-o plan.json"])
