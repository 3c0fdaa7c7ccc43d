"""FSDP2, HSDP and DDP on real ranks: plans know what a rank holds, and change nothing but that."""

from __future__ import annotations

import pytest

from launching import Told, on_ranks
from long_cases import all_but
from plimsoll.tracing.torch_internals import is_at_least

WITHIN = 0.02
BUDGETED = "fsdp2"
PAIRED = (
    BUDGETED,
    "fsdp2, kept after forward",
    "fsdp2, bf16",
    "fsdp2, prefetching",
    "fsdp2, inside the blocks",
    "fsdp2, gpt2",
    "ddp, views",
)
FOURFOLD = ("hsdp", "fsdp2, to pairs")
LAYOUTS = (*PAIRED, *FOURFOLD)
WITHIN_A_BUFFER = 0.20
"""Under plans gloo's threads decide when a gathered buffer ends: a step counts one or two more or less than the trace."""
GATHERED_ONCE_MORE = 0.20
"""Before torch 2.13 a plan gathers a shard inside of a region once more: with 2.11 it took 14% less than predicted."""


budgeted = on_ranks(2, "ranks.sharding_scenarios:studies", {BUDGETED: (0.5,)})


pair = on_ranks(2, "ranks.sharding_scenarios:on_a_pair", {name: () for name in PAIRED if name != BUDGETED})


four = on_ranks(4, "ranks.sharding_scenarios:on_four", dict.fromkeys(FOURFOLD, ()))


@pytest.fixture
def study(layout: str, request: pytest.FixtureRequest) -> Told:
    """What every rank found of one layout. The one with a budget is launched by itself, for `make test`."""
    if layout == BUDGETED:
        return [rank[layout] for rank in request.getfixturevalue("budgeted")]
    return [rank["studies"][layout] for rank in request.getfixturevalue("pair" if layout in PAIRED else "four")]


@pytest.fixture(scope="module")
def habits(pair: Told) -> Told:
    """What every rank found out about planning and training."""
    return [rank["habits"] for rank in pair]


@pytest.mark.parametrize("layout", all_but(LAYOUTS, BUDGETED))
def test_the_predicted_peak_of_every_rank_is_the_measured_one(study, layout):
    for rank in study:
        gathers = layout.startswith(("fsdp2", "hsdp"))
        within = WITHIN_A_BUFFER if gathers and layout != BUDGETED else WITHIN
        assert rank["predicted"] == pytest.approx(rank["measured"], rel=within)
        within = WITHIN_A_BUFFER if gathers else WITHIN
        for plan in rank["plans"].values():
            over = GATHERED_ONCE_MORE if "inside" in layout and not is_at_least(2, 13) else within
            assert (1 - within) * plan["measured"] <= plan["predicted"] <= (1 + over) * plan["measured"]
            assert plan["predicted"] < rank["predicted"]


@pytest.mark.parametrize("layout", all_but(LAYOUTS, BUDGETED))
def test_gradients_under_a_plan_are_those_without_one(study, layout):
    plans = [plan for rank in study for plan in rank["plans"].values()]
    assert all(plan["is_bit_equal"] and plan["dropped_bytes"] for plan in plans)


@pytest.mark.parametrize("layout", all_but(LAYOUTS, BUDGETED))
def test_a_plan_sends_what_is_sent_without_one_in_the_same_order(study, layout):
    if "inside" in layout and not is_at_least(2, 13):
        pytest.skip(
            "a plan gathers once more per shard inside of a region on this torch: see docs/sharded-data-parallel.md"
        )
    for rank in study:
        assert rank["collectives"]
        assert all(plan["sends_the_same"] for plan in rank["plans"].values())


@pytest.mark.parametrize("layout", [BUDGETED])
def test_a_budget_is_kept_on_every_rank(study, layout):
    for rank in study:
        plan = rank["plans"]["50%"]
        assert plan["measured"] <= plan["budget"] < rank["measured"]


@pytest.mark.long
@pytest.mark.parametrize("reducer", ["static graph", "unused", "views"])
def test_a_reducer_does_not_notice_that_its_model_was_planned(habits, reducer):
    for rank in habits:
        assert rank["reducer"][reducer]["is_equal"]
        assert rank["reducer"][reducer]["is_told_the_same"]
        assert bool(rank["reducer"][reducer]["log"]["has_rebuilt_buckets"]) is (reducer != "unused")


