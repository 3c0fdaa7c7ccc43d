"""The log records of a probe's two arms (training without and with the plan), and the comparisons of these logs.

The rules and the verdict use the comparisons. Numbers that are not finite are ``None`` in the records, so that the log is valid
JSON. This file does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from plimsoll.analysis.probe import statistics
from plimsoll.analysis.probe.statistics import Series
from plimsoll.artifacts.verdict import NORM_QUANTILES, WHOLE_MODEL, GradientComparison, NormComparison, NormSummary

BASELINE, PLAN = "baseline", "plan"
ARMS = (BASELINE, PLAN)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the log record of one training step.

    ``seconds`` is ``None`` if Plimsoll records ops in the step or the peak is measured, because the step's time is then not
    typical. ``peak_bytes`` is ``None`` unless the peak is measured.
    """

    step: int
    loss: float | None
    gradient_norm: float | None
    block_norms: tuple[float | None, ...]
    seconds: float | None = None
    peak_bytes: int | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradient of this step are finite."""
        return self.loss is not None and self.gradient_norm is not None

    def is_same(self, other: StepRecord) -> bool:
        """Whether this step and another have bit for bit the same loss and the same gradient norms."""
        ours = (self.step, self.loss, self.gradient_norm, self.block_norms)
        return self.is_finite and ours == (other.step, other.loss, other.gradient_norm, other.block_norms)


class GradientRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one comparison of the plan's gradient with the gradient without a plan, for each block of parameters.

    A block has their inner product and both squared norms.
    """

    step: int
    products: tuple[float, ...]
    baseline_squares: tuple[float, ...]
    plan_squares: tuple[float, ...]

    @property
    def columns(self) -> tuple[tuple[float, ...], ...]:
        return self.products, self.baseline_squares, self.plan_squares


class HeldOutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the log record of one evaluation: the loss of each held-out batch (a batch that is not trained on) after ``steps``
    training steps.
    """

    steps: int
    losses: tuple[float | None, ...]


class ArmLog(msgspec.Struct, kw_only=True):
    """Data: the log of one arm (the training without or with the plan): its steps, gradient comparisons and evaluations."""

    steps: list[StepRecord] = []
    gradients: list[GradientRecord] = []
    held_out: list[HeldOutRecord] = []

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradient of all logged steps are finite.

        Training ends at the first step that is not finite, so only the last step is tested.
        """
        return not self.steps or self.steps[-1].is_finite

    def lines(self) -> list[bytes]:
        """Return the log as a list of JSON lines, in the order of the steps."""
        encode = msgspec.json.encode
        tagged = [
            *((record.step, 0, encode({"gradient": record})) for record in self.gradients),
            *((record.step, 1, encode(record)) for record in self.steps),
            *((record.steps, 2, encode({"held_out": record})) for record in self.held_out),
        ]
        return [line for _, _, line in sorted(tagged, key=lambda each: each[:2])]


@dataclass(frozen=True, slots=True)
class Arm:
    """Data: the logged numbers of one arm (the training without or with the plan), as series with one number for each step.

    A last step that is not finite is left out.
    """

    losses: Series
    norms: dict[str, Series]
    """A mapping from the name of each block of parameters to a series: the block's gradient norm at each step. The whole model
    comes first."""


@dataclass(frozen=True, slots=True)
class GradientSamples:
    """Data: how one block's gradients with the plan compare with those without, as series with one number per comparison.

    ``errors`` are relative errors of the plan's gradient. ``cosines`` are cosines of the angle to the gradient without a plan.
    ``gains`` are the plan's gradient's lengths along the gradient without a plan, relative to the unmanaged gradient's length.
    """

    errors: Series
    cosines: Series
    gains: Series


