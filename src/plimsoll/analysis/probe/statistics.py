"""Intervals, p-values, spikes and delays of the series that two arms (training without and with a plan) log. It uses NumPy
arrays and does not import torch.

Both arms see the same batch at the same step, so differences are taken step by step. Consecutive differences are not
independent. So the standard error of a mean comes from the moving-block bootstrap, in the closed form for infinitely many
resamples, with the correction for overlapping batch means. The autocorrelation determines the block length. The interval is
Student's, with one degree of freedom less than the number of blocks.

Source: Künsch, "The jackknife and the bootstrap for general stationary observations", Annals of Statistics 17 (1989); Meketon
and Schmeiser, "Overlapping batch means", Winter Simulation Conference 1984 (the correction); Andrews, "Heteroskedasticity and
autocorrelation consistent covariance matrix estimation", Econometrica 59 (1991), equations 6.2 and 6.4 (the block length).
Known weakness: with fewer than about ten blocks, intervals are wide and a drift over the whole series looks like noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from plimsoll.artifacts.verdict import IntervalEstimate

Series = NDArray[np.float64]

LEAST_STEPS = 16
"""The smallest number of steps for an interval. With fewer steps, intervals are not computed."""
LEAST_SAMPLES = 3
SPIKE = 3.0
"""A norm above this multiple of the running median is a spike."""
_MOST_CORRELATION = 0.97
"""The largest correlation that is used: higher ones are reduced to it, because the formula for the block length diverges at 1.
"""
_LEAST_BLOCKS = 4
"""The bootstrap divides a series into at least this many blocks."""
_LONGER = 2.0
"""A factor on the block length that Andrews' formula gives.

With the length of least mean squared error, intervals missed the true mean too often (docs/probe.md has the shares of misses
with this factor).
"""
_PERMUTATIONS = 999
_MOST_RATIO = 1000.0
_MOST_LOGARITHM = 50.0
"""The largest logarithm that is used: a ratio of exp(50) is as good as infinite."""
_RUNNING_WINDOW = 50
_LEAST_WINDOW = 10


@dataclass(frozen=True, slots=True)
class Mean:
    """Data: a mean with its standard error and its degrees of freedom. Its methods compute confidence intervals."""

    value: float
    standard_error: float
    freedom: float

    def interval(self, error: float) -> tuple[float, float]:
        """Return the lower and the upper end of the confidence interval; it is wrong with probability ``error``."""
        reach = float(stats.t.isf(error / 2, self.freedom)) * self.standard_error
        return self.value - reach, self.value + reach

    def estimate(self, error: float, scale: Callable[[float], float] = float) -> IntervalEstimate:
        """Return the mean and both ends of its confidence interval, each converted by the function ``scale``.

        The interval is wrong with probability ``error``.
        """
        low, high = self.interval(error)
        return IntervalEstimate(value=scale(self.value), low=scale(low), high=scale(high))


def block_length(series: Series) -> int:
    """Return the number of consecutive steps in one block of the bootstrap.

    It follows from the correlation of neighbouring numbers.

    Example:
        >>> block_length(np.random.default_rng(0).normal(size=1000))
        20
    """
    count = len(series)
    centred = series - series.mean()
    energy = float(centred @ centred)
    correlation = float(centred[1:] @ centred[:-1]) / energy if energy else 0.0
    correlation += (1 + 3 * correlation) / count  # the estimate is too small by about this much
    correlation = min(max(correlation, 0.0), _MOST_CORRELATION)
    alpha = 4 * correlation**2 / (1 - correlation**2) ** 2
    length = _LONGER * max(1.1447 * (alpha * count) ** (1 / 3), count ** (1 / 3))
    return int(min(max(1, round(length)), count // _LEAST_BLOCKS))


def mean_of_steps(series: Series) -> Mean | None:
    """Return the mean of numbers logged at consecutive steps, with a standard error that allows for their correlation.

    ``None`` for fewer than ``LEAST_STEPS`` numbers.
    """
    count = len(series)
    if count < LEAST_STEPS:
        return None
    length = block_length(series)
    sums = np.concatenate(([0.0], np.cumsum(series - series.mean())))
    block_means = (sums[length:] - sums[:-length]) / length
    spread = float(block_means @ block_means) / len(block_means)
    variance = spread * length / count / (1 - length / count)
    return Mean(float(series.mean()), math.sqrt(variance), count / length - 1)


def mean_of_samples(samples: Series) -> Mean | None:
    """Return the mean of independent numbers, with its standard error; ``None`` for fewer than three numbers."""
    count = len(samples)
    if count < LEAST_SAMPLES:
        return None
    return Mean(float(samples.mean()), float(samples.std(ddof=1)) / math.sqrt(count), count - 1)


def log_ratios(baseline: Series, plan: Series) -> Series:
    """Return, for each step, the logarithm of the plan's norm divided by the baseline's norm.

    Ratios are clipped to 1/1000 … 1000.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(plan) - np.log(baseline)
    ratios[(plan == 0) & (baseline == 0)] = 0.0
    bound = math.log(_MOST_RATIO)
    return np.asarray(np.clip(ratios, -bound, bound), dtype=np.float64)


def share_grown(logarithm: float) -> float:
    """Return the relative increase that an increase of a logarithm means: 0.1 for 10% more."""
    return math.expm1(min(logarithm, _MOST_LOGARITHM))


