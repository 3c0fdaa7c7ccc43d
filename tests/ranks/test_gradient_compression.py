"""Gradients that are compressed between real ranks of DDP and FSDP2: equal where they should be, complete, and undone."""

from __future__ import annotations

import pytest

from launching import Told, on_ranks
from ranks.compressing import METHODS, SHARD_METHODS

pytestmark = pytest.mark.long

two = on_ranks(2, "ranks.compressing_layouts:on_two_ranks")
four = on_ranks(4, "ranks.compressing_layouts:on_four_ranks")

BOTH = [*(("ddp", method) for method in METHODS), *(("fsdp2", method) for method in SHARD_METHODS)]


@pytest.fixture(scope="module")
def told(two: Told, four: Told) -> dict[str, Told]:
    """By the layout of the models."""
    return {"ddp": two, "fsdp2": four}


@pytest.mark.parametrize(("layout", "method"), [("ddp", "none"), ("ddp", "topk:100%"), ("fsdp2", "none")])
def test_gradients_that_are_sent_whole_are_those_without_compression_to_the_bit(told, layout: str, method: str):
    for rank in told[layout]:
        assert rank["fidelity"][method]["equal"] == rank["fidelity"][method]["names"]


@pytest.mark.parametrize("layout", ["fidelity", "replicas"])
def test_gradients_that_are_sent_whole_are_fsdp2s_up_to_the_order_of_four_ranks(four: Told, layout: str):
    # Not to the bit: gloo adds four ranks in an order of its own, payloads are added from rank 0 on.
    assert four[0][layout]["topk:100%"]["error"] < 1e-6


def test_factors_of_full_rank_give_the_gradients_up_to_rounding(two: Told, four: Told):
    # Not to the bit: P(PᵀM) is a product of rounded matrices.
    assert two[0]["fidelity"]["powersgd:1000"]["error"] < 1e-5
    assert four[0]["replicas"]["powersgd:1000"]["error"] < 1e-5


def test_replicas_of_shards_give_the_mean_over_all_ranks(four: Told):
    assert four[0]["replicas as whole"] < 1e-6


@pytest.mark.parametrize("layout", ["fidelity", "replicas"])
def test_planning_between_steps_changes_nothing_of_what_is_sent_or_waits(four: Told, layout: str):
    assert four[0]["planned"][layout] == 0


def test_parameters_that_are_excluded_stay_exact_within_a_bucket_or_a_unit_that_is_compressed(two: Told, four: Told):
    sparse, sharded, spread = (
        each["topk:5%"] for each in (two[0]["fidelity"], four[0]["fidelity"], four[0]["replicas"])
    )
    # gloo adds four ranks in an order that depends on the size of the message; two ranks have one order.
    for found, how in ((sparse, "equal"), (sharded, "close"), (spread, "equal")):
        kept = [name for name in found["names"] if any(word in name for word in ("norm", "embed", "lm_head"))]
        assert found[how] == kept
        assert found["error"] > 0.1
        assert found["ratio"] > 1.5
    assert "14 of 21 parameters are compressed" in sparse["described"]


def test_all_ranks_have_the_same_bits(two: Told, four: Told):
    for told, rows in ((two, ("fidelity", "sums")), (four, ("fidelity", "replicas", "sums"))):
        assert all(each["same"] for row in rows for each in told[0][row].values())
    assert all(four[0]["replicated"].values()), four[0]["replicated"]


@pytest.mark.parametrize(("layout", "method"), BOTH)
def test_what_was_sent_and_what_waits_is_all_there_was(told, layout: str, method: str):
    found = told[layout][0]["sums"][method]
    is_exact = method.startswith("topk")
    assert found["off"] <= (0 if is_exact else 2e-3)  # of sums of 20 gradients up to 64 in float32
    assert found["moved"] > 10


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_zero_give_zero_and_the_next_ones_move(two: Told, method: str):
    assert two[0]["zeros"][method]["zero"]
    assert all(moved > 0 for moved in two[0]["zeros"][method]["moves"])


@pytest.mark.parametrize(("layout", "method"), BOTH)
def test_what_is_not_finite_on_one_rank_reaches_all_and_is_not_remembered(told, layout: str, method: str):
    void = {"ddp": [2], "fsdp2": [0]}[layout]
    for rank in told[layout]:
        found = rank["nonfinite"][method]
        assert (found["void"], found["counted"]) == (void, 1)
        assert all(found[what] for what in ("is_whole", "others", "kept", "next_is_finite")), found


def test_a_gradient_scaler_skips_the_step_on_all_ranks(two: Told):
    for rank in two:
        assert rank["scaler"]["moved"] == [True, False, True]
        assert rank["scaler"]["scales"] == [(8.0, True), (4.0, True), (4.0, True)]
        assert rank["scaler"]["counted"] == 1


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_a_step_does_not_use_lose_nothing(two: Told, method: str):
    for rank in two:
        assert rank["unused"][method] == {"none": True, "kept": True, "same": True, "moved": True}


