"""A verdict: how training under a plan changes gradients, loss and speed, compared with the same training without the plan.

Each of the two runs is an *arm*: the baseline arm trains without the plan, the plan arm with it.

Numbers that are not finite are ``None``. How each figure is defined is in docs/probe.md.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import AdvisedEnum, ArtifactBase


class Ruling(AdvisedEnum):
    """The possible rulings of a probe, which trains with and without a plan.

    A verdict has the first ruling, in this order, that applies.
    """

    BASELINE_DIVERGED = (
        "BASELINE_DIVERGED",
        "Training without a plan reaches NaN or infinity: fix the target (learning rate, data, "
        "precision) before you judge a plan by it.",
    )
    DIVERGED = (
        "DIVERGED",
        "Do not train with this plan: its loss or gradient is NaN or infinite where plain training is finite.",
    )
    IDENTICAL = "IDENTICAL", "Train with this plan: every loss and every gradient norm is equal bit for bit."
    NO_COMPRESSION = (
        "NO_COMPRESSION",
        "Do not compress here: gradient norms spike at least twice as often; recompute or offload instead.",
    )
    RECOMPUTE_INSTEAD = (
        "RECOMPUTE_INSTEAD",
        "Recompute instead of compressing: the plan changes the gradient by more than 10%.",
    )
    NET_LOSS = (
        "NET_LOSS",
        "Do not use this plan: it needs more steps or ends with a worse loss, by more than noise explains.",
    )
    GOOD = "GOOD", "Train with this plan: gradients, loss and held-out loss stay within the stated limits."
    UNDECIDED = "UNDECIDED", "Not enough data to decide: see what is missing."

    @property
    def is_pass(self) -> bool:
        """Whether training may rely on the plan."""
        return self in (Ruling.GOOD, Ruling.IDENTICAL)


class Outcome(enum.StrEnum):
    """The possible results of one rule. A rule compares the confidence interval of a measured figure with an allowed range."""

    CLEAR = "CLEAR"
    """The confidence interval is within the allowed range."""
    BROKEN = "BROKEN"
    """The confidence interval is outside the allowed range."""
    OPEN = "OPEN"
    """There is not enough data to decide yet."""
    NOT_MEASURED = "NOT_MEASURED"
    """The probe could not measure the rule's figure, for example because held-out data is missing."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one rule of a verdict: what the rule allows, what was found (in words and numbers), and the outcome.

    If the outcome is ``OPEN``, ``missing`` says which data is missing.
    """

    name: str
    ruling: Ruling
    """The ruling that the probe gives if this rule is broken."""
    outcome: Outcome
    allowed: str
    found: str
    missing: str = ""


class IntervalEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Data: a number with its confidence interval, from ``low`` to ``high``."""

    value: float
    low: float
    high: float


class NormSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Data: a summary of the gradient norms of one arm (one of the two training runs): quantiles, spikes and tails.

    ``quantiles`` are taken at ``NORM_QUANTILES``. ``spikes`` counts norms far above the running median. ``kurtosis`` is the
    excess over the kurtosis of a normal distribution.
    """

    median: float
    percentile_95: float
    largest: float
    spikes: int
    kurtosis: float | None
    quantiles: tuple[float, ...]


NORM_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""The levels of the quantiles in ``NormSummary.quantiles``, in the same order."""

WHOLE_MODEL = "whole model"
"""The name for the figures of the whole model. It is used instead of a block's name."""


class NormComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the gradient norms of one block (or of the whole model) with and without the plan, at the same steps.

    ``shift`` is the mean change of the norm, as a share: 0.1 is a tenth larger. ``p_value`` comes from a two-sample test
    (Kolmogorov-Smirnov distance, arms swapped by whole runs of steps); ``adjusted_p_value`` is corrected for the number of
    blocks. ``shift`` and both p-values are ``None`` if there are too few steps.
    """

    block: str
    baseline: NormSummary
    plan: NormSummary
    shift: IntervalEstimate | None
    p_value: float | None = None
    adjusted_p_value: float | None = None


class GradientComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the plan's gradient compared with the gradient g without a plan, over ``samples`` steps.

    In each step, parameters, batch and random state are the same for both gradients. ``relative_error`` is ‖Δg‖ / ‖g‖, and
    ``largest_error`` is the largest such error seen. ``cosine`` is the cosine of the angle between the two gradients. ``gain``
    is the length of the plan's gradient in the direction of g, divided by the length of g (1: neither shortened nor stretched).
    ``cosine`` and ``gain`` are ``None`` if there are too few samples for an interval.
    """

    block: str
    samples: int
    relative_error: float
    largest_error: float
    cosine: IntervalEstimate | None
    gain: IntervalEstimate | None


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the results of one arm (one of the two training runs): losses, speed and peak.

    ``final_loss`` is the mean loss of the last ``Verdict.window`` steps. ``steps_to_target`` is the first step at which the
    mean loss over a window of that length is at most the target loss; ``None`` if it never is. ``seconds_to_target`` is this
    number of steps times the median seconds of a step. ``held_out_loss`` is the mean over the held-out batches, and
    ``perplexity`` is its exponential.
    """

    name: str
    final_loss: float | None
    held_out_loss: float | None = None
    perplexity: float | None = None
    steps_to_target: int | None = None
    seconds_to_target: float | None = None
    measured_step_seconds: float | None = None
    items_per_second: float | None = None
    measured_peak_bytes: int | None = None


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the loss and the norm of the whole gradient at each step, with and without the plan; ``None`` if not finite."""

    baseline_losses: tuple[float | None, ...]
    plan_losses: tuple[float | None, ...]
    baseline_norms: tuple[float | None, ...]
    plan_norms: tuple[float | None, ...]


class Verdict(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Data: how training under a plan compares with training without one. ``plimsoll.probe`` makes it; ``str`` shows it.

    ``decided_by`` names the rule that gave the ruling; ``missing`` says what an undecided verdict lacks. ``comparisons`` and
    ``gradients`` begin with the whole model.
    """

    KIND: ClassVar[str] = "verdict"
    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    ruling: Ruling
    decided_by: str
    reason: str
    missing: tuple[str, ...] = ()
    model: str
    fingerprint: str
    signature: str
    device: str
    strategy: str
    is_lossless: bool
    optimizer: str
    data: str
    """A text that says where the batches came from."""
    versions: dict[str, str]
    seed: int
    steps: int
    """The number of steps that each of the two runs took."""
    planned_steps: int
    confidence: float
    """Confidence level of each interval: 1 minus its error probability."""
    rules: tuple[Rule, ...]
    baseline: ArmSummary
    plan: ArmSummary
    target_loss: float | None
    window: int
    """The number of consecutive steps over which losses are averaged."""
    items: str
    """What ``items_per_second`` counts: tokens or examples."""
    delay: IntervalEstimate | None = None
    """How many times as many steps the plan needs to reach the same loss: its number of steps divided by the baseline's (1:
    equal).
    """
    held_out_difference: IntervalEstimate | None = None
    """The held-out loss with the plan minus the held-out loss without the plan."""
    comparisons: tuple[NormComparison, ...]
    gradients: tuple[GradientComparison, ...] = ()
    curves: Curves
    notes: tuple[str, ...] = ()

    @property
    def is_early(self) -> bool:
        """Whether the probe stopped before all planned steps because the ruling was clear."""
        return self.steps < self.planned_steps

    @property
    def exit_code(self) -> int:
        """The exit status of the command line: 0 if training may rely on the plan, else 1."""
        return 0 if self.ruling.is_pass else 1
