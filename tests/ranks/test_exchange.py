"""Ranks tell each other things without collectives: all get everything, or all get the same error."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch.distributed as dist

from launching import Refusal, Told, on_ranks, refused
from plimsoll.errors import InvalidOption, RankMissing
from plimsoll.session.rendezvous.conversation import Conversation
from plimsoll.session.rendezvous.exchange import Meeting, exchange
from plimsoll.session.rendezvous.world import World, current_world

RANKS = 4


told = on_ranks(RANKS, "ranks.test_exchange:everything")


def everything() -> dict[str, Any]:
    """What the ranks of the one launch do, in the same order on every rank."""
    world = current_world()
    assert world is not None
    return {
        "messages": [exchange(world, "greeting", f"{turn} from {world.rank}".encode()) for turn in range(3)],
        "keys_left": _keys_left(world),
        "large": [len(message) for message in exchange(world, "large", bytes(1 << 20))],
        "straggler": _late(world),
        "after_straggler": exchange(world, "late", b"on time"),
        "failure": refused(lambda: _divide(world)),
        "after_failure": _fine(world),
        "subset": _subset(world),
        "no_such_rank": refused(lambda: current_world((0, 1, 2, 3, 4))).found,
    }


def _keys_left(world: World) -> list[str]:
    dist.barrier()
    return [
        key
        for key in (f"greeting/{turn}/{what}" for turn in (1, 2, 3) for what in (0, 1, "verdict", "read"))
        if world.store.check([key])
    ]


def _late(world: World) -> Refusal:
    if world.rank == 1:
        time.sleep(0.6)
    return refused(lambda: exchange(world, "late", b"hello", timeout_seconds=0.2))


def _divide(world: World) -> float:
    with Conversation(world, "dividing") as conversation:
        found = 1 // (world.rank - 1)
        conversation.ask("divided")
    return found


def _fine(world: World) -> int:
    with Conversation(world, "dividing") as conversation:
        conversation.ask("divided")
    return 1 + world.rank


def _subset(world: World) -> tuple[bytes, ...]:
    """Two pairs exchange under one topic at the same time."""
    pair = (0, 2) if world.rank in (0, 2) else (1, 3)
    part = current_world(pair)
    assert part is not None
    assert current_world((world.rank,)) is None
    return exchange(part, "pair", str(world.rank).encode())


def test_every_rank_gets_the_messages_of_all_in_order(told: Told):
    expected = [tuple(f"{turn} from {rank}".encode() for rank in range(RANKS)) for turn in range(3)]
    assert all(rank["messages"] == expected for rank in told)


def test_messages_are_removed_once_all_have_read_them(told: Told):
    assert [rank["keys_left"] for rank in told] == [[]] * RANKS


def test_messages_may_be_large(told: Told):
    assert told[0]["large"] == [1 << 20] * RANKS


def test_a_straggler_is_named_on_all_ranks_and_on_itself(told: Told):
    for kind, found, _, _, ranks, seconds in (rank["straggler"] for rank in told):
        assert (kind, found) == ("RankMissing", "Rank 1 did not come to 'late' within 0.2 s.")
        assert ranks == (1,)
        assert seconds < 2


def test_ranks_meet_again_after_somebody_came_late(told: Told):
    assert all(rank["after_straggler"] == (b"on time",) * RANKS for rank in told)


def test_a_rank_that_fails_is_named_on_the_others_and_keeps_its_own_error(told: Told):
    kinds = [rank["failure"].kind for rank in told]
    assert kinds == ["RankFailed", "ZeroDivisionError", "RankFailed", "RankFailed"]
    assert told[0]["failure"].found.startswith("Rank 1 failed in 'dividing': ZeroDivisionError")
    assert [rank["after_failure"] for rank in told] == [1, 2, 3, 4]


def test_subsets_of_ranks_exchange_among_themselves(told: Told):
    assert [rank["subset"] for rank in told] == [(b"0", b"2"), (b"1", b"3")] * 2


def test_a_rank_that_does_not_exist_is_refused(told: Told):
    assert told[3]["no_such_rank"] == "ranks=[0, 1, 2, 3, 4] was passed on rank 3 of 4."


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
    error = RankMissing("gone", why="w", next="n", ranks=(3,))
    assert pickle.loads(pickle.dumps(error)).ranks == (3,)