class ProbeEvidence:
    """The logs of both arms (training without and with the plan) as series, and the comparisons of the two.

    Args:
        baseline: the log of the training without the plan.
        plan: the log of the training with the plan; it has the same length unless one of the two went to NaN.
        blocks: names of the blocks, in the order of the records' norms.
    """

    def __init__(self, baseline: ArmLog, plan: ArmLog, blocks: tuple[str, ...]) -> None:
        self.baseline_log = baseline
        self.plan_log = plan
        self.blocks = (WHOLE_MODEL, *blocks)
        self.steps = min(len(baseline.steps), len(plan.steps))
        self.baseline = self._arm(baseline)
        self.plan = self._arm(plan)

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradients of both trainings (without and with the plan) are finite."""
        return self.baseline_log.is_finite and self.plan_log.is_finite

    @property
    def identical_steps(self) -> int:
        """How many steps at the beginning are equal bit for bit, in losses and gradient norms, without and with the plan."""
        pairs = zip(self.baseline_log.steps, self.plan_log.steps, strict=False)
        return next((i for i, (one, other) in enumerate(pairs) if not one.is_same(other)), self.steps)

    @property
    def is_identical(self) -> bool:
        """Whether losses and gradient norms of all steps have the same bits without and with the plan."""
        return 0 < self.steps == self.identical_steps and len(self.baseline_log.steps) == len(self.plan_log.steps)

    def gradients(self, block: str) -> GradientSamples | None:
        """Return the comparisons of one block's gradients without and with the plan; ``None`` if none of them is usable."""
        index = self.blocks.index(block) - 1  # -1 is the whole model, which the records do not list as a block
        sums = [
            [math.fsum(column) if index < 0 else column[index] for column in record.columns]
            for record in self.plan_log.gradients
        ]
        usable = [(product, one, other) for product, one, other in sums if one > 0 and math.isfinite(other)]
        if not usable:
            return None
        products, ones, others = (np.asarray(column, dtype=np.float64) for column in zip(*usable, strict=True))
        errors = np.sqrt(np.maximum(ones + others - 2 * products, 0.0) / ones)
        lengths = np.sqrt(ones * others)
        cosines = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
        return GradientSamples(errors, np.minimum(cosines, 1.0), products / ones)

    def norm_change(self, block: str) -> statistics.Mean | None:
        """Return how much the plan changes a block's gradient norm, as the mean logarithm of a ratio.

        The ratio is the norm with the plan divided by the norm without it, at each step. Return ``None`` if there are too few
        steps.
        """
        return statistics.mean_of_steps(statistics.log_ratios(self.baseline.norms[block], self.plan.norms[block]))

    def held_out(self) -> tuple[Series, Series] | None:
        """Return two series: the losses of the held-out batches without and with the plan, at the latest evaluation of both.

        ``None`` if no evaluation was made in both trainings.
        """
        ours = {record.steps: record.losses for record in self.plan_log.held_out}
        for record in reversed(self.baseline_log.held_out):
            if record.steps in ours:
                return _floats(record.losses), _floats(ours[record.steps])
        return None

    def _arm(self, log: ArmLog) -> Arm:
        steps = log.steps[: self.steps]
        if steps and not steps[-1].is_finite:
            steps = steps[:-1]
        losses = _floats(tuple(record.loss for record in steps))
        norms = {self.blocks[0]: _floats(tuple(record.gradient_norm for record in steps))}
        for index, block in enumerate(self.blocks[1:]):
            norms[block] = _floats(tuple(record.block_norms[index] for record in steps))
        return Arm(losses, norms)


def _floats(numbers: tuple[float | None, ...]) -> Series:
    return np.asarray([math.nan if number is None else number for number in numbers], dtype=np.float64)


def compare_norms(evidence: ProbeEvidence, error: float) -> tuple[NormComparison, ...]:
    """Return, for each block of parameters, a comparison of its gradient norms without and with the plan.

    The intervals are wrong with probability ``error``.
    """
    made, p_values = [], []
    for block in evidence.blocks:
        one, other = evidence.baseline.norms[block], evidence.plan.norms[block]
        change = evidence.norm_change(block)
        shift = None if change is None else change.estimate(error, statistics.share_grown)
        p_value = statistics.swapped_p_value(one, other)
        p_values.append(p_value)
        made.append(
            NormComparison(block=block, baseline=_summarise(one), plan=_summarise(other), shift=shift, p_value=p_value)
        )
    known = [p_value for p_value in p_values if p_value is not None]
    if len(known) < len(made):
        return tuple(made)
    corrected = statistics.adjusted(known)
    return tuple(msgspec.structs.replace(each, adjusted_p_value=p) for each, p in zip(made, corrected, strict=True))


def _summarise(norms: Series) -> NormSummary:
    """Return a summary of one block's gradient norms in one training: median, quantiles, spikes and kurtosis."""
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


def compare_gradients(evidence: ProbeEvidence, error: float) -> tuple[GradientComparison, ...]:
    """Return, for each block of parameters, a comparison of the gradients with and without the plan.

    Both gradients were computed at the same parameters. The intervals are wrong with probability ``error``.
    """
    made = []
    for block in evidence.blocks:
        samples = evidence.gradients(block)
        if samples is None:
            continue
        cosine, gain = (statistics.mean_of_samples(each) for each in (samples.cosines, samples.gains))
        made.append(
            GradientComparison(
                block=block,
                samples=len(samples.errors),
                relative_error=float(np.median(samples.errors)),
                largest_error=float(samples.errors.max()),
                cosine=None if cosine is None else cosine.estimate(error),
                gain=None if gain is None else gain.estimate(error),
            )
        )
    return tuple(made)
