"""Ranks tell each other things without collectives: all get everything, or all get the same error."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from launching import launch
from plimsoll.errors import InvalidOption, RankMissing
from plimsoll.session.rendezvous.exchange import Meeting
from plimsoll.session.rendezvous.world import World, current_world

RANKS = 4


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    return launch(RANKS, "ranks.exchanging:everything")


def test_every_rank_gets_the_messages_of_all_in_order(told: list[dict[str, Any]]):
    expected = [tuple(f"{turn} from {rank}".encode() for rank in range(RANKS)) for turn in range(3)]
    assert all(rank["messages"] == expected for rank in told)


def test_messages_are_removed_once_all_have_read_them(told: list[dict[str, Any]]):
    assert [rank["keys_left"] for rank in told] == [[]] * RANKS


def test_messages_may_be_large(told: list[dict[str, Any]]):
    assert told[0]["large"] == [1 << 20] * RANKS


def test_a_straggler_is_named_on_all_ranks_and_on_itself(told: list[dict[str, Any]]):
    assert {rank["straggler"][0] for rank in told} == {"Rank 1 did not come to 'late' within 0.2 s."}
    assert {rank["straggler"][1] for rank in told} == {(1,)}
    assert all(rank["straggler"][2] < 2 for rank in told)


def test_ranks_meet_again_after_somebody_came_late(told: list[dict[str, Any]]):
    assert all(rank["after_straggler"] == (b"on time",) * RANKS for rank in told)


def test_a_rank_that_fails_is_named_on_the_others_and_keeps_its_own_error(told: list[dict[str, Any]]):
    kinds = [rank["failure"][0] for rank in told]
    assert kinds == ["RankFailed", "ZeroDivisionError", "RankFailed", "RankFailed"]
    assert told[0]["failure"][1].startswith("Rank 1 failed in 'dividing': ZeroDivisionError")
    assert [rank["after_failure"] for rank in told] == [1, 2, 3, 4]


def test_subsets_of_ranks_exchange_among_themselves(told: list[dict[str, Any]]):
    assert [rank["subset"] for rank in told] == [(b"0", b"2"), (b"1", b"3")] * 2


def test_a_rank_that_does_not_exist_is_refused(told: list[dict[str, Any]]):
    assert told[3]["no_such_rank"] == "ranks=[0, 1, 2, 3, 4] on rank 3 of 4."


def test_a_rank_that_comes_at_the_last_moment_is_not_missing():
    world = World(0, (0, 1), dist.HashStore())
    meeting = Meeting.arrive(world, "sums", b"first", timeout_seconds=0.01)
    world.store.set("sums/1/1", b"second")  # this rank's wait ends before the other has declared it complete
    assert meeting.collect() == (b"first", b"second")


def test_without_a_process_group_there_is_no_world():
    assert current_world() is None
    with pytest.raises(InvalidOption, match="not initialised"):
        current_world((0, 1))


def test_errors_about_ranks_keep_them_when_pickled():
    import pickle

    error = RankMissing("gone", why="w", next="n", ranks=(3,))
    assert pickle.loads(pickle.dumps(error)).ranks == (3,)
