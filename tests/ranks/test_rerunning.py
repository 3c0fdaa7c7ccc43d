"""On two ranks, backward runs a block's forward again if that sends nothing to other ranks."""

from __future__ import annotations

import pytest

from launching import Told, on_ranks

pytestmark = pytest.mark.long
pair = on_ranks(2, "ranks.rerunning:found")


def test_a_block_under_fully_shard_runs_again_although_ranks_go_different_ways(pair: Told):
    for rank in pair:
        found = rank["fully_shard"]
        assert all(found["equal"])
        assert all(count > 0 for count in found["reruns"])
        assert not found["said"]


def test_a_block_with_a_collective_inside_keeps_its_activations_and_says_why(pair: Told):
    for rank in pair:
        found = rank["collective"]
        assert all(found["equal"])
        assert not any(found["reruns"])
        assert any("communicates with other ranks, which do not run again" in text for text in found["said"])
