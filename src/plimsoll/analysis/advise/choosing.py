"""Chooses among the plans of one step, gives the reason against each other plan, and writes the recommendation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.analysis.advise.memory import LITTLE
from plimsoll.artifacts.advice import Bottleneck, Candidate, Kind, Recommendation
from plimsoll.artifacts.decision import Decision
from plimsoll.artifacts.plan import Plan
from plimsoll.units import format_bytes, format_share

_EQUAL = 0.01
"""A share of the step time without a plan. Plans whose step times differ by at most this share count as equally fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Data: a candidate plan that was made for the advice, with its name."""

    name: str
    plan: Plan
    refused: str = ""
    """Why the plan did not use the codecs and links (ways to compress or offload) that were allowed; empty if it used some, or
    if none were offered.
    """
    is_point: bool = False
    """Whether the plan only shows what another peak would cost. Such a plan is a point of the frontier, and is never chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Data: what the user demands of a plan: its largest peak and gradient error, and options for the command that makes it."""

    limit_bytes: int
    """The largest allowed peak in bytes: the budget, or the peak at the frontier's knee for a step without a budget."""
    limit_text: str
    """The largest allowed peak, written as an option on the command line."""
    is_budget: bool
    max_error: float
    target: str
    options: tuple[str, ...] = ()
    """Further command-line options that ``plimsoll plan`` needs to make the same plans: regions and device."""
    offload_options: tuple[str, ...] = ()
    """Options that only a plan that may offload accepts: host budget and link."""

    def obstacle(self, plan: Plan) -> str:
        """Return a text that says why a plan is not within the limits of this wish; empty if the plan can be chosen."""
        if plan.predicted_peak_bytes > self.limit_bytes:
            word = "the budget" if self.is_budget else "the knee of the frontier"
            return f"over {word} by {format_bytes(plan.predicted_peak_bytes - self.limit_bytes)}"
        if not plan.status.is_usable:
            return plan.status.advice
        if not plan.is_lossless and plan.predicted_error > self.max_error:
            allowed = f"{self.max_error:.2%} is tolerated" if self.max_error else "none is tolerated"
            return f"a gradient error of {plan.predicted_error:.2%} is expected; {allowed}"
        return ""


def choose(made: Sequence[Made], wish: Wish) -> Made | None:
    """Return the best plan for the wish (the limits on peak and gradient error); ``None`` if no plan is eligible.

    A plan is eligible if it keeps to the limit and to the tolerated error. The fastest eligible plan wins. Plans that are
    slower by at most 1% of the step without a plan count as equally fast; among them the simplest wins: keeping everything,
    then recomputing, then compressing or offloading.
    """
    eligible = [entry for entry in made if not entry.is_point and not wish.obstacle(entry.plan)]
    if not eligible:
        return None
    best = min((entry.plan for entry in eligible), key=lambda plan: plan.predicted_seconds)
    most_seconds = best.predicted_seconds + _EQUAL * best.baseline_seconds
    equal = [entry for entry in eligible if entry.plan.predicted_seconds <= most_seconds]
    return min(equal, key=lambda entry: (_complexity(entry.plan), entry.plan.predicted_seconds))


def _complexity(plan: Plan) -> int:
    """Return how complex a plan is, as a number from 0 to 4, to prefer simple plans among equally fast ones.

    0 keeps everything, 1 recomputes, 2 uses lossless codecs, 3 offloads, 4 uses lossy codecs.
    """
    decisions = {decision.decision for region in plan.regions for decision in region.decisions}
    if not plan.is_lossless:
        return 4
    if Decision.OFFLOAD in decisions:
        return 3
    if Decision.COMPRESS in decisions:
        return 2
    return 0 if all(region.is_untouched for region in plan.regions) else 1


def describe(made: Sequence[Made], chosen: Made | None, wish: Wish) -> tuple[Candidate, ...]:
    """Return one row for each candidate plan: its predicted figures, and why it was chosen or rejected."""
    return tuple(
        Candidate(
            name=entry.name,
            strategy=entry.plan.strategy,
            allow=entry.plan.allow,
            status=entry.plan.status,
            budget_bytes=entry.plan.budget_bytes,
            predicted_peak_bytes=entry.plan.predicted_peak_bytes,
            predicted_seconds=entry.plan.predicted_seconds,
            predicted_overhead=entry.plan.predicted_overhead,
            predicted_error=entry.plan.predicted_error,
            is_lossless=entry.plan.is_lossless,
            is_chosen=entry is chosen,
            reason=_reason(entry, chosen, made, wish),
        )
        for entry in made
    )


