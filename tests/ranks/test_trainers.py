"""Trainers of frameworks on two real ranks."""

from __future__ import annotations

import pytest

from launching import launch

pytestmark = pytest.mark.long


def test_a_trainer_on_two_ranks_keeps_to_its_budget_and_to_every_bit(tmp_path):
    for told in launch(2, "ranks.trainer_scenarios:train_with_trainer", str(tmp_path)):
        assert told.pop("called") == "DistributedDataParallel"
        assert all(told.values()), told


def test_lightning_and_accelerate_on_two_ranks_keep_to_their_budgets_and_to_every_bit():
    for told in launch(2, "ranks.trainer_scenarios:train_with_loops"):
        assert all(all(each.values()) for each in told), told
