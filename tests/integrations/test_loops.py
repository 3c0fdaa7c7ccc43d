"""``plimsoll.attach`` in loops of one's own, on models of other libraries: kept in every step, to every bit."""

from __future__ import annotations

import pytest
import torch
from benchmarks.stack_setups import loops
from benchmarks.stack_setups.set_up import Arm, Watch

from metering import LiveStorages

TASKS = {
    "diffusers": (loops.dit(num_layers=2), {}),
    "timm": (loops.VIT, {"precision": "bf16", "accumulation": 2}),
    "torch_geometric": (loops.graph_task(300, 2100), {}),
    "torchvision": (loops.detection_task("Faster R-CNN"), {}),
}


@pytest.mark.parametrize("library", TASKS)
def test_a_loop_under_a_budget_keeps_to_it_and_to_every_bit(library):
    pytest.importorskip(library)
    task, how = TASKS[library]
    without, within = Watch(LiveStorages()), Watch(LiveStorages())
    loops.train(without, Arm(), 4, task=task, **how)
    budget_bytes = int(0.9 * max(without.peaks))
    loops.train(within, Arm(budget=budget_bytes), 4, task=task, **how)
    assert max(within.peaks) <= budget_bytes
    assert within.losses == without.losses
    assert all(map(torch.equal, within.weights, without.weights))
