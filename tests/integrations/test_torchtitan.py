"""torchtitan's activation checkpointing, by a budget: its debug model with fewer layers, in its own Trainer class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.stack_setups.set_up import Arm, Watch
from benchmarks.stack_setups.torchtitan import small_trainer, train

from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor, InvalidOption

pytestmark = pytest.mark.long

pytest.importorskip("torchtitan.trainer", reason="torchtitan is no test extra: it needs tensorboard and torchdata")


def budgeted(budget: int | str) -> Any:
    from plimsoll.integrations.torchtitan import BudgetAC

    return BudgetAC.Config(memory_budget=budget)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_budget_is_kept_in_every_step_to_every_bit(accumulation):
    without, within = Watch(LiveStorages()), Watch(LiveStorages())
    train(without, Arm(), 4, accumulation=accumulation)
    budget_bytes = int(0.85 * max(without.peaks))
    trainer = train(within, Arm(budget=budget_bytes), 4, accumulation=accumulation)
    assert max(within.peaks) <= budget_bytes
    assert within.losses == without.losses
    assert all(map(torch.equal, within.weights, without.weights))
    assert not {"train_step", "close"} & set(vars(trainer))


def test_a_budget_below_the_floor_stops_the_first_step():
    with pytest.raises(BudgetBelowFloor):
        train(Watch(), Arm(budget=2**20), 1)


def test_a_policy_without_a_trainer_is_refused():
    with pytest.raises(InvalidOption, match="outside a torchtitan Trainer"):
        budgeted("1GiB").build().apply(torch.nn.Linear(2, 2))


def test_a_pipeline_is_refused():
    trainer = small_trainer()(budgeted("1GiB"))
    trainer.parallel_dims.pp_enabled = True
    with pytest.raises(InvalidOption, match="pipeline"):
        trainer.train_step(None)
