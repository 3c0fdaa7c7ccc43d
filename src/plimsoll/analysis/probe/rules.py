"""The rules that judge whether a plan harms training, the outcome of each, and the resulting ruling. docs/probe.md defines each
rule.

A rule is broken if an interval is entirely outside the allowed range, clear if an interval is entirely inside, and open
otherwise. The intervals that break a rule are wider than the intervals that clear it. The reason: any single rule, block
(parameters of a region) or look (moment at which the rules are tested) can break the verdict by chance, so they share the
allowed error. To clear the verdict, all rules must be clear, so they do not need to share the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.analysis.probe import statistics
from plimsoll.analysis.probe.evidence import ProbeEvidence, compare_gradients, compare_norms
from plimsoll.artifacts.verdict import GradientComparison, IntervalEstimate, NormComparison, Outcome, Rule, Ruling

MOST_SHIFT = 0.10
"""The largest allowed relative change of a gradient norm, or of the gradient's length along the gradient without a plan."""
LEAST_COSINE = 0.90
"""The smallest allowed cosine of the angle between the plan's gradient and the gradient without a plan."""
MOST_DELAY = 1.10
"""The plan may need at most this multiple of the baseline's steps to reach the same loss."""
LEAST_HELD_OUT_MARGIN = 0.01
"""A held-out loss counts as worse only if it is higher than the baseline's by more than this share."""
STATISTICAL_RULES = 5
"""The number of rules that can be broken by chance. Each rule gets an equal share of the allowed error."""

