"""Both arms' logs in; the rules, how each stands, and the ruling that follows out. Each rule's definition is in docs/probe.md.

A rule is broken where an interval lies wholly outside of what is allowed, clear where one lies wholly inside, and open
otherwise. Intervals that break are wider than those that clear: any rule, block and look can break the verdict by chance, so
they share the error; to clear it all have to be clear, and no share is needed between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from plimsoll.analysis.probe import statistics
from plimsoll.analysis.probe.evidence import Evidence
from plimsoll.analysis.probe.settings import (
    LEAST_COSINE,
    LEAST_HELD_OUT_MARGIN,
    MOST_DELAY,
    MOST_SHIFT,
    SPIKE,
    Settings,
)
from plimsoll.artifacts.verdict import (
    NORM_QUANTILES,
    Estimate,
    GradientComparison,
    NormComparison,
    NormSummary,
    Outcome,
    Rule,
    Ruling,
)

_MORE_COMPARISONS = (
    f"more comparisons at equal parameters: one per chunk is made, {statistics.LEAST_SAMPLES} are the least"
)
_MOST_LOGARITHM = 50.0
"""Beyond it a ratio is infinite for all that matters."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The rules as they stand after so many steps, and the figures behind them."""

    ruling: Ruling
    decided_by: str
    rules: tuple[Rule, ...]
    comparisons: tuple[NormComparison, ...]
    gradients: tuple[GradientComparison, ...]
    delay: Estimate | None
    held_out_difference: Estimate | None

    @property
    def missing(self) -> tuple[str, ...]:
        """What open rules lack."""
        return tuple(f"{rule.name}: {rule.missing}" for rule in self.rules if rule.outcome is Outcome.OPEN)

    @property
    def reason(self) -> str:
        """What was found by the rule that decided."""
        deciding = [rule for rule in self.rules if rule.name == self.decided_by]
        if deciding:
            return f"{deciding[0].name}: {deciding[0].found}; allowed: {deciding[0].allowed}"
        return f"{self.decided_by}"


@dataclass(frozen=True, slots=True)
class Probed:
    """What both arms wrote down, and what the rules say about it."""

    evidence: Evidence
    findings: Findings


def judge(evidence: Evidence, settings: Settings) -> Findings:
    """Hold the rules against what was logged.

    Args:
        evidence: both arms, at least one step each.
        settings: limits of the error.
    """
    rules = [_finite(evidence), _identical(evidence)]
    comparisons: tuple[NormComparison, ...] = ()
    gradients: tuple[GradientComparison, ...] = ()
    longer = held_out = None
    if evidence.is_baseline_finite and evidence.is_plan_finite:
        comparisons = compare_norms(evidence, settings)
        gradients = compare_gradients(evidence, settings)
        delay_rule, longer = _delay(evidence, settings)
        held_out_rule, held_out = _held_out(evidence, settings)
        rules += [
            _spikes(comparisons[0], settings),
            _shift(evidence, settings),
            _gradient(evidence, settings),
            delay_rule,
            held_out_rule,
        ]
    ruling, decided_by = _decide(rules)
    return Findings(ruling, decided_by, tuple(rules), comparisons, gradients, longer, held_out)


def stop_here(evidence: Evidence, settings: Settings) -> Findings | None:
    """The findings if they are clear enough to stop before all steps are taken.

    Between looks only NaN, infinity and bit-equality count, which chance cannot fake. What is bad may be said at any look,
    that a plan is good from half of the steps on.
    """
    steps = evidence.steps
    if not (evidence.is_baseline_finite and evidence.is_plan_finite):
        return judge(evidence, settings)
    if not settings.is_early or not 0 < steps < settings.steps:
        return None
    is_identical = evidence.is_identical
    if is_identical and steps >= settings.identical_steps:
        return judge(evidence, settings)
    if is_identical or steps not in settings.looks:
        return None
    findings = judge(evidence, settings)
    if findings.ruling is Ruling.GOOD:
        return findings if 2 * steps >= settings.steps else None
    return None if findings.ruling is Ruling.UNDECIDED else findings


_ORDER = (
    Ruling.BASELINE_DIVERGED,
    Ruling.DIVERGED,
    Ruling.NO_COMPRESSION,
    Ruling.RECOMPUTE_INSTEAD,
    Ruling.NET_LOSS,
)
_ALL_CLEAR = "every rule is clear"
_SOME_OPEN = "no rule is broken, and not all of them are clear"


