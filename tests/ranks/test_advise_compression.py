"""Ranks ask together whether compressing gradients pays: all get the same answer, and nothing of theirs has changed."""

from __future__ import annotations

from typing import Any

import pytest

from launching import launch
from plimsoll.artifacts.store import from_json
from plimsoll.artifacts.traffic import Traffic, TrafficRuling, Transfer
from plimsoll.distributed import advise_compression
from plimsoll.errors import InvalidOption

RANKS = 2


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    return launch(RANKS, "ranks.weighing:everything")


@pytest.fixture(scope="module")
def traffic(told: list[dict[str, Any]]) -> Traffic:
    found = from_json(told[0]["traffic"])
    assert isinstance(found, Traffic)
    return found


def test_all_ranks_get_the_same_answer(told: list[dict[str, Any]]):
    assert told[0]["traffic"] == told[1]["traffic"]


def test_model_gradients_and_random_state_are_as_before(told: list[dict[str, Any]]):
    assert all(rank["untouched"] for rank in told)


def test_no_hook_of_the_wrapper_stays_on_the_model(told: list[dict[str, Any]]):
    assert [rank["hooks_left"] for rank in told] == [0, 0]


def test_every_method_is_measured_and_predicted(traffic: Traffic):
    assert [method.method for method in traffic.methods] == ["none", "powersgd:2", "topk:10%"]
    for method in traffic.methods:
        assert method.measured_step_seconds is not None
        assert 0 < method.predicted_step_seconds.low <= method.predicted_step_seconds.high
        assert method.predicted_step_seconds.value > traffic.step.measured_compute_seconds


def test_uncompressed_gradients_pass_whole_and_in_one_all_reduce_per_bucket(traffic: Traffic):
    plain, *others = traffic.methods
    assert plain.wire_bytes == traffic.gradient_bytes
    assert plain.transfers == len(traffic.step.buckets) > 1
    assert all(other.wire_bytes < plain.wire_bytes for other in others)


def test_buckets_fill_in_turn_within_the_step(traffic: Traffic):
    ready = [bucket.measured_ready_seconds for bucket in traffic.step.buckets]
    assert ready == sorted(ready)
    assert ready[0] > 0
    assert ready[-1] <= traffic.step.measured_compute_seconds


def test_the_link_was_timed_for_what_the_methods_do(traffic: Traffic):
    assert {link.transfer for link in traffic.links} == {Transfer.ALL_REDUCE, Transfer.ALL_GATHER}
    assert all(link.bytes_per_second > 0 for link in traffic.links)


def test_what_is_left_out_shows_in_the_gradients_error(traffic: Traffic):
    _, powersgd, topk = traffic.methods
    for method in (powersgd, topk):
        assert method.gradient_error is not None
        assert 0.01 < method.gradient_error < 1.5
        assert method.gradient_cosine is not None
        assert 0.2 < method.gradient_cosine < 1


def test_nothing_is_kept_that_was_not_validated(traffic: Traffic):
    assert traffic.ruling is not TrafficRuling.KEEP
    assert all(method.validation is None for method in traffic.methods)


@pytest.fixture(scope="module")
def validated(told: list[dict[str, Any]]) -> Traffic:
    found = from_json(told[0]["trained"]["traffic"])
    assert isinstance(found, Traffic)
    return found


def test_held_out_losses_are_the_same_on_all_ranks_and_depend_on_the_order_alone(told: list[dict[str, Any]]):
    first, second, again = told[0]["trained"]["orders"]
    assert told[1]["trained"]["orders"] == [first, second, again]
    assert len(first) == 8
    assert first != second
    assert first == again


def test_training_with_everything_sent_is_training_without_compression(validated: Traffic):
    _, everything, _ = validated.methods
    assert everything.validation is not None
    assert everything.validation.difference is not None
    assert abs(everything.validation.difference.value) < 1e-4
    assert everything.ruling is TrafficRuling.KEEP
    assert (validated.ruling, validated.best) == (TrafficRuling.KEEP, "topk:100%")


def test_training_with_one_bit_per_element_is_not(validated: Traffic):
    *_, sign = validated.methods
    assert sign.validation is not None
    assert sign.validation.difference is not None
    assert abs(sign.validation.difference.value) > 1e-4
    assert sign.validation.held_out_batches == 8
    assert sign.validation.orders == 2


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("twice", "'topk:0%'"),
        ("unknown", "'zip' is no method"),
        ("nothing", "names no method of compression"),
        ("no_held_out", "no held-out data"),
    ],
)
def test_bad_input_is_refused_on_every_rank(told: list[dict[str, Any]], scenario: str, said: str):
    for rank in told:
        kind, found = rank[scenario]
        assert kind == "InvalidOption"
        assert said in found


def test_a_rank_that_cannot_begin_is_named_on_the_others(told: list[dict[str, Any]]):
    assert told[0]["one_rank_fails"][0] == "RankFailed"
    assert told[0]["one_rank_fails"][1].startswith("Rank 1 failed")
    assert told[1]["one_rank_fails"][0] != "RankFailed"


def test_a_single_process_has_nothing_to_compress():
    with pytest.raises(InvalidOption) as caught:
        advise_compression(None, [])  # type: ignore[arg-type]
    assert "one rank only" in caught.value.found
    assert "torchrun" in caught.value.next
