"""``plimsoll.attach`` in loops of one's own and with Accelerate: kept in every step, to every bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from benchmarks.stack_setups import accelerate, loops
from benchmarks.stack_setups.set_up import Arm, Watch
from torch import nn
from torch.utils.checkpoint import checkpoint

from metering import LiveStorages

pytestmark = pytest.mark.long

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


class NormAct(nn.BatchNorm2d):
    """A batch norm and its activation in one module, as timm has them."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


class Separable(nn.Module):
    """The first block of an EfficientNet, of which there is one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep, self.norm1 = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False), NormAct(width)
        self.down, self.norm2 = nn.Conv2d(width, width, 1, bias=False), NormAct(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm2(self.down(self.norm1(self.deep(x))))


class Inverted(nn.Module):
    """All others: wide inside."""

    def __init__(self, width: int, wide: int, stride: int) -> None:
        super().__init__()
        self.up, self.norm1 = nn.Conv2d(width, wide, 1, bias=False), NormAct(wide)
        self.deep, self.norm2 = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), NormAct(wide)
        self.down = nn.Conv2d(wide, width, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm2(self.deep(self.norm1(self.up(x)))))


class Convolutional(nn.Module):
    """Stages of blocks, of which the first is of a kind of its own; its switch checkpoints every block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), NormAct(width)
        wide = [Inverted(width, 6 * width, stride) for stride in (2, 1)]
        self.blocks = nn.Sequential(nn.Sequential(Separable(width)), nn.Sequential(*wide))
        # Large gradients, before any of the blocks: the peak is in a block's backward.
        self.head = nn.Sequential(nn.Linear(width, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 10))
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        for block in (block for stage in self.blocks for block in stage):
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x.mean((2, 3)))


def switch_on(model: Any) -> None:
    model.checkpoints = True


CONVOLUTIONAL = loops.Task(
    build=Convolutional,
    batch=lambda: (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))),
    loss=loops.EFFICIENTNET.loss,
    switch=switch_on,
)
SWITCHES = {
    "a convolutional network": CONVOLUTIONAL,
    "timm, EfficientNet": loops.EFFICIENTNET,
    "timm, ViT": loops.VIT,
}


@pytest.mark.parametrize("name", SWITCHES)
def test_the_peak_of_a_models_own_switch_is_a_budget_that_is_kept(name):
    if name.startswith("timm"):
        pytest.importorskip("timm")
    own, within = Watch(LiveStorages()), Watch(LiveStorages())
    loops.train(own, Arm(own_switch=True), 4, task=SWITCHES[name])
    loops.train(within, Arm(budget=max(own.peaks)), 4, task=SWITCHES[name])
    assert max(within.peaks) <= max(own.peaks)
    assert within.losses == own.losses
    assert all(map(torch.equal, within.weights, own.weights))