def _decide(rules: list[Rule]) -> tuple[Ruling, str]:
    broken = sorted((r for r in rules if r.outcome is Outcome.BROKEN), key=lambda rule: _ORDER.index(rule.ruling))
    if broken:
        return broken[0].ruling, broken[0].name
    identical = next(rule for rule in rules if rule.ruling is Ruling.IDENTICAL)
    if identical.outcome is Outcome.CLEAR:
        return Ruling.IDENTICAL, identical.name
    judged = [rule for rule in rules if rule is not identical]
    if any(rule.outcome is Outcome.OPEN for rule in judged):
        return Ruling.UNDECIDED, _SOME_OPEN
    return Ruling.GOOD, _ALL_CLEAR


def _finite(evidence: Evidence) -> Rule:
    """Loss and gradient are numbers."""
    if not evidence.is_baseline_finite:
        step = len(evidence.baseline_log.steps)
        found, ruling = f"the baseline's loss or gradient is NaN or infinite in step {step}", Ruling.BASELINE_DIVERGED
    elif not evidence.is_plan_finite:
        step = len(evidence.plan_log.steps)
        found, ruling = f"the plan's loss or gradient is NaN or infinite in step {step}", Ruling.DIVERGED
    else:
        found, ruling = "all losses and gradients are finite", Ruling.DIVERGED
    is_finite = evidence.is_baseline_finite and evidence.is_plan_finite
    outcome = Outcome.CLEAR if is_finite else Outcome.BROKEN
    return Rule(name="finite", ruling=ruling, outcome=outcome, allowed="no NaN, no infinity", found=found)


def _identical(evidence: Evidence) -> Rule:
    """Loss and norms are equal bit for bit; where they are not, the other rules decide."""
    same = evidence.identical_steps
    found = (
        f"all {same} steps are equal bit for bit" if evidence.is_identical else f"equal in the first {same} steps only"
    )
    outcome = Outcome.CLEAR if evidence.is_identical else Outcome.NOT_MEASURED
    return Rule(
        name="identical",
        ruling=Ruling.IDENTICAL,
        outcome=outcome,
        allowed="not needed where others are clear",
        found=found,
    )


def compare_norms(evidence: Evidence, settings: Settings) -> tuple[NormComparison, ...]:
    """Every block's norms in both arms, with intervals of the confidence that clears."""
    made, p_values = [], []
    for block in evidence.blocks:
        one, other = evidence.baseline.norms[block], evidence.plan.norms[block]
        shift = _shift_of(evidence, block, settings.error_to_clear)
        p_value = statistics.swapped_p_value(one, other)
        p_values.append(p_value)
        made.append(
            NormComparison(block=block, baseline=summarise(one), plan=summarise(other), shift=shift, p_value=p_value)
        )
    known = [p_value for p_value in p_values if p_value is not None]
    if len(known) < len(made):
        return tuple(made)
    corrected = statistics.adjusted(known)
    return tuple(msgspec.structs.replace(each, adjusted_p_value=p) for each, p in zip(made, corrected, strict=True))


def summarise(norms: statistics.Series) -> NormSummary:
    """One arm's norms of one block."""
    if not len(norms):
        return NormSummary(median=0.0, percentile_95=0.0, largest=0.0, spikes=0, kurtosis=None, quantiles=())
    return NormSummary(
        median=float(np.median(norms)),
        percentile_95=float(np.quantile(norms, 0.95)),
        largest=float(norms.max()),
        spikes=statistics.count_spikes(norms),
        kurtosis=statistics.kurtosis(norms),
        quantiles=tuple(float(each) for each in np.quantile(norms, NORM_QUANTILES)),
    )


def compare_gradients(evidence: Evidence, settings: Settings) -> tuple[GradientComparison, ...]:
    """Every block's gradients at equal parameters, with intervals of the confidence that clears."""
    made = []
    for block in evidence.blocks:
        samples = evidence.gradients(block)
        if samples is None:
            continue
        made.append(
            GradientComparison(
                block=block,
                samples=len(samples.errors),
                relative_error=float(np.median(samples.errors)),
                largest_error=float(samples.errors.max()),
                cosine=_estimate(statistics.mean_of_samples(samples.cosines), settings.error_to_clear),
                gain=_estimate(statistics.mean_of_samples(samples.gains), settings.error_to_clear),
            )
        )
    return tuple(made)


