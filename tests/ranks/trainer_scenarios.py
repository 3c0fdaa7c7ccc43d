"""What every rank does with a framework's own trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.stack_setups import accelerate, lightning
from benchmarks.stack_setups.hugging_face import plain_trainer, train
from benchmarks.stack_setups.set_up import Arm, Watch

from metering import LiveStorages
from plimsoll.errors import InvalidModel
from plimsoll.tracing.local_tensors import local_of


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


def train_with_loops() -> list[dict[str, Any]]:
    """Lightning's trainer under DDP and FSDP2, and a loop with Accelerate, whose model is under DDP."""

    return [
        _compared(functools.partial(lightning.train, devices=2, strategy="ddp")),
        _compared(lightning.train_sharded),
        _compared(accelerate.train),
        {"refuses what is wrapped later": "around LlamaForCausalLM" in _attached_first()},
    ]


def _attached_first() -> str:
    with pytest.raises(InvalidModel) as refused:
        accelerate.train(Watch(), Arm(budget=2**30), 1, attaches_first=True)
    return refused.value.found


def _compared(run: Callable[[Watch, Arm, int], Any]) -> dict[str, Any]:
    without, within = Watch(LiveStorages()), Watch(LiveStorages())
    run(without, Arm(), 2)
    budget_bytes = int(0.85 * max(without.peaks))
    run(within, Arm(budget=budget_bytes), 2)
    return {
        "is within": 0 < max(within.peaks) <= budget_bytes,
        "has equal losses": within.losses == without.losses,
        "has equal weights": all(map(torch.equal, map(local_of, within.weights), map(local_of, without.weights))),
    }
