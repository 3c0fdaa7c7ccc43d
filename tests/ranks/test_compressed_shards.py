"""Compressed reduce-scatters of FSDP2, and compressed all-reduces between replicas of its shards, on four real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from launching import launch
from ranks.compressing_shards import METHODS

RANKS = 4


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return launch(RANKS, "ranks.compressing_shards:on_four_ranks")


def test_without_a_method_gradients_are_those_of_fsdp2_to_the_bit(four: list[dict[str, Any]]):
    for rank in four:
        assert rank["fidelity"]["none"]["equal"] == rank["fidelity"]["none"]["names"]


@pytest.mark.parametrize("method", ["topk:100%", "randomk:100%"])
@pytest.mark.parametrize("layout", ["fidelity", "replicas"])
def test_gradients_that_are_sent_whole_are_fsdp2s_up_to_the_order_of_four_ranks(
    four: list[dict[str, Any]], layout: str, method: str
):
    # Not to the bit: gloo adds four ranks in an order of its own, payloads are added from rank 0 on.
    assert four[0][layout][method]["error"] < 1e-6


def test_replicas_of_shards_give_the_mean_over_all_ranks(four: list[dict[str, Any]]):
    assert four[0]["replicas"]["as_whole"] < 1e-6
    assert four[0]["replicas"]["powersgd:1000"]["error"] < 1e-5


@pytest.mark.parametrize("layout", ["fidelity", "replicas"])
def test_parameters_that_are_excluded_stay_exact_within_a_unit_that_is_compressed(
    four: list[dict[str, Any]], layout: str
):
    found = four[0][layout]["sign"]
    assert [name for name in found["names"] if "norm" in name or "embed" in name or "lm_head" in name] == found["equal"]
    assert found["error"] > 0.1
    assert found["ratio"] > 1.5


def test_all_ranks_have_the_same_bits(four: list[dict[str, Any]]):
    found = [each for layout in ("fidelity", "replicas") for each in four[0][layout].values() if isinstance(each, dict)]
    assert all(each["same"] for each in found)
    assert all(each["same"] for each in four[0]["sums"].values())
    assert all(four[0]["replicated"].values()), four[0]["replicated"]


@pytest.mark.parametrize("method", METHODS)
def test_what_was_sent_and_what_waits_is_all_there_was(four: list[dict[str, Any]], method: str):
    is_exact = method in ("topk:10%", "randomk:10%")
    assert four[0]["sums"][method]["off"] <= (0 if is_exact else 2e-3)
    assert four[0]["sums"][method]["moved"] > 10


@pytest.mark.parametrize("method", METHODS)
def test_nan_on_one_rank_reaches_the_shards_of_all_and_is_not_remembered(four: list[dict[str, Any]], method: str):
    for rank in four:
        assert rank["nonfinite"][method] == {
            "void": True,
            "others": True,
            "kept": True,
            "next_is_finite": True,
            "counted": 1,
        }


def test_a_unit_with_an_unused_parameter_is_reduced_as_torch_does(four: list[dict[str, Any]]):
    assert four[0]["unused"] == {"equal": True, "kept": True}


@pytest.mark.parametrize("method", [*METHODS, "momentum"])
def test_a_run_goes_on_from_its_saved_state_to_the_bit(four: list[dict[str, Any]], method: str):
    for rank in four:
        assert rank["resumed"][method] == {"continues": True, "counts": True, "same": True}
        assert rank["replicas_resumed"] == {"continues": True, "counts": True, "same": True}


def test_gradients_are_sent_in_the_dtype_that_fsdp2_reduces_in(four: list[dict[str, Any]]):
    # 30, 12, 2 and 6 elements of a padded shard, two bytes each, to three other ranks.
    assert four[0]["narrow"]["bytes"] == 3 * 2 * (30 + 12 + 2 + 6)
    assert four[0]["narrow"]["error"] < 5e-3


def test_momentum_goes_on_after_warm_up_and_ends_where_everything_was_sent(four: list[dict[str, Any]]):
    assert four[0]["momentum"] == [True, True, True, False]


def test_removing_puts_back_the_very_hooks_that_were_there(four: list[dict[str, Any]]):
    assert all(four[0]["removed"].values()), four[0]["removed"]


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("twice", "InvalidOption", "compressed already"),
        ("layout", "CompressionMismatch", "layout = replicas"),
        ("powersgd", "InvalidOption", "powersgd:4"),
        ("hsdp", "InvalidModel", "a mesh of one dimension"),
        ("hooked", "InvalidOption", "all-reduce hook already"),
        ("own", "InvalidOption", "ProcessGroupAllocReduceScatter"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(four: list[dict[str, Any]], what: str, kind: str, said: str):
    for rank in four:
        assert rank["refusals"][what][0] == kind
        assert said in rank["refusals"][what][1]
        assert rank["refusals"][what][2]
