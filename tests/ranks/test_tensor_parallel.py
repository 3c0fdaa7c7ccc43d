"""Models that are split over a mesh: decided on local shards, bit-equal, and with as many messages as before."""

from __future__ import annotations

import pytest

from launching import Told, on_ranks

pytestmark = pytest.mark.long

SPLIT = ("tensor parallel", "sequence parallel", "sequence parallel, repeated", "expert parallel")


ranks = on_ranks(2, "ranks.shard_scenarios:everything")


@pytest.mark.parametrize("layout", ["whole", *SPLIT])
def test_gradients_are_bit_equal_under_a_plan_and_after_it(ranks: Told, layout: str):
    for found in ranks:
        assert all(found[layout]["equal"])
        assert found[layout]["equal after"]
        assert found[layout]["engines"] == ["recipe"]


def test_a_split_block_drops_nine_tenths_of_what_the_whole_one_drops(ranks: Told):
    for found in ranks:
        assert min(found["whole"]["shares"]) == 1.0
        assert min(found["tensor parallel"]["shares"]) >= 0.9


def _without_lines(obstacles: list[str]) -> set[str]:
    """Return the reasons without the lines of code that follow in parentheses."""
    return {reason.partition(" (")[0] for reason in obstacles}


def test_what_lies_behind_collectives_is_kept_unless_they_may_be_repeated(ranks: Told):
    for found in ranks:
        assert 0.7 < min(found["sequence parallel"]["shares"]) <= max(found["sequence parallel"]["shares"]) < 0.9
        assert _without_lines(found["sequence parallel"]["obstacles"]) == {
            "it cannot be recomputed: _c10d_functional.wait_tensor: is a collective"
        }
        assert min(found["sequence parallel, repeated"]["shares"]) == 1.0
        assert found["sequence parallel, repeated"]["obstacles"] == []


@pytest.mark.parametrize("layout", ["tensor parallel", "sequence parallel", "expert parallel"])
def test_a_step_runs_as_many_collectives_with_a_plan_as_without(ranks: Told, layout: str):
    for found in ranks:
        without, managed = found[layout]["collectives"]
        assert 0 < without == managed


def test_repeated_collectives_are_as_many_on_every_rank(ranks: Told):
    counts = {found["sequence parallel, repeated"]["collectives"] for found in ranks}
    assert len(counts) == 1
    ((without, managed),) = counts
    assert without < managed


def test_experts_that_were_chosen_are_kept(ranks: Told):
    for found in ranks:
        reasons = _without_lines(found["expert parallel"]["obstacles"])
        assert "it cannot be recomputed: topk: chooses where tokens are routed" in reasons
        assert min(found["expert parallel"]["shares"]) > 0.8


@pytest.mark.parametrize("scenario", ["loss parallel", "under a budget", "experts under a budget", "offloaded"])
def test_gradients_are_bit_equal_with(ranks: Told, scenario: str):
    assert all(found[scenario] for found in ranks)


def test_rebuilt_shards_are_inspected_bit_for_bit(ranks: Told):
    for found in ranks:
        inspected_tensors, faults = found["tensor parallel"]["inspected"]
        assert inspected_tensors > 0
        assert faults == 0


def test_a_rank_that_cannot_repeat_its_collectives_says_so_before_backward(ranks: Told):
    assert ranks[0]["misfit"] == ""
    assert "Rank 1 cannot follow the recorded recipes" in ranks[1]["misfit"]


def test_ranks_that_would_repeat_other_collectives_all_get_the_same_error(ranks: Told):
    first, second = (found["disagreement"] for found in ranks)
    assert first[:5] == second[:5]
    assert first.kind == "RanksDiffer"
    assert "rank 1 recipe all_reduce" in first.found


def test_all_ranks_of_one_layout_have_one_fingerprint(ranks: Told):
    first, second = ([found[layout]["fingerprint"] for layout in ("whole", *SPLIT[:2])] for found in ranks)
    assert first == second
    assert len(set(first)) == len(first)


def test_a_write_through_a_dtensor_is_noticed_in_backward(ranks: Told):
    for found in ranks:
        assert found["written in place"].kind == "SavedTensorModified"
        assert "an in-place operation has modified it" in found["written in place"].found
