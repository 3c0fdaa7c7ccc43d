"""``plimsoll.attach`` in loops of one's own and with Accelerate: kept in every step, to every bit."""

from __future__ import annotations

import functools

import pytest
import torch
from benchmarks.stack_setups import accelerate, loops
from benchmarks.stack_setups.set_up import Arm, Watch

from metering import LiveStorages

LOOPS = {
    "accelerate, after prepare, bf16": (
        accelerate.train,
        0.85,
        {"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
    ),
    "accelerate, before prepare": (accelerate.train, 0.85, {"attaches_first": True}),
    "diffusers": (loops.train, 0.9, {"task": loops.dit(num_layers=2)}),
    "timm": (loops.train, 0.9, {"task": loops.VIT, "precision": "bf16", "accumulation": 2}),
    "torch_geometric": (loops.train, 0.9, {"task": loops.graph_task(300, 2100)}),
    "torchvision": (loops.train, 0.9, {"task": loops.detection_task("Faster R-CNN")}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_under_a_budget_keeps_to_it_and_to_every_bit(name):
    pytest.importorskip(name.partition(",")[0])
    train, share, how = LOOPS[name]
    train = functools.partial(train, **how)
    without, within = Watch(LiveStorages()), Watch(LiveStorages())
    train(without, Arm(), 4)
    budget_bytes = int(share * max(without.peaks))
    train(within, Arm(budget=budget_bytes), 4)
    assert max(within.peaks) <= budget_bytes
    assert within.losses == without.losses
    assert all(map(torch.equal, within.weights, without.weights))