def _reason(entry: Made, chosen: Made | None, made: Sequence[Made], wish: Wish) -> str:
    plan, obstacle = entry.plan, wish.obstacle(entry.plan)
    if chosen is None or (obstacle and wish.is_budget):
        return obstacle
    if entry is chosen:
        if _complexity(plan) == 0:
            return "fits without a plan" if wish.is_budget else "no plan frees enough to be worth its time"
        return "the least time within the budget" if wish.is_budget else "the knee of the frontier"
    if plan.effect == chosen.plan.effect:
        return f"the same plan: {entry.refused}" if entry.refused else "the same plan"
    slower_share = (plan.predicted_seconds - chosen.plan.predicted_seconds) / plan.baseline_seconds
    slower = format_share(slower_share).lstrip("+")
    if wish.is_budget or _is_worse(plan, chosen.plan):
        return (
            f"slower by {slower} of the step" if slower_share > _EQUAL else "no faster, and it does more to the values"
        )
    better = next((other for other in made if other is not entry and _is_worse(plan, other.plan)), None)
    if better is not None:
        return f"{better.name} takes less of both"
    if not plan.is_lossless and plan.predicted_error > wish.max_error:
        return obstacle
    freed_bytes = chosen.plan.predicted_peak_bytes - plan.predicted_peak_bytes
    if freed_bytes > 0:
        return f"frees {format_bytes(freed_bytes)} more for {slower} of the step"
    return "if the step fits" if _complexity(plan) == 0 else f"frees {format_bytes(-freed_bytes)} less"


def _is_worse(plan: Plan, other: Plan) -> bool:
    """Return True if ``other`` is at least as good as ``plan`` in both memory and time, and better in at least one of them."""
    more_bytes = plan.predicted_peak_bytes - other.predicted_peak_bytes
    more_seconds = plan.predicted_seconds - other.predicted_seconds
    return more_bytes >= 0 and more_seconds >= 0 and (more_bytes > 0 or more_seconds > 0)


def recommend(made: Sequence[Made], chosen: Made | None, bottleneck: Bottleneck, wish: Wish) -> Recommendation:
    """Return the recommendation that ``plimsoll.advise`` gives: one headline and a few reasons. ``chosen`` is the plan to
    recommend.

    Without a budget, it recommends to look elsewhere if recomputation can remove less than the share ``LITTLE`` of the peak.
    """
    memory = (bottleneck.summary, *bottleneck.remedies)
    peak, limit = format_bytes(bottleneck.peak_bytes), format_bytes(wish.limit_bytes)
    if wish.is_budget and wish.limit_bytes >= bottleneck.peak_bytes:
        spare = format_bytes(wish.limit_bytes - bottleneck.peak_bytes)
        return Recommendation(
            kind=Kind.DO_NOTHING,
            headline="do nothing: the step fits without a plan",
            reasons=(f"its peak is {peak}; the budget of {limit} leaves {spare}", "any plan would only cost time"),
        )
    if chosen is None:
        lowest_bytes = min(entry.plan.floor_bytes for entry in made)
        return Recommendation(
            kind=Kind.DOES_NOT_FIT,
            headline=f"no plan keeps to {limit}: the smallest peak that was reached is {format_bytes(lowest_bytes)}",
            reasons=(*memory, "a smaller micro-batch lowers everything but the state"),
        )
    if not wish.is_budget and bottleneck.reachable_share < LITTLE:
        share = f"{bottleneck.reachable_share:.0%}"
        return Recommendation(
            kind=Kind.LOOK_ELSEWHERE,
            headline=f"look elsewhere: managing activations would free {share} of the peak at most",
            reasons=memory,
        )
    return _manage(chosen, made, bottleneck, wish)


def _manage(chosen: Made, made: Sequence[Made], bottleneck: Bottleneck, wish: Wish) -> Recommendation:
    plan, reasons = chosen.plan, [bottleneck.summary]
    full = next((entry.plan for entry in made if entry.name == "full"), plan)
    if full is not plan:
        peak, overhead = format_bytes(full.predicted_peak_bytes), format_share(full.predicted_overhead)
        reasons.append(f"checkpointing every layer (full) would take {peak} for {overhead}")
    if not plan.is_lossless:
        reasons.append(f"it is lossy: a gradient error of {plan.predicted_error:.2%} is expected")
    headline = (
        f"{chosen.name}: {format_bytes(plan.predicted_peak_bytes)} instead of {format_bytes(plan.baseline_peak_bytes)} for "
        f"{format_share(plan.predicted_overhead)} time"
    )
    return Recommendation(
        kind=Kind.MANAGE,
        headline=headline if wish.is_budget else f"if the step fits, do nothing; if memory is short, {headline}",
        reasons=tuple(reasons),
        command=_command(plan, wish),
    )


def _command(plan: Plan, wish: Wish) -> str:
    """Return the text of the ``plimsoll plan`` command that makes this plan."""
    words = ["plimsoll plan", wish.target]
    if plan.strategy != "auto":
        words.append(f"--strategy {plan.strategy}")
    else:
        words.append(f"--budget {shlex.quote(wish.limit_text)}")
        words += [f"--allow {','.join(plan.allow)}"] if plan.allow != ("recompute",) else []
    if not plan.is_lossless:
        words.append(f"--max-error {wish.max_error:g}")
    offload = wish.offload_options if plan.strategy == "auto" and "offload" in plan.allow else ()
    return " ".join([*words, *wish.options, *offload, "-o plan.json"])
