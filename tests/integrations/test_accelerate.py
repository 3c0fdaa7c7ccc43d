"""``plimsoll.attach`` in a loop with Accelerate: before ``prepare`` and after it."""

from __future__ import annotations

import pytest
import torch
from benchmarks.stack_setups.accelerate import train
from benchmarks.stack_setups.set_up import Arm, Watch

from metering import LiveStorages

SETTINGS = {
    "after prepare, bf16": {"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
    "before prepare": {"attaches_first": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_loop_under_a_budget_keeps_to_it_and_to_every_bit(settings):
    without, within = Watch(LiveStorages()), Watch(LiveStorages())
    train(without, Arm(), 4, **settings)
    budget_bytes = int(0.85 * max(without.peaks))
    train(within, Arm(budget=budget_bytes), 4, **settings)
    assert max(within.peaks) <= budget_bytes
    assert within.losses == without.losses
    assert all(map(torch.equal, within.weights, without.weights))