def _spikes(whole: NormComparison, settings: Settings) -> Rule:
    """The plan's gradients spike at most twice as often."""
    one, other = whole.baseline.spikes, whole.plan.spikes
    p_value = statistics.more_spikes_p_value(one, other)
    is_doubled = other >= 2 * max(one, 1)
    found = f"{other} spikes against {one}, p = {p_value:.2g}"
    outcome = Outcome.CLEAR
    if is_doubled:
        outcome = Outcome.BROKEN if p_value < settings.error_to_break else Outcome.OPEN
    return Rule(
        name="spikes",
        ruling=Ruling.NO_COMPRESSION,
        outcome=outcome,
        allowed=f"less than twice the baseline's norms above {SPIKE:g} × the running median",
        found=found,
        missing="too few spikes to tell a doubling from chance; more steps" if outcome is Outcome.OPEN else "",
    )


@dataclass(frozen=True, slots=True)
class _Bounded:
    """A figure with the interval that could break its rule, the one that could clear it, and what is allowed."""

    label: str
    wide: Estimate
    narrow: Estimate
    low: float
    high: float

    @property
    def outcome(self) -> Outcome:
        if self.wide.low > self.high or self.wide.high < self.low:
            return Outcome.BROKEN
        return Outcome.CLEAR if self.low <= self.narrow.low and self.narrow.high <= self.high else Outcome.OPEN

    @property
    def excess(self) -> float:
        """How far outside of what is allowed the figure could lie (negative: how far inside it is for sure)."""
        return max(self.narrow.high - self.high, self.low - self.narrow.low)

    @property
    def certain_excess(self) -> float:
        """How far outside of what is allowed the figure lies for sure."""
        return max(self.wide.low - self.high, self.low - self.wide.high)


def _judged(name: str, ruling: Ruling, allowed: str, figures: Sequence[_Bounded], missing: str) -> Rule:
    """A rule over several figures: broken by any one of them, clear if all are."""
    outcomes = {figure.outcome for figure in figures}
    if Outcome.BROKEN in outcomes:
        outcome, worst = Outcome.BROKEN, max(figures, key=lambda figure: figure.certain_excess)
    elif figures:
        outcome = Outcome.OPEN if Outcome.OPEN in outcomes else Outcome.CLEAR
        worst = max(figures, key=lambda figure: figure.excess)
    else:
        return Rule(
            name=name, ruling=ruling, outcome=Outcome.OPEN, allowed=allowed, found="too few steps", missing=missing
        )
    shown = worst.wide if outcome is Outcome.BROKEN else worst.narrow
    found = f"{worst.label} {shown.value:.4g} ({shown.low:.4g} to {shown.high:.4g})"
    return Rule(
        name=name,
        ruling=ruling,
        outcome=outcome,
        allowed=allowed,
        found=found,
        missing=missing if outcome is Outcome.OPEN else "",
    )


def _shift(evidence: Evidence, settings: Settings) -> Rule:
    """No block's norm moves by more than a tenth."""
    figures = []
    for block in evidence.blocks:
        wide = _shift_of(evidence, block, settings.error_to_break / len(evidence.blocks))
        narrow = _shift_of(evidence, block, settings.error_to_clear)
        if wide is not None and narrow is not None:
            figures.append(_Bounded(f"{block} norm", wide, narrow, -MOST_SHIFT, MOST_SHIFT))
    allowed = f"every block's norm within {-MOST_SHIFT:+.2g} to {MOST_SHIFT:+.2g}"
    return _judged("shift", Ruling.RECOMPUTE_INSTEAD, allowed, figures, "more steps, for a narrower interval")


def _shift_of(evidence: Evidence, block: str, error: float) -> Estimate | None:
    """The mean change of the block's norm, as a share."""
    ratios = statistics.log_ratios(evidence.baseline.norms[block], evidence.plan.norms[block])
    mean = statistics.mean_of_steps(ratios)
    if mean is None:
        return None
    low, high = mean.interval(error)
    return Estimate(value=_grown(mean.value), low=_grown(low), high=_grown(high))


def _grown(logarithm: float) -> float:
    return math.expm1(min(logarithm, _MOST_LOGARITHM))


