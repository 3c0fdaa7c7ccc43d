"""Gradients that are compressed between real ranks: equal where they should be, complete over time, and undone in the end."""

from __future__ import annotations

from typing import Any

import pytest

from launching import launch
from ranks.compressing import METHODS

RANKS = 2


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch(RANKS, "ranks.compressing:on_two_ranks")


@pytest.mark.parametrize("method", ["none", "topk:100%", "randomk:100%"])
def test_gradients_that_are_sent_whole_are_those_of_ddp_to_the_bit(two: list[dict[str, Any]], method: str):
    for rank in two:
        assert rank["fidelity"][method]["equal"] == rank["fidelity"][method]["names"]


def test_factors_of_full_rank_give_the_gradients_up_to_rounding(two: list[dict[str, Any]]):
    # Not to the bit: P(PᵀM) is a product of rounded matrices.
    assert two[0]["fidelity"]["powersgd:1000"]["error"] < 1e-5


def test_parameters_that_are_excluded_stay_exact_within_a_bucket_that_is_compressed(two: list[dict[str, Any]]):
    found = two[0]["fidelity"]["topk:5%"]
    kept = [name for name in found["names"] if any(word in name for word in ("norm", "embed", "lm_head"))]
    assert found["equal"] == kept
    assert found["error"] > 0.1
    assert "14 of 21 parameters are compressed" in found["described"]


def test_all_ranks_have_the_same_bits(two: list[dict[str, Any]]):
    assert all(each["same"] for each in two[0]["fidelity"].values())
    assert all(each["same"] for each in two[0]["sums"].values())


@pytest.mark.parametrize("method", ["topk:10%", "randomk:10%"])
def test_what_was_sent_and_what_waits_is_all_there_was_exactly(two: list[dict[str, Any]], method: str):
    assert two[0]["sums"][method]["off"] == 0
    assert two[0]["sums"][method]["moved"] > 10


@pytest.mark.parametrize("method", ["sign:16", "int8:16", "powersgd:1", "powersgd:3"])
def test_what_was_sent_and_what_waits_is_all_there_was_up_to_rounding(two: list[dict[str, Any]], method: str):
    assert two[0]["sums"][method]["off"] < 2e-3  # of sums of 20 gradients up to 64 in float32
    assert two[0]["sums"][method]["moved"] > 10


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_zero_give_zero_and_the_next_ones_move(two: list[dict[str, Any]], method: str):
    assert two[0]["zeros"][method]["zero"]
    assert all(moved > 0 for moved in two[0]["zeros"][method]["moves"])


@pytest.mark.parametrize("method", METHODS)
def test_infinity_on_one_rank_reaches_all_and_is_not_remembered(two: list[dict[str, Any]], method: str):
    for rank in two:
        assert rank["nonfinite"][method] == {
            "seen": [None, None, True, None, None],
            "kept": True,
            "next_is_finite": True,
            "counted": 1,
        }


def test_a_gradient_scaler_skips_the_step_on_all_ranks(two: list[dict[str, Any]]):
    for rank in two:
        assert rank["scaler"]["moved"] == [True, False, True]
        assert rank["scaler"]["scales"] == [(8.0, True), (4.0, True), (4.0, True)]
        assert rank["scaler"]["counted"] == 1


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_a_step_does_not_use_lose_nothing(two: list[dict[str, Any]], method: str):
    for rank in two:
        assert rank["unused"][method] == {"none": True, "kept": True, "same": True, "moved": True}


def test_micro_batches_are_summed_before_they_are_compressed(two: list[dict[str, Any]]):
    assert two[0]["accumulation"]


@pytest.mark.parametrize("variant", ["static_graph", "bucket_view", "both", "find_unused"])
def test_every_form_of_ddp_gives_its_own_gradients(two: list[dict[str, Any]], variant: str):
    assert two[0]["variants"][variant]


def test_parameters_of_several_dtypes_are_reduced_each_in_its_own(two: list[dict[str, Any]]):
    assert two[0]["dtypes"]["equal"]
    assert "gradients of float64 are sent as they are" in two[0]["dtypes"]["described"]


def test_sparse_gradients_are_sent_as_they_are(two: list[dict[str, Any]]):
    assert two[0]["sparse"]


@pytest.mark.parametrize("method", [*METHODS, "momentum"])
def test_a_run_repeats_and_goes_on_from_its_saved_state_to_the_bit(two: list[dict[str, Any]], method: str):
    for rank in two:
        assert rank["resumed"][method] == {"repeats": True, "continues": True, "counts": True}


@pytest.mark.parametrize(
    ("what", "saved", "mine"),
    [
        ("ranks", "ranks = 4", "this run has 2"),
        ("rank", "rank = 1", "this run has 0"),
        ("model", "p1 = [3, 3]", "[10, 12]"),
        ("newer", "schema_version = 99", "this run has 1"),
        ("method", "topk:10%", "topk:20%"),
    ],
)
def test_the_state_of_something_else_is_refused_with_both_named(
    two: list[dict[str, Any]], what: str, saved: str, mine: str
):
    kind, found, next_ = two[0]["mismatches"][what]
    assert kind == "CompressionMismatch"
    assert saved in found
    assert mine in found
    assert next_


def test_removing_leaves_the_gradients_of_ddp_and_no_thread_or_group(two: list[dict[str, Any]]):
    for rank in two:
        assert all(rank["removed"].values()), rank["removed"]


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("twice", "InvalidOption", "compressed already"),
        ("foreign", "InvalidOption", "_somebody_elses"),
        ("differ", "RanksDiffer", "method is topk:20% and topk:10%"),
        ("bare", "InvalidModel", "Linear"),
        ("pattern", "InvalidOption", "matches no parameter"),
        ("group", "InvalidOption", "replicate_group="),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(two: list[dict[str, Any]], what: str, kind: str, said: str):
    for rank in two:
        assert rank["refusals"][what][0] == kind
        assert said in rank["refusals"][what][1]
        assert rank["refusals"][what][2]


def test_what_one_rank_is_refused_no_rank_begins(two: list[dict[str, Any]]):
    first, second = (rank["refusals"]["one-sided"] for rank in two)
    assert first[0] == "RankFailed"
    assert "Rank 1 failed" in first[1]
    assert "_somebody_elses" in first[1]
    assert second[0] == "InvalidOption"


def test_an_error_in_the_exchange_of_gradients_is_named_by_backward(two: list[dict[str, Any]]):
    assert all("ValueError: the cause" in rank["broken"]["first"] for rank in two)


def test_after_an_error_in_the_exchange_no_gradients_are_exchanged(two: list[dict[str, Any]]):
    assert all("An earlier exchange of gradients failed" in rank["broken"]["next"] for rank in two)


def test_warm_up_steps_are_those_of_ddp(two: list[dict[str, Any]]):
    assert two[0]["warmup"] == [True, True, False, False]


def test_compression_may_begin_when_training_is_under_way(two: list[dict[str, Any]]):
    assert two[0]["late"]


def test_momentum_goes_on_after_warm_up_and_ends_where_everything_was_sent(two: list[dict[str, Any]]):
    # What is sent whole is masked whole: the fourth step is a plain gradient.
    assert two[0]["momentum"] == [True, True, True, False]