def swapped_p_value(baseline: Series, plan: Series) -> float | None:
    """Return the p-value of a permutation test: how probable this distance between the two arms is if the arms are
    exchangeable.

    The distance is Kolmogorov and Smirnov's. Arms are swapped in whole blocks of steps, whose length follows from the
    autocorrelation of the log-ratio. The result is ``None`` for fewer than ``LEAST_STEPS`` steps.
    """
    if len(baseline) < LEAST_STEPS:
        return None
    length = block_length(log_ratios(baseline, plan))
    blocks = np.arange(len(baseline)) // length
    values = np.concatenate((baseline, plan))
    order = np.argsort(values, kind="stable")
    is_last_of_equals = np.append(np.diff(values[order]) > 0, True)
    signs = np.concatenate((np.ones(len(baseline)), -np.ones(len(plan))))
    seen = _distances(signs[order][None, :], is_last_of_equals)[0]
    flips = np.random.default_rng(0).choice((-1.0, 1.0), size=(_PERMUTATIONS, int(blocks[-1]) + 1))
    swapped = (signs * np.concatenate((flips[:, blocks], flips[:, blocks]), axis=1))[:, order]
    reached = _distances(swapped, is_last_of_equals) >= seen - 1e-9
    return float((1 + reached.sum()) / (1 + _PERMUTATIONS))


def _distances(signs: Series, is_last_of_equals: NDArray[np.bool_]) -> Series:
    """Return, for each row, the Kolmogorov-Smirnov distance of its two samples, times the sample size.

    A row lists the values in ascending order, by sample: 1 for a value of the first sample, -1 for a value of the second.
    """
    steps = np.abs(np.cumsum(signs, axis=1))[:, is_last_of_equals]
    return np.asarray(steps.max(axis=1), dtype=np.float64)


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for multiple tests, in the given order (Holm, Scandinavian Journal of Statistics 6, 1979).

    Example:
        >>> adjusted([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    found, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        found[index] = largest
    return found


def count_spikes(norms: Series) -> int:
    """Return how often a gradient norm spikes: rises above three times the median of the previous 50 steps.

    Consecutive steps above count once. The first 10 steps are not tested.
    """
    if len(norms) <= _LEAST_WINDOW:
        return 0
    medians = [np.median(norms[max(0, i - _RUNNING_WINDOW) : i]) for i in range(_LEAST_WINDOW, len(norms))]
    is_spike = norms[_LEAST_WINDOW:] > SPIKE * np.asarray(medians)
    return int(is_spike[0]) + int((is_spike[1:] & ~is_spike[:-1]).sum())


def more_spikes_p_value(baseline: int, plan: int) -> float:
    """Return the p-value of a binomial test: how probable it is that the plan has at least this share of the spikes by luck.

    Under the null hypothesis, both arms have spikes equally often.

    Example:
        >>> more_spikes_p_value(0, 4)
        0.0625
    """
    if not baseline + plan:
        return 1.0
    return float(stats.binomtest(plan, baseline + plan, 0.5, alternative="greater").pvalue)


def kurtosis(series: Series) -> float | None:
    """Return the excess kurtosis (0 for a normal distribution).

    Return ``None`` for fewer than four numbers, or if all numbers are equal.
    """
    if len(series) < 4 or np.ptp(series) <= 1e-12 * abs(float(series[0])):
        return None
    found: Any = stats.kurtosis(series, bias=False)
    return float(found)


def trailing_means(series: Series, window: int) -> Series:
    """Return the running mean of a series: an array with the mean of each ``window`` consecutive numbers.

    The first entry is the mean of the first ``window`` numbers.
    """
    sums = np.concatenate(([0.0], np.cumsum(series)))
    return np.asarray((sums[window:] - sums[:-window]) / window, dtype=np.float64)


def first_step_at(series: Series, target: float, window: int) -> int | None:
    """Return how many steps it takes until the mean of the last ``window`` numbers is at most ``target``, else ``None``."""
    if len(series) < window:
        return None
    reached = np.flatnonzero(trailing_means(series, window) <= target)
    return int(reached[0]) + window if len(reached) else None


def delay(losses: Series, excess: float, window: int) -> float:
    """Return how many times as many steps a training needs if its final loss exceeds the baseline's by ``excess``.

    The factor is 1 if the loss is not higher. The baseline had that higher loss at an earlier step. The result is a ratio of
    steps: the step at which the baseline first reached its final loss, divided by that earlier step. Each step is the middle of
    the averaging window.

    Args:
        losses: the baseline's losses, one per step.
        excess: the plan's mean loss over the last ``window`` steps, minus the baseline's.
        window: steps over which losses are averaged.
    """
    means = np.minimum.accumulate(trailing_means(losses, window))
    middle = (window + 1) / 2
    final, earlier = (_place(means, float(means[-1]) + more) for more in (0.0, max(excess, 0.0)))
    return (final + middle) / (earlier + middle)


def loss_of_delay(losses: Series, ratio: float, window: int) -> float:
    """Return how much higher the baseline's loss was after ``1 / ratio`` of its steps, compared with its final loss.

    This is the inverse of ``delay``.
    """
    means = np.minimum.accumulate(trailing_means(losses, window))
    middle = (window + 1) / 2
    place = max(0.0, (_place(means, float(means[-1])) + middle) / ratio - middle)
    return float(np.interp(place, np.arange(len(means)), means) - means[-1])


def _place(falling: Series, level: float) -> float:
    """Return the position, interpolated between entries, at which a falling series first reaches ``level``."""
    reached = int(np.searchsorted(-falling, -level, side="left"))
    if reached == 0:
        return 0.0
    before, after = float(falling[reached - 1]), float(falling[reached])
    return reached - 1 + (before - level) / (before - after)
