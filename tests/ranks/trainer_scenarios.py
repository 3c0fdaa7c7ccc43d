"""What every rank does with a framework's own trainer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from benchmarks.stack_setups.hugging_face import plain_trainer, train
from benchmarks.stack_setups.set_up import Arm, Watch

from metering import LiveStorages


def train_with_trainer(folder: str) -> dict[str, Any]:
    """Hugging Face's trainer, which wraps its model in ``DistributedDataParallel``, without a budget and with one."""
    make = functools.partial(plain_trainer, folder, max_steps=2, gradient_accumulation_steps=2)
    without, within = Watch(LiveStorages()), Watch(LiveStorages())
    train(make, without, Arm())
    budget_bytes = int(0.85 * max(without.peaks))
    trainer = train(make, within, Arm(own_switch=True, budget=budget_bytes))
    return {
        "called": type(trainer.model_wrapped).__name__,
        "is within": max(within.peaks) <= budget_bytes,
        "has equal losses": within.losses == without.losses,
        "has equal weights": all(map(torch.equal, within.weights, without.weights)),
    }
