"""Ranks ask together what compressing gradients costs: all get the same answer, and nothing of theirs has changed."""

from __future__ import annotations

import pytest

from launching import Told, on_ranks
from plimsoll.artifacts.store import from_json
from plimsoll.artifacts.traffic import Traffic
from plimsoll.distributed import advise_compression
from plimsoll.errors import InvalidOption

pytestmark = pytest.mark.long

told = on_ranks(2, "ranks.weighing:everything")


@pytest.fixture(scope="module")
def replicas(told: Told) -> Traffic:
    return from_json(told[0]["replicas"]["traffic"])


@pytest.fixture(scope="module")
def shards(told: Told) -> Traffic:
    return from_json(told[0]["shards"]["traffic"])


@pytest.mark.parametrize("layout", ["replicas", "views", "shards"])
def test_all_ranks_get_the_same_answer_and_their_models_are_as_before(told: Told, layout: str):
    assert told[0][layout]["traffic"] == told[1][layout]["traffic"]
    assert all(rank[layout]["untouched"] for rank in told)


def test_ddp_reduces_as_before_and_fsdp2_has_its_own_reduce_scatter_again(told: Told):
    for rank in told:
        assert rank["as before"]
        assert rank["comms"] == {"DefaultReduceScatter"}


def test_how_many_steps_there_will_be_is_told_after_the_first_with_their_time(told: Told):
    for rank in told:
        assert rank["replicas"]["stages"][0] == "reading the data"
        assert rank["replicas"]["stages"][1].startswith("steps of about ")
        assert rank["replicas"]["stages"][1].endswith(" s, 12 in each of 2 rounds")


def test_every_method_is_measured_and_predicted(replicas: Traffic):
    assert [method.method for method in replicas.methods] == ["none", "powersgd:2", "topk:10%"]
    assert replicas.exchanges > 1
    assert 0 < replicas.measured_forward_seconds < replicas.measured_silent_seconds
    assert replicas.measured_bytes_per_second > 0
    for method in replicas.methods:
        assert 0 < method.measured_step_seconds.low <= method.measured_step_seconds.high
        assert method.predicted_step_seconds > replicas.measured_silent_seconds
        assert method.measured_local_seconds > 0


def test_a_prediction_is_computation_work_and_transfers(shards: Traffic):
    # On a CPU FSDP2's backward waits for every exchange, so nothing is hidden.
    for method in shards.methods:
        least = shards.measured_silent_seconds + method.measured_local_seconds + method.sent_bytes / 1e6
        assert method.predicted_step_seconds >= least
    assert shards.assumed_bytes_per_second == 1e6
    assert (shards.layout, shards.exchanges) == ("shards", 3)


def test_what_is_left_out_shows_in_the_gradients_error(replicas: Traffic, shards: Traffic):
    plain, *others = replicas.methods
    assert plain.gradient_error == 0
    for method in (*others, shards.methods[1]):
        assert 0.01 < method.gradient_error < 1.5


def test_a_reduce_scatter_sends_half_of_an_all_reduce(replicas: Traffic, shards: Traffic):
    assert shards.methods[0].sent_bytes == replicas.methods[0].sent_bytes / 2
    assert all(method.sent_bytes < replicas.methods[0].sent_bytes for method in replicas.methods[1:])


def test_a_sharded_model_is_not_asked_about_powersgd_by_default(shards: Traffic):
    assert [method.method for method in shards.methods] == ["none", "topk:1%"]


def test_sparse_gradients_are_sent_as_they_are(told: Told):
    plain, topk = from_json(told[0]["sparse"]).methods
    assert 0 < topk.gradient_error < 1
    assert topk.sent_bytes < plain.sent_bytes


@pytest.mark.parametrize(
    ("scenario", "kind", "said"),
    [
        ("no share", "InvalidOption", "'topk:0%'"),
        ("unknown", "InvalidOption", "'int8' is not a method"),
        ("seed", "InvalidOption", "seed=-1"),
        ("rounds", "InvalidOption", "measure_rounds=0"),
        ("rate", "InvalidOption", "bytes_per_second=0.0"),
        ("bare", "InvalidModel", "neither under DistributedDataParallel nor sharded"),
        ("sharded powersgd", "InvalidOption", "'powersgd:2' for a model that FSDP2 shards"),
        ("compressed", "InvalidOption", "compressed already"),
        ("other methods", "RanksDiffer", "methods: rank 0 none,topk:1%; rank 1 none,topk:1%,topk:2%"),
        ("other model", "RanksDiffer", "model: rank 0 _Wide-"),
    ],
)
def test_what_cannot_be_weighed_is_refused_on_every_rank(told: Told, scenario: str, kind: str, said: str):
    for rank in told:
        assert rank["refusals"][scenario].kind == kind
        assert said in rank["refusals"][scenario].found


def test_a_rank_that_fails_in_its_first_step_is_named_on_the_others(told: Told):
    first, second = (rank["refusals"]["one rank fails"] for rank in told)
    assert first.kind == "RankFailed" != second.kind
    assert first.found.startswith("Rank 1 failed")


@pytest.mark.parametrize("scenario", ["later"])
def test_a_rank_that_fails_in_a_step_is_named_on_the_others_and_nothing_is_changed(told: Told, scenario: str):
    first, second = (rank["failures"][scenario] for rank in told)
    assert (first["found"].kind, second["found"].kind) == ("RankFailed", "InvalidLoss")
    assert first["found"].found.startswith("Rank 1 failed")
    for rank in (first, second):
        assert rank["untouched"]
        assert rank["seconds"] < 30


def test_a_single_process_has_nothing_to_compress():
    with pytest.raises(InvalidOption) as caught:
        advise_compression(None, [])  # type: ignore[arg-type]
    assert "one rank only" in caught.value.found
    assert "torchrun" in caught.value.next