def _gradient(evidence: Evidence, settings: Settings) -> Rule:
    """At equal parameters, the gradient keeps its direction, and its length along it, in every block."""
    figures = []
    error = settings.error_to_break / (2 * len(evidence.blocks))
    for block in evidence.blocks:
        samples = evidence.gradients(block)
        for label, values, low, high in (
            ()
            if samples is None
            else (
                ("gain", samples.gains, 1 - MOST_SHIFT, 1 + MOST_SHIFT),
                ("cosine", samples.cosines, LEAST_COSINE, math.inf),
            )
        ):
            mean = statistics.mean_of_samples(values)
            wide, narrow = _estimate(mean, error), _estimate(mean, settings.error_to_clear)
            if wide is not None and narrow is not None:
                figures.append(_Bounded(f"{block} {label}", wide, narrow, low, high))
    allowed = f"every block's cosine at least {LEAST_COSINE:g}, gain {1 - MOST_SHIFT:g} to {1 + MOST_SHIFT:g}"
    return _judged("gradient", Ruling.RECOMPUTE_INSTEAD, allowed, figures, _MORE_COMPARISONS)


def _delay(evidence: Evidence, settings: Settings) -> tuple[Rule, Estimate | None]:
    """The plan needs at most a tenth more steps for the same loss."""
    losses, window = evidence.baseline.losses, window_of(evidence.steps)
    mean = statistics.mean_of_steps((evidence.plan.losses - losses)[-window:])
    figures, narrow = [], None
    if mean is not None:
        wide, narrow = (
            Estimate(
                value=statistics.delay(losses, mean.value, window),
                low=statistics.delay(losses, low, window),
                high=statistics.delay(losses, high, window),
            )
            for low, high in (mean.interval(settings.error_to_break), mean.interval(settings.error_to_clear))
        )
        figures.append(_Bounded("steps ×", wide, narrow, -math.inf, MOST_DELAY))
    allowed = f"at most {MOST_DELAY:g} × the steps for the same loss"
    missing = "more steps, until the difference in loss is clear of its noise"
    return _judged("steps", Ruling.NET_LOSS, allowed, figures, missing), narrow


def window_of(steps: int) -> int:
    """Steps over which losses are averaged: a fifth of the run, at least 16 where there are as many."""
    return min(steps, max(statistics.LEAST_STEPS, steps // 5))


def _held_out(evidence: Evidence, settings: Settings) -> tuple[Rule, Estimate | None]:
    """The plan's held-out loss is worse by no more than a tenth of the steps is worth, or by 1%."""
    pair = evidence.held_out()
    allowed = f"worse by no more than {MOST_DELAY - 1:.0%} of the steps gained, or {LEAST_HELD_OUT_MARGIN:.0%}"
    if pair is None or len(pair[0]) < statistics.LEAST_SAMPLES or not np.isfinite(pair[0]).all():
        found = "no held-out data" if pair is None else f"{len(pair[0])} held-out batches: too few, or not finite"
        return _held_out_rule(Outcome.NOT_MEASURED, allowed, found), None
    one, other = pair
    if not np.isfinite(other).all():
        return _held_out_rule(Outcome.BROKEN, allowed, "the plan's held-out loss is NaN or infinite"), None
    margin = LEAST_HELD_OUT_MARGIN * abs(float(one.mean()))
    if evidence.steps >= statistics.LEAST_STEPS:
        window = window_of(evidence.steps)
        margin = max(margin, statistics.loss_of_delay(evidence.baseline.losses, MOST_DELAY, window))
    mean = statistics.mean_of_samples(other - one)
    wide, narrow = _estimate(mean, settings.error_to_break), _estimate(mean, settings.error_to_clear)
    figures = []
    if wide is not None and narrow is not None:
        figures.append(_Bounded("loss", wide, narrow, -math.inf, margin))
    missing = "more held-out batches, or more steps"
    return _judged("held-out", Ruling.NET_LOSS, f"{allowed}: {margin:.4g}", figures, missing), narrow


def _held_out_rule(outcome: Outcome, allowed: str, found: str) -> Rule:
    return Rule(name="held-out", ruling=Ruling.NET_LOSS, outcome=outcome, allowed=allowed, found=found)


def _estimate(mean: statistics.Mean | None, error: float) -> Estimate | None:
    if mean is None:
        return None
    low, high = mean.interval(error)
    return Estimate(value=mean.value, low=low, high=high)
