"""Paired timing: order, threads, ratios and their intervals."""

import pytest
import torch

from plimsoll.tracing.meters.timing import Timing, median_interval, one_thread, paired_ratio, time_in_turns


def test_steps_are_taken_in_turns_and_the_order_turns_around():
    calls: list[str] = []
    timings = time_in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmups=2)
    assert "".join(calls) == "abab" + "ab" + "ba" + "ab"
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]
    assert list(timings) == ["a", "b"]


def test_threads_come_back_also_after_an_exception():
    before = torch.get_num_threads()
    seen: list[int] = []
    time_in_turns({"a": lambda: seen.append(torch.get_num_threads())}, rounds=1)
    assert set(seen) == {1}
    with pytest.raises(ZeroDivisionError), one_thread():
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == before


def test_ratio_is_taken_within_rounds():
    drifting = Timing("theirs", (1.0, 2.0, 4.0, 8.0))
    ours = Timing("ours", (1.1, 2.2, 4.4, 8.8))
    ratio = paired_ratio(ours, drifting)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.1, 1.1, 1.1))


def test_interval_is_deterministic_and_leaves_the_generators_alone():
    before = torch.get_rng_state()
    samples = [1.0, 1.1, 0.9, 1.3, 1.05, 0.97]
    assert median_interval(samples) == median_interval(samples)
    assert torch.equal(torch.get_rng_state(), before)


def test_spread_is_half_the_distance_between_quartiles():
    assert Timing("a", (1.0, 2.0, 3.0, 4.0, 5.0)).spread_seconds == 1.0
    assert Timing("a", (1.0,)).spread_seconds == 0.0