_FIRST_LOOK = 40
"""The smallest number of training steps after which the rules are tested."""
_HALVINGS = 4
"""How often the number of steps is halved to find the first test of the rules: after 1/16 of all steps. Further tests come
after 1/8, 1/4 and 1/2 of the steps, and at the end.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """Data: the settings for both arms (training without and with the plan) of a probe.

    ``chunk_steps`` is how many steps one arm takes before the other arm continues. After ``identical_steps`` steps that are
    equal bit for bit, the arms count as identical. ``error`` is the allowed error probability of the whole verdict (0.05: wrong
    once in twenty).
    """

    steps: int = 1000
    chunk_steps: int = 20
    seed: int = 0
    target_loss: float | None = None
    is_early: bool = True
    identical_steps: int = 100
    error: float = 0.05

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of steps after which the rules are tested; such a test is called a look.

        Each is the end of a chunk, and about twice the previous one.
        """
        found = {self.steps}
        for halving in range(1, _HALVINGS + 1):
            whole = -(-self.steps // (2**halving * self.chunk_steps)) * self.chunk_steps
            if _FIRST_LOOK <= whole < self.steps:
                found.add(whole)
        return tuple(sorted(found))

    @property
    def error_to_clear(self) -> float:
        """The error probability of the (two-sided) intervals that can clear a rule, so that the rule counts as kept.

        Each look (moment at which the rules are tested) gets an equal share of the allowed error. The rules do not divide it
        further: all must be clear, so the verdict is wrongly good only if every rule is clear.
        """
        return self.error / self._decisions

    @property
    def error_to_break(self) -> float:
        """The error probability of the (two-sided) intervals that can break a rule.

        Any rule at any look can break the verdict, so they all share the allowed error.
        """
        return self.error / (self._decisions * STATISTICAL_RULES)

    @property
    def _decisions(self) -> int:
        """How many times the rules are tested in a run: several times if the run may stop early, else only at the end."""
        return len(self.looks) if self.is_early else 1


@dataclass(frozen=True, slots=True)
class Findings:
    """Data: the outcomes of all rules after some number of steps of a probe, and the figures behind them."""

    ruling: Ruling
    decided_by: str
    rules: tuple[Rule, ...]
    comparisons: tuple[NormComparison, ...]
    gradients: tuple[GradientComparison, ...]
    delay: IntervalEstimate | None
    held_out_difference: IntervalEstimate | None

    @property
    def missing(self) -> tuple[str, ...]:
        """A text for each open rule (neither broken nor clear): the rule's name and what it still needs, such as more steps."""
        return tuple(f"{rule.name}: {rule.missing}" for rule in self.rules if rule.outcome is Outcome.OPEN)

    @property
    def reason(self) -> str:
        """A text with the finding of the rule that decided, and the range that this rule allows."""
        deciding = [rule for rule in self.rules if rule.name == self.decided_by]
        if deciding:
            return f"{deciding[0].name}: {deciding[0].found}; allowed: {deciding[0].allowed}"
        return self.decided_by


def judge(evidence: ProbeEvidence, settings: ProbeSettings) -> Findings:
    """Test all rules on the logged steps, and return the outcomes.

    Args:
        evidence: both arms, at least one step each.
        settings: the allowed error and the looks.
    """
    rules = [_finite(evidence), _identical(evidence)]
    comparisons: tuple[NormComparison, ...] = ()
    gradients: tuple[GradientComparison, ...] = ()
    longer = held_out = None
    if evidence.is_finite:
        comparisons = compare_norms(evidence, settings.error_to_clear)
        gradients = compare_gradients(evidence, settings.error_to_clear)
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


def stop_here(evidence: ProbeEvidence, settings: ProbeSettings) -> Findings | None:
    """Return the findings so far if the run may stop before all steps are taken, else ``None``.

    Between looks, only NaN, infinity and bit-equality count, because they cannot occur by chance. A bad ruling may stop the run
    at any look; the ruling that the plan is good only after half of the steps.
    """
    steps = evidence.steps
    if not evidence.is_finite:
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


def _decide(rules: Sequence[Rule]) -> tuple[Ruling, str]:
    """Return the ruling that follows from the outcomes of all rules, and the name of the rule that decided.

    If no single rule decided, return a sentence instead of the name.
    """
    order = list(Ruling)  # sorted by priority: the first ruling that applies wins
    broken = [rule for rule in rules if rule.outcome is Outcome.BROKEN]
    if broken:
        first = min(broken, key=lambda rule: order.index(rule.ruling))
        return first.ruling, first.name
    identical = next(rule for rule in rules if rule.ruling is Ruling.IDENTICAL)
    if identical.outcome is Outcome.CLEAR:
        return Ruling.IDENTICAL, identical.name
    if any(rule.outcome is Outcome.OPEN for rule in rules):
        return Ruling.UNDECIDED, "no rule is broken, but at least one rule is not clear yet"
    return Ruling.GOOD, "every rule is clear"


def _finite(evidence: ProbeEvidence) -> Rule:
    """Test the rule that losses and gradients are finite in both trainings, and return its outcome."""
    found, ruling = "all losses and gradients are finite", Ruling.DIVERGED
    for name, log, its_ruling in (
        ("baseline", evidence.baseline_log, Ruling.BASELINE_DIVERGED),
        ("plan", evidence.plan_log, Ruling.DIVERGED),
    ):
        if not log.is_finite:
            found, ruling = f"the {name}'s loss or gradient is NaN or infinite in step {len(log.steps)}", its_ruling
            break
    outcome = Outcome.CLEAR if evidence.is_finite else Outcome.BROKEN
    return Rule(name="finite", ruling=ruling, outcome=outcome, allowed="no NaN, no infinity", found=found)


def _identical(evidence: ProbeEvidence) -> Rule:
    """Test the rule that the trainings without and with the plan are equal bit for bit, in losses and gradient norms.

    If they are not, the other rules decide.
    """
    same = evidence.identical_steps
    outcome, found = Outcome.NOT_MEASURED, f"equal only in the first {same} steps"
    if evidence.is_identical:
        outcome, found = Outcome.CLEAR, f"all {same} steps are equal bit for bit"
    return Rule(
        name="identical",
        ruling=Ruling.IDENTICAL,
        outcome=outcome,
        allowed="not needed if the other rules are clear",
        found=found,
    )


def _spikes(whole: NormComparison, settings: ProbeSettings) -> Rule:
    """Test the rule that the gradient norm spikes less than twice as often with the plan as without it."""
    one, other = whole.baseline.spikes, whole.plan.spikes
    p_value = statistics.more_spikes_p_value(one, other)
    outcome = Outcome.CLEAR
    if other >= 2 * max(one, 1):
        outcome = Outcome.BROKEN if p_value < settings.error_to_break else Outcome.OPEN
    return Rule(
        name="spikes",
        ruling=Ruling.NO_COMPRESSION,
        outcome=outcome,
        allowed=f"less than twice the baseline's spikes (norms above {statistics.SPIKE:g} × the running median)",
        found=f"{other} spikes against {one}, p = {p_value:.2g}",
        missing="more steps: there are too few spikes to distinguish a doubling from chance"
        if outcome is Outcome.OPEN
        else "",
    )


@dataclass(frozen=True, slots=True)
class _Bounded:
    """Data: one measured figure with two intervals and the range that its rule allows.

    The ``wide`` interval can break the figure's rule, the ``narrow`` interval can clear it.
    """

    label: str
    wide: IntervalEstimate
    narrow: IntervalEstimate
    low: float
    high: float

    @property
    def outcome(self) -> Outcome:
        if self.wide.low > self.high or self.wide.high < self.low:
            return Outcome.BROKEN
        return Outcome.CLEAR if self.low <= self.narrow.low and self.narrow.high <= self.high else Outcome.OPEN

    @property
    def excess(self) -> float:
        """How far the figure could be outside the allowed range of its rule, at the worst end of the narrow interval.

        A negative number means that the figure is inside the range at least by this much.
        """
        return max(self.narrow.high - self.high, self.low - self.narrow.low)

    @property
    def certain_excess(self) -> float:
        """How far the figure is outside the allowed range of its rule at least, by the wide interval.

        A negative number means that the figure may be inside the range.
        """
        return max(self.wide.low - self.high, self.low - self.wide.high)


def _bounded(
    label: str,
    mean: statistics.Mean | None,
    errors: tuple[float, float],
    allowed: tuple[float, float],
    scale: Callable[[float], float] = float,
) -> list[_Bounded]:
    """Make a list with one figure and its two intervals. The list is empty if there were too few numbers for a mean.

    Args:
        label: the figure's name.
        mean: the mean of the logged numbers, or ``None`` if there were too few.
        errors: the error probability of the interval that breaks, and of the interval that clears.
        allowed: the smallest and the largest allowed value.
        scale: converts the mean into the figure.
    """
    if mean is None:
        return []
    wide, narrow = (mean.estimate(error, scale) for error in errors)
    return [_Bounded(label, wide, narrow, *allowed)]


def _judged(name: str, ruling: Ruling, allowed: str, figures: Sequence[_Bounded], missing: str) -> Rule:
    """Return the outcome of one rule that limits several figures.

    The rule is broken if any figure is broken, and clear if all figures are clear. ``missing`` says what is needed if it is
    neither.
    """
    outcome, found = Outcome.OPEN, "too few steps"
    if figures:
        outcomes = {figure.outcome for figure in figures}
        outcome = next(each for each in (Outcome.BROKEN, Outcome.OPEN, Outcome.CLEAR) if each in outcomes)
        is_broken = outcome is Outcome.BROKEN
        worst = max(figures, key=lambda figure: figure.certain_excess if is_broken else figure.excess)
        shown = worst.wide if is_broken else worst.narrow
        found = f"{worst.label} {shown.value:.4g} ({shown.low:.4g} to {shown.high:.4g})"
    return Rule(
        name=name,
        ruling=ruling,
        outcome=outcome,
        allowed=allowed,
        found=found,
        missing=missing if outcome is Outcome.OPEN else "",
    )


def _shift(evidence: ProbeEvidence, settings: ProbeSettings) -> Rule:
    """Test the rule that the plan changes the gradient norm of each block of parameters by at most a tenth."""
    # Any block can break the rule by chance, so the blocks share that error. To clear the rule, all blocks must be clear.
    errors = (settings.error_to_break / len(evidence.blocks), settings.error_to_clear)
    figures = []
    for block in evidence.blocks:
        change = evidence.norm_change(block)
        figures += _bounded(f"{block} norm", change, errors, (-MOST_SHIFT, MOST_SHIFT), statistics.share_grown)
    allowed = f"every block's norm within {-MOST_SHIFT:+.2g} to {MOST_SHIFT:+.2g}"
    return _judged("shift", Ruling.RECOMPUTE_INSTEAD, allowed, figures, "more steps, for a narrower interval")


def _gradient(evidence: ProbeEvidence, settings: ProbeSettings) -> Rule:
    """Test the rule that the plan keeps the direction and the length of each block's gradient.

    Both gradients are taken at equal parameters. The length is measured along the gradient without a plan.
    """
    # Each block has two figures, gain and cosine, and any of them can break the rule by chance.
    errors = (settings.error_to_break / (2 * len(evidence.blocks)), settings.error_to_clear)
    gains, cosines = (1 - MOST_SHIFT, 1 + MOST_SHIFT), (LEAST_COSINE, math.inf)
    figures = []
    for block in evidence.blocks:
        samples = evidence.gradients(block)
        if samples is not None:
            figures += _bounded(f"{block} gain", statistics.mean_of_samples(samples.gains), errors, gains)
            figures += _bounded(f"{block} cosine", statistics.mean_of_samples(samples.cosines), errors, cosines)
    allowed = f"every block's cosine at least {LEAST_COSINE:g}, gain {gains[0]:g} to {gains[1]:g}"
    missing = f"more comparisons at equal parameters: at least {statistics.LEAST_SAMPLES} are needed, and each chunk makes one"
    return _judged("gradient", Ruling.RECOMPUTE_INSTEAD, allowed, figures, missing)


def _delay(evidence: ProbeEvidence, settings: ProbeSettings) -> tuple[Rule, IntervalEstimate | None]:
    """Test the rule that the plan needs at most a tenth more steps than the baseline to reach the same loss.

    Return the rule's outcome and the interval of that factor.
    """
    losses, window = evidence.baseline.losses, window_of(evidence.steps)
    figures = _bounded(
        "steps ×",
        statistics.mean_of_steps((evidence.plan.losses - losses)[-window:]),
        (settings.error_to_break, settings.error_to_clear),
        (-math.inf, MOST_DELAY),
        lambda excess: statistics.delay(losses, excess, window),
    )
    allowed = f"at most {MOST_DELAY:g} × the steps for the same loss"
    missing = "more steps, until the difference in loss exceeds its noise"
    rule = _judged("steps", Ruling.NET_LOSS, allowed, figures, missing)
    return rule, figures[0].narrow if figures else None


def window_of(steps: int) -> int:
    """Return the number of steps over which losses are averaged: a fifth of the run, but at least 16 if the run has as many.

    It is at least 1, also if the baseline diverged before the plan's arm took a step.
    """
    return min(max(steps, 1), max(statistics.LEAST_STEPS, steps // 5))


def _held_out(evidence: ProbeEvidence, settings: ProbeSettings) -> tuple[Rule, IntervalEstimate | None]:
    """Test the rule that the plan's held-out loss is not much higher than the baseline's.

    It may be higher by 1%, or by the gain of a tenth more steps. Return the rule's outcome and the interval of the difference.
    """
    pair = evidence.held_out()
    allowed = f"worse by at most what {MOST_DELAY - 1:.0%} more steps gain, or by {LEAST_HELD_OUT_MARGIN:.0%}"
    if pair is None or len(pair[0]) < statistics.LEAST_SAMPLES or not np.isfinite(pair[0]).all():
        found = (
            "no held-out data"
            if pair is None
            else f"{len(pair[0])} held-out batches: too few, or their losses are not finite"
        )
        outcome = Outcome.NOT_MEASURED
    elif not np.isfinite(pair[1]).all():
        found, outcome = "the plan's held-out loss is NaN or infinite", Outcome.BROKEN
    else:
        one, other = pair
        margin = LEAST_HELD_OUT_MARGIN * abs(float(one.mean()))
        if evidence.steps >= statistics.LEAST_STEPS:
            window = window_of(evidence.steps)
            margin = max(margin, statistics.loss_of_delay(evidence.baseline.losses, MOST_DELAY, window))
        errors = (settings.error_to_break, settings.error_to_clear)
        figures = _bounded("loss", statistics.mean_of_samples(other - one), errors, (-math.inf, margin))
        missing = "more held-out batches, or more steps"
        rule = _judged("held-out", Ruling.NET_LOSS, f"{allowed}: {margin:.4g}", figures, missing)
        return rule, figures[0].narrow if figures else None
    return Rule(name="held-out", ruling=Ruling.NET_LOSS, outcome=outcome, allowed=allowed, found=found), None
