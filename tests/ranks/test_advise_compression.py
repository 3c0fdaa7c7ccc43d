"""Ranks ask together whether compressing gradients pays: all get the same answer, and nothing of theirs has changed."""

from __future__ import annotations

import pytest

from launching import Told, on_ranks
from plimsoll.artifacts.store import from_json
from plimsoll.artifacts.traffic import Traffic, TrafficRuling, Transfer
from plimsoll.distributed import advise_compression
from plimsoll.errors import InvalidOption

told = on_ranks(2, "ranks.weighing:everything")


@pytest.fixture(scope="module")
def traffic(told: Told) -> Traffic:
    return from_json(told[0]["traffic"])


@pytest.fixture(scope="module")
def validated(told: Told) -> Traffic:
    return from_json(told[0]["trained"]["traffic"])


@pytest.fixture(scope="module")
def sharded(told: Told) -> Traffic:
    return from_json(told[0]["sharded"]["traffic"])


def test_all_ranks_get_the_same_answer(told: Told):
    assert told[0]["traffic"] == told[1]["traffic"]


def test_how_many_steps_there_will_be_is_told_after_the_first_with_their_time(told: Told):
    for rank in told:
        _, first, *later = rank["stages"]
        assert first.startswith(f"about {rank['steps']} steps of ")
        assert "fewer: measure_rounds=, --steps" in first
        assert all(", of about " in stage for stage in later)


def test_model_gradients_and_random_state_are_as_before_and_nothing_of_the_wrapper_stays(told: Told):
    for rank in told:
        assert rank["untouched"]
        assert (rank["hooks_left"], rank["wrappers_left"]) == (0, 0)


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
        assert 0.01 < method.gradient_error < 1.5
        assert 0.2 < method.gradient_cosine < 1


def test_nothing_is_kept_that_was_not_validated(traffic: Traffic):
    assert traffic.ruling is not TrafficRuling.KEEP
    assert all(method.validation is None for method in traffic.methods)


def test_held_out_losses_are_the_same_on_all_ranks_and_depend_on_the_order_alone(told: Told):
    first, second, again = told[0]["trained"]["orders"]
    assert told[1]["trained"]["orders"] == [first, second, again]
    assert len(first) == 8
    assert first != second
    assert first == again


def test_training_with_everything_sent_is_training_without_compression(validated: Traffic):
    _, everything, _ = validated.methods
    assert abs(everything.validation.difference.value) < 1e-4
    assert everything.ruling is TrafficRuling.KEEP
    assert (validated.ruling, validated.best) == (TrafficRuling.KEEP, "topk:100%")


def test_training_with_one_bit_per_element_is_not(validated: Traffic):
    *_, sign = validated.methods
    assert abs(sign.validation.difference.value) > 1e-4
    assert sign.validation.held_out_batches == 8
    assert sign.validation.orders == 2


def test_a_sharded_model_and_its_reduce_scatter_are_as_before_on_every_rank(told: Told):
    for rank in told:
        assert rank["sharded"]["untouched"]
        assert rank["sharded"]["comms"] == {"DefaultReduceScatter"}
        assert rank["sharded"]["traffic"] == told[0]["sharded"]["traffic"]


def test_of_a_sharded_model_steps_are_measured_and_nothing_is_predicted(sharded: Traffic):
    assert (sharded.step, sharded.links, sharded.hidden_share, sharded.bucket_bytes) == (None, (), None, None)
    assert sharded.sharded.units == 3
    assert 0 < sharded.sharded.measured_optimizer_seconds < sharded.sharded.measured_silent_seconds.low
    for method in sharded.methods:
        assert method.predicted_saved_share is None
        assert method.measured_saved_share is not None
        assert method.measured_step_seconds is not None
    assert "no step is predicted" in sharded.notes[0]
    assert sharded.backend == "gloo"
    assert "twice the bytes shown" in sharded.notes[1]


def test_a_reduce_scatter_sends_half_of_the_gradients_on_two_ranks(sharded: Traffic):
    plain, topk, int8 = sharded.methods
    assert plain.wire_bytes == sharded.gradient_bytes / 2
    assert topk.wire_bytes < int8.wire_bytes < plain.wire_bytes


def test_the_error_of_a_sharded_gradient_is_that_of_all_shards(sharded: Traffic):
    _, topk, int8 = sharded.methods
    assert 0.1 < topk.gradient_error < 1
    assert 0 < int8.gradient_error < 0.02


def test_what_a_sharded_model_is_told_shows_what_was_measured_only(sharded: Traffic):
    text = str(sharded)
    assert "no method can save more" in text
    assert "3 units of FSDP2" in text
    for absent in ("  predicted", "  local", "all_reduce", "pays", "is hidden"):
        assert absent not in text


def test_sharded_training_with_everything_sent_is_training_without_compression(told: Told):
    plain, again, everything, sign = told[0]["sharded"]["orders"]
    assert told[1]["sharded"]["orders"] == [plain, again, everything, sign]
    assert len(plain) == 5  # one rank has fewer of them than the other
    assert plain == again
    assert everything == pytest.approx(plain, abs=1e-4)
    assert sign != pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize(
    ("scenario", "kind", "said"),
    [
        ("twice", "InvalidOption", "'topk:0%'"),
        ("unknown", "InvalidOption", "'zip' is no method"),
        ("no_list", "InvalidOption", "methods=5 is no list"),
        ("seed", "InvalidOption", "seed=-1"),
        ("nothing", "InvalidOption", "names no method of compression"),
        ("no_held_out", "InvalidOption", "no held-out data"),
        ("wrapped", "InvalidModel", "under DistributedDataParallel already"),
        ("unused", "InvalidModel", "2 trained parameters get no gradient, the first of them 'other.weight'"),
        ("sparse", "InvalidModel", "The gradient of 'embed.weight' is sparse"),
        ("sharded_powersgd", "InvalidOption", "'powersgd:2' for a model that FSDP2 shards"),
        ("sharded_few_rounds", "InvalidOption", "measure_rounds=2 for a model that FSDP2 shards"),
        ("sharded_buckets", "InvalidOption", "bucket_bytes=1024 for a model that FSDP2 shards"),
        ("other_methods", "RanksDiffer", "methods: rank 0 int8:256; rank 1 int8:256,sign:1024"),
        ("other_model", "RanksDiffer", "model: rank 0 LlamaForCausalLM-"),
    ],
)
def test_what_cannot_be_weighed_is_refused_on_every_rank(told: Told, scenario: str, kind: str, said: str):
    for rank in told:
        assert rank[scenario].kind == kind
        assert said in rank[scenario].found


@pytest.mark.parametrize("scenario", ["fails_in_exchange", "fails_later"])
def test_a_rank_that_fails_in_a_step_is_named_on_the_others_and_nothing_is_changed(told: Told, scenario: str):
    first, second = (rank[scenario] for rank in told)
    assert (first["found"].kind, second["found"].kind) == ("RankFailed", "InvalidLoss")
    assert first["found"].found.startswith("Rank 1 failed")
    for rank in (first, second):
        assert rank["untouched"]
        assert rank["seconds"] < 30


def test_a_rank_that_cannot_begin_is_named_on_the_others(told: Told):
    first, second = (rank["one_rank_fails"] for rank in told)
    assert first.kind == "RankFailed" != second.kind
    assert first.found.startswith("Rank 1 failed")


def test_a_single_process_has_nothing_to_compress():
    with pytest.raises(InvalidOption) as caught:
        advise_compression(None, [])  # type: ignore[arg-type]
    assert "one rank only" in caught.value.found
    assert "torchrun" in caught.value.next