@pytest.mark.long
def test_a_plan_does_not_know_whether_its_model_is_wrapped_but_counts_the_buckets(habits):
    for rank in habits:
        (bare, wrapped), regions = rank["ddp_names"]["fingerprints"], rank["ddp_names"]["regions"]
        assert bare == wrapped
        assert regions[0] == regions[1] == ["model.layers.0", "model.layers.1"]
        assert rank["ddp_names"]["extra"] == 0


@pytest.mark.long
def test_accumulation_without_reduction_gives_the_same_gradients_under_a_plan(habits):
    assert all(rank["ddp_accumulation"] and rank["fsdp_accumulation"] for rank in habits)


@pytest.mark.long
def test_gradients_that_wait_for_their_reduction_survive_planning(habits):
    assert [rank["waiting"] for rank in habits] == [[True, True]] * 2


@pytest.mark.long
def test_a_step_that_fails_while_it_is_traced_leaves_the_sharded_model_ready(habits):
    for rank in habits:
        wheres = ("in the second block", "in the loss", "in backward of the second block")
        assert all(text.endswith(where) for text, where in zip(rank["failure"], wheres, strict=True))


@pytest.mark.long
def test_flat_parameters_of_fsdp1_are_refused_by_name(habits):
    for rank in habits:
        assert rank["flat"].kind == "InvalidModel"
        assert "FSDP1" in rank["flat"].found


@pytest.mark.long
def test_no_boundary_is_dropped_where_parameters_are_gone_by_then(habits):
    for rank in habits:
        assert rank["boundaries"]["True"] == {"dropped": [False, False], "is_equal": True}
        assert rank["boundaries"]["False"] == {"dropped": [False, True], "is_equal": True}


@pytest.mark.long
@pytest.mark.parametrize("layout", ["fsdp2", "ddp, views"])
def test_verify_gives_every_rank_a_receipt(habits, layout):
    for rank in habits:
        receipt = rank["receipts"][layout]
        assert receipt["is_bit_equal"]
        if layout == "ddp, views":
            assert receipt["verdict"] == "VERIFIED"
        within = WITHIN if layout == "ddp, views" else WITHIN_A_BUFFER
        assert receipt["predicted"] == pytest.approx(receipt["measured"], rel=within)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
def test_the_optimizer_counts_by_what_it_holds_on_this_rank(habits, layout):
    for rank in habits:
        within = WITHIN if layout == "ddp" else WITHIN_A_BUFFER
        found = rank["optimizer"][layout]
        assert found["predicted"] == pytest.approx(found["measured"], rel=within)


@pytest.mark.long
@pytest.mark.parametrize(
    ("reduction", "name"),
    [
        ("a reduce-scatter", "_CountingScatter"),
        ("an all-reduce hook", "<lambda>"),
        ("a communication hook", "_bucket_hook"),
        ("a parameter's hook", ""),
    ],
)
def test_steps_that_plan_run_beside_what_reduces_gradients_in_the_users_way(habits, reduction, name):
    for rank in habits:
        found = rank["beside"][reduction]
        assert found["planning"] == 0 < found["training"]
        assert any(name in note and "is not counted" in note for note in found["notes"]) == bool(name)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["fsdp2", "hsdp"])
def test_gradients_that_wait_for_the_last_micro_batch_are_within_the_budget_or_told_of(habits, four, layout):
    for rank in habits if layout == "fsdp2" else four:
        found = rank["micro-batches"]
        is_told = any("more than the budget" in said for said in found["said"])
        assert found["measured"] <= (1 + WITHIN_A_BUFFER * is_told) * found["budget"]  # gloo's threads may hold one on
        assert found["metered"] >= {(True, False), (True, True)}  # one between the first and the last, and the last
        for peaks in found["trial"]:  # a first one finds nothing that waits, in a later one it is there
            assert peaks.first_peak_bytes < peaks.peak_bytes
            assert peaks.static_bytes == found["trial"][0].static_bytes
        assert found["as before"]
        assert any("gradients of an earlier backward already exist" in said for said in found["said"])