def test_a_unit_with_an_unused_parameter_is_reduced_as_torch_does(four: Told):
    assert four[0]["unused"] == {"equal": True, "kept": True}


@pytest.mark.parametrize(
    "what",
    [
        "micro-batches that are summed",
        "sparse gradients",
        "a beginning when training is under way",
        "static_graph",
        "bucket_view",
        "both",
        "find_unused",
    ],
)
def test_everything_that_is_sent_arrives_as_without_compression_with(two: Told, what: str):
    assert two[0]["as without"][what]


def test_parameters_of_several_dtypes_are_reduced_each_in_its_own(two: Told):
    assert two[0]["dtypes"]["equal"]
    assert "gradients of float64 are sent as they are" in two[0]["dtypes"]["described"]


def test_gradients_are_sent_in_the_dtype_that_fsdp2_reduces_in(four: Told):
    # 30, 12, 2 and 6 elements of a padded shard, four bytes for each place and two for each value, to three other ranks.
    assert four[0]["narrow"]["bytes"] == 3 * (4 + 2) * (30 + 12 + 2 + 6)
    assert four[0]["narrow"]["error"] < 5e-3


@pytest.mark.parametrize(("layout", "method"), [*BOTH, ("ddp", "momentum"), ("fsdp2", "momentum")])
def test_a_run_repeats_and_goes_on_from_its_saved_state_to_the_bit(told, layout: str, method: str):
    for rank in told[layout]:
        assert all(rank["resumed"][method].values()), rank["resumed"][method]


def test_a_run_of_replicas_of_shards_goes_on_to_the_bit(four: Told):
    assert all(all(rank["replicas resumed"].values()) for rank in four)


@pytest.mark.parametrize(
    ("what", "saved", "mine"),
    [
        ("ranks", "ranks = 4", "this run has 2"),
        ("rank", "rank = 1", "this run has 0"),
        ("model", "p1 = [3, 3]", "[10, 12]"),
        ("newer", "schema_version = 99", "this run has 2"),
        ("method", "topk:10%", "topk:20%"),
    ],
)
def test_the_state_of_something_else_is_refused_with_both_named(two: Told, what: str, saved: str, mine: str):
    refusal = two[0]["mismatches"][what]
    assert refusal.kind == "CompressionMismatch"
    assert saved in refusal.found
    assert mine in refusal.found
    assert refusal.next


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_removing_leaves_plain_gradients_the_very_hooks_and_no_thread_or_group(told, layout: str):
    for rank in told[layout]:
        assert all(rank["removed"].values()), rank["removed"]


@pytest.mark.parametrize(
    ("layout", "what", "kind", "said"),
    [
        ("ddp", "twice", "InvalidOption", "compressed already"),
        ("ddp", "foreign", "InvalidOption", "_somebody_elses"),
        ("ddp", "differ", "RanksDiffer", "method: rank 0 topk:20%; rank 1 topk:10%"),
        ("ddp", "bare", "InvalidModel", "Linear"),
        ("ddp", "pattern", "InvalidOption", "matches no parameter"),
        ("ddp", "group", "InvalidOption", "replicate_group="),
        ("fsdp2", "twice", "InvalidOption", "compressed already"),
        ("fsdp2", "layout", "CompressionMismatch", "layout = replicas"),
        ("fsdp2", "powersgd", "InvalidOption", "powersgd:4"),
        ("fsdp2", "hsdp", "InvalidModel", "a mesh of one dimension"),
        ("fsdp2", "hooked", "InvalidOption", "all-reduce hook already"),
        ("fsdp2", "own", "InvalidOption", "ProcessGroupAllocReduceScatter"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(told, layout: str, what: str, kind: str, said: str):
    for refusal in (rank["refusals"][what] for rank in told[layout]):
        assert refusal.kind == kind
        assert said in refusal.found
        assert refusal.next


def test_what_one_rank_is_refused_no_rank_begins(two: Told):
    first, second = (rank["refusals"]["one-sided"] for rank in two)
    assert (first.kind, second.kind) == ("RankFailed", "InvalidOption")
    assert "Rank 1 failed" in first.found
    assert "_somebody_elses" in first.found


def test_an_error_in_the_exchange_is_raised_by_backward_and_no_gradients_are_exchanged_after_it(two: Told):
    for rank in two:
        assert (rank["broken"]["first"].kind, rank["broken"]["first"].found) == ("ValueError", "the cause")
        assert "Expected to have finished reduction" in rank["broken"]["next"].found


def test_warm_up_steps_are_those_of_ddp(two: Told):
    assert two[0]["warmup"] == [True, True, False, False]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_momentum_goes_on_after_warm_up_and_ends_where_everything_was_sent(told, layout: str):
    # What is sent whole is masked whole: the fourth step is a plain gradient.
    assert told[layout][0]["momentum"] == [True, True, True, False]
