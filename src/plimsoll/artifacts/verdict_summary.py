"""A verdict in, plain text out: the ruling first, then rules, both arms, and the gradients. No torch, no rich in here."""

from __future__ import annotations

from plimsoll.artifacts.columns import align
from plimsoll.artifacts.verdict import (
    WHOLE_MODEL,
    ArmSummary,
    Estimate,
    GradientComparison,
    NormComparison,
    Rule,
    Verdict,
)
from plimsoll.units import format_bytes, format_seconds

RULE_HEADER = ("rule", "outcome", "found", "allowed")
ARM_HEADER = ("", "baseline", "plan")
NORM_HEADER = ("gradient norm", "median", "95%", "spikes", "kurtosis", "shift", "same?")
GRADIENT_HEADER = ("at equal parameters", "error", "largest", "cosine", "gain")

_BLOCKS_SHOWN = 5


def summarise_verdict(verdict: Verdict) -> str:
    """The verdict as people read it."""
    lines = [title(verdict), f"  {verdict.ruling.advice}", f"  {verdict.reason}"]
    lines += [f"  {describe_run(verdict)}"]
    lines += [f"  missing: {missing}" for missing in verdict.missing]
    lines += ["", *align([list(RULE_HEADER), *(rule_cells(rule) for rule in verdict.rules)])]
    lines += ["", *align([list(ARM_HEADER), *arm_rows(verdict)], right=[1, 2])]
    lines += ["", *align([list(NORM_HEADER), *map(norm_cells, shown_norms(verdict))], right=[1, 2, 3, 4])]
    if verdict.gradients:
        lines += ["", *align([list(GRADIENT_HEADER), *map(gradient_cells, shown_gradients(verdict))], right=[1, 2])]
    lines += [f"\nNote: {note}" for note in verdict.notes]
    return "\n".join(lines)


def title(verdict: Verdict) -> str:
    """One line: what was probed and what came of it."""
    return f"Probe of plan {verdict.strategy!r}, {verdict.model} on {verdict.device}: {verdict.ruling}"


def describe_run(verdict: Verdict) -> str:
    """Data, optimizer and number of steps."""
    steps = f"{verdict.steps} of {verdict.planned_steps}" if verdict.is_early else f"{verdict.steps}"
    return f"{steps} steps each, {verdict.optimizer}, seed {verdict.seed}; data: {verdict.data}"


def rule_cells(rule: Rule) -> list[str]:
    """One rule as the cells of ``RULE_HEADER``."""
    return [rule.name, str(rule.outcome), rule.found, rule.allowed]


def arm_rows(verdict: Verdict) -> list[list[str]]:
    """Figures of both arms side by side, as the cells of ``ARM_HEADER``."""
    target = _number(verdict.target_loss)
    names = (
        f"loss, mean of {verdict.window} steps",
        "held-out loss",
        "perplexity",
        f"steps to loss {target}",
        f"time to loss {target}",
        "step",
        f"{verdict.items}/s",
        "peak",
    )
    cells = zip(_arm_cells(verdict.baseline), _arm_cells(verdict.plan), strict=True)
    return [[name, one, other] for name, (one, other) in zip(names, cells, strict=True)]


def _arm_cells(arm: ArmSummary) -> tuple[str, ...]:
    return (
        _number(arm.final_loss),
        _number(arm.held_out_loss),
        _number(arm.perplexity),
        "–" if arm.steps_to_target is None else str(arm.steps_to_target),
        _seconds(arm.seconds_to_target),
        _seconds(arm.measured_step_seconds),
        "–" if arm.items_per_second is None else f"{arm.items_per_second:,.0f}",
        "–" if arm.measured_peak_bytes is None else format_bytes(arm.measured_peak_bytes),
    )


def _number(number: float | None) -> str:
    return "–" if number is None else f"{number:.4f}"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)


def shown_norms(verdict: Verdict) -> list[NormComparison]:
    """The whole model, then the blocks that moved furthest."""
    blocks = [entry for entry in verdict.comparisons if entry.block != WHOLE_MODEL]
    blocks.sort(key=lambda entry: 0.0 if entry.shift is None else -abs(entry.shift.value))
    return [*(entry for entry in verdict.comparisons if entry.block == WHOLE_MODEL), *blocks[:_BLOCKS_SHOWN]]


def shown_gradients(verdict: Verdict) -> list[GradientComparison]:
    """The whole model, then the blocks with the largest error."""
    blocks = [entry for entry in verdict.gradients if entry.block != WHOLE_MODEL]
    blocks.sort(key=lambda entry: -entry.relative_error)
    return [*(entry for entry in verdict.gradients if entry.block == WHOLE_MODEL), *blocks[:_BLOCKS_SHOWN]]


def norm_cells(entry: NormComparison) -> list[str]:
    """One block as the cells of ``NORM_HEADER``, baseline and plan in each."""
    one, other = entry.baseline, entry.plan
    kurtosis = " / ".join("–" if each.kurtosis is None else f"{each.kurtosis:.1f}" for each in (one, other))
    shift = "–" if entry.shift is None else describe_share(entry.shift)
    p_value = entry.adjusted_p_value
    return [
        entry.block,
        f"{one.median:.3g} / {other.median:.3g}",
        f"{one.percentile_95:.3g} / {other.percentile_95:.3g}",
        f"{one.spikes} / {other.spikes}",
        kurtosis,
        shift,
        "–" if p_value is None else f"p = {p_value:.2g}",
    ]


def gradient_cells(entry: GradientComparison) -> list[str]:
    """One block as the cells of ``GRADIENT_HEADER``."""
    return [
        entry.block,
        f"{entry.relative_error:.2%}",
        f"{entry.largest_error:.2%}",
        "–" if entry.cosine is None else describe_estimate(entry.cosine),
        "–" if entry.gain is None else describe_estimate(entry.gain),
    ]


def describe_share(estimate: Estimate) -> str:
    """``+1.2% (-0.3% to +2.7%)``."""
    return f"{estimate.value:+.1%} ({estimate.low:+.1%} to {estimate.high:+.1%})"


def describe_estimate(estimate: Estimate) -> str:
    """``1.012 (0.997 to 1.027)``."""
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
