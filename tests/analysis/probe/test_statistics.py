"""The probe's statistics against known answers, and how often they raise a false alarm."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.signal import lfilter

from plimsoll.analysis.probe import statistics


def autocorrelated(random: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """An AR(1) series of mean 0, past its start."""
    noise = random.normal(size=count + 200)
    return lfilter([1.0], [1.0, -correlation], noise)[200:]


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("count", [80, 500])
def test_an_interval_misses_the_mean_of_autocorrelated_noise_no_more_often_than_stated(correlation: float, count: int):
    random, error, trials = np.random.default_rng(0), 0.05, 500
    missed = 0
    for _ in range(trials):
        low, high = statistics.mean_of_steps(autocorrelated(random, count, correlation)).interval(error)
        missed += not low <= 0.0 <= high
    # The stated error, with room for the noise of 500 trials and for half a point of bias.
    assert missed <= stats.binom.isf(0.001, trials, 1.1 * error)


def test_an_interval_for_independent_numbers_is_not_wider_than_need_be():
    series = np.random.default_rng(1).normal(size=2000)
    low, high = statistics.mean_of_steps(series).interval(0.05)
    assert (high - low) == pytest.approx(2 * 1.96 / math.sqrt(2000), rel=0.35)


def test_blocks_grow_with_the_correlation_of_neighbours():
    random = np.random.default_rng(2)
    lengths = [statistics.block_length(autocorrelated(random, 2000, each)) for each in (0.0, 0.6, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[-1] > 2 * lengths[0]


def test_a_constant_series_is_known_exactly():
    mean = statistics.mean_of_steps(np.full(50, 0.25))
    assert mean.interval(1e-6) == (0.25, 0.25)


def test_too_few_numbers_give_no_interval():
    assert statistics.mean_of_steps(np.zeros(statistics.LEAST_STEPS - 1)) is None
    assert statistics.mean_of_samples(np.zeros(2)) is None
    assert statistics.swapped_p_value(np.ones(5), np.ones(5)) is None


def test_independent_samples_get_students_interval():
    samples = np.array([1.0, 2.0, 4.0, 7.0])
    expected = stats.t.interval(0.9, 3, loc=samples.mean(), scale=stats.sem(samples))
    assert statistics.mean_of_samples(samples).interval(0.1) == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(min_value=1e-3, max_value=1e3))
def test_a_constant_factor_between_the_arms_is_found_exactly(scale: float):
    norms = np.exp(np.random.default_rng(3).normal(size=100))
    mean = statistics.mean_of_steps(statistics.log_ratios(norms, scale * norms))
    assert math.exp(mean.value) == pytest.approx(scale)
    assert mean.standard_error < 1e-9


def test_norms_of_zero_count_as_a_thousandfold_change_unless_both_are():
    ratios = statistics.log_ratios(np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, 2.0]))
    assert ratios.tolist() == pytest.approx([-math.log(1000), 0.0, math.log(1000)])


def test_equal_samples_are_as_likely_as_can_be_and_those_of_another_shape_are_told_apart():
    random = np.random.default_rng(5)
    one, other = random.normal(10, 1, 400), random.normal(10, 3, 400)
    assert statistics.swapped_p_value(one, one) == 1.0
    assert statistics.swapped_p_value(one, other) < 0.01


@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_the_two_sample_test_raises_no_more_false_alarms_than_stated(correlation: float):
    random, trials = np.random.default_rng(6), 60
    alarms = 0
    for _ in range(trials):
        common = autocorrelated(random, 150, 0.9)
        one, other = (np.exp(common + autocorrelated(random, 150, correlation)) for _ in range(2))
        alarms += statistics.swapped_p_value(one, other) <= 0.05
    assert alarms <= stats.binom.isf(0.001, trials, 0.06)


def test_p_values_are_corrected_as_by_holm():
    assert statistics.adjusted([0.01, 0.02, 0.9]) == pytest.approx([0.03, 0.04, 0.9])
    assert statistics.adjusted([]) == []


@given(st.lists(st.floats(min_value=0, max_value=1), max_size=20))
def test_a_corrected_p_value_is_never_smaller(p_values: list[float]):
    corrected = statistics.adjusted(p_values)
    assert all(one <= other <= 1 for one, other in zip(p_values, corrected, strict=True))


def test_spikes_are_counted_once_however_long_they_last_and_falling_norms_are_none():
    norms = np.ones(200)
    norms[[50, 51, 52, 90]] = 3.5
    norms[120] = 2.9
    assert statistics.count_spikes(norms) == 2
    assert statistics.count_spikes(np.exp(-np.arange(200) / 20)) == 0


def test_spikes_are_compared_by_a_binomial_test():
    assert statistics.more_spikes_p_value(0, 0) == 1.0
    assert statistics.more_spikes_p_value(2, 10) == pytest.approx(float(stats.binom.sf(9, 12, 0.5)))


def test_kurtosis_is_that_of_a_known_distribution():
    random = np.random.default_rng(7)
    assert statistics.kurtosis(random.normal(size=50_000)) == pytest.approx(0.0, abs=0.1)
    assert statistics.kurtosis(random.laplace(size=50_000)) == pytest.approx(3.0, abs=0.5)
    assert statistics.kurtosis(np.full(10, 0.3)) is None


def test_a_loss_that_an_earlier_step_had_is_a_delay_of_so_many_steps():
    losses = 5.0 - 0.01 * np.arange(300)
    window = 60
    assert statistics.delay(losses, 0.0, window) == 1.0
    assert statistics.delay(losses, -1.0, window) == 1.0
    last_middle = 300 - (window - 1) / 2
    assert statistics.delay(losses, 0.3, window) == pytest.approx(last_middle / (last_middle - 30), rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(ratio=st.floats(min_value=1.0, max_value=3.0))
def test_the_loss_of_a_delay_is_the_delay_the_other_way_round(ratio: float):
    losses = 5.0 / np.sqrt(np.arange(1, 301))
    excess = statistics.loss_of_delay(losses, ratio, 40)
    assert statistics.delay(losses, excess, 40) == pytest.approx(ratio, rel=1e-6)


def test_the_target_is_reached_when_the_mean_of_the_window_is_as_low():
    losses = np.array([5.0, 1.0, 4.0, 3.0, 2.0, 1.0])
    assert statistics.first_step_at(losses, 3.0, 2) == 2
    assert statistics.first_step_at(losses, 1.5, 2) == 6
    assert statistics.first_step_at(losses, 1.0, 2) is None
    assert statistics.first_step_at(losses[:1], 9.0, 2) is None
