"""Where one of several ranks runs out of memory, all run the step again under a tighter plan, or none does."""

from __future__ import annotations

import pytest

from launching import Told, on_ranks
from ranks.retrying import FOURFOLD, PAIRED

pytestmark = pytest.mark.long

pair = on_ranks(2, "ranks.retrying:on_a_pair")
four = on_ranks(4, "ranks.retrying:on_four")


@pytest.mark.parametrize("number", range(len(PAIRED) + len(FOURFOLD)))
def test_a_step_that_fails_on_one_rank_is_run_again_by_all_with_the_bits_of_one_that_does_not(
    pair: Told, four: Told, number: int
):
    told, number = (pair, number) if number < len(PAIRED) else (four, number - len(PAIRED))
    found = [rank["trained"][number] for rank in told]
    assert all(each["is_equal"] for each in found), found[0]["case"]
    assert [each["failures"] for each in found] == [int(rank in found[0]["case"][2]) for rank in range(len(told))]
    _, verb, shares, failing = found[0]["case"]
    # Plans that were applied are the same on all ranks; under attach only a rank that lacked memory takes a tighter one.
    is_tighter = [verb == "apply" or (failing > 0 and rank in shares) for rank in range(len(told))]
    assert [each["dropped"] > 0 for each in found] == is_tighter


def test_an_error_of_one_rank_stays_its_own_and_is_named_on_the_others(pair: Told):
    one, other = (rank["own error"] for rank in pair)
    assert (one["kind"], other["kind"]) == ("RankFailed", "ZeroDivisionError")
    assert one["ranks"] == (1,)
    assert one["seconds"] < 30


@pytest.mark.parametrize(
    ("what", "kinds"),
    [("floor", ("RankFailed", "BudgetBelowFloor")), ("written", ("RankFailed", "OutOfMemoryError"))],
)
def test_where_the_step_cannot_be_run_again_no_rank_runs_it(pair: Told, what: str, kinds: tuple[str, str]):
    found = [rank[what] for rank in pair]
    assert tuple(each["kind"] for each in found) == kinds
    assert what == "written" or all(each["is_whole"] for each in found)
