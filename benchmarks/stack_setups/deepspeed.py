"""DeepSpeed's engine on a CPU over gloo, on small models with random weights.

DeepSpeed is imported where an engine is made: without it these rows are left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch
from torch import distributed

import plimsoll
from benchmarks.stack_setups.hugging_face import llama
from benchmarks.stack_setups.set_up import Arm, SetUp, Watch


def configuration(stage: int = 1, precision: str = "fp32", accumulation: int = 1) -> dict[str, Any]:
    """What DeepSpeed is given. Its own buckets are as large as those of a large model: half a billion numbers."""
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 50_000,
            "allgather_bucket_size": 50_000,
            "stage3_param_persistence_threshold": 1_000,
            "stage3_prefetch_bucket_size": 50_000,
            "stage3_max_live_parameters": 200_000,
            "stage3_max_reuse_distance": 200_000,
        },
    }


def on_cpu() -> Any:
    """DeepSpeed, ready for this process: alone in its group where no launcher has made one.

    It compiles an operator for inference when it starts on a CPU, which takes minutes on a busy machine and is not called
    in training.
    """
    os.environ.update({"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")})
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not distributed.is_initialized() and "RANK" not in os.environ:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return deepspeed


def train(watch: Watch, arm: Arm, steps: int, **changes: Any) -> Any:
    """Train with DeepSpeed's engine, with ``plimsoll.attach`` after ``deepspeed.initialize``; returns the engine."""
    deepspeed, config = on_cpu(), configuration(**changes)
    count = config["gradient_accumulation_steps"]
    given = watch.batches()
    with contextlib.nullcontext() if watch.meter is None else watch.meter:
        torch.manual_seed(0)
        made = llama()
        if arm.own_switch:
            made.gradient_checkpointing_enable()
        engine, *_ = deepspeed.initialize(model=made, model_parameters=made.parameters(), config=config)
        handle = None if arm.budget is None else plimsoll.attach(engine, arm.budget)
        watch.attached(engine.module)
        losses = []
        for number, batch in enumerate(given[: steps * count], start=1):
            loss = engine(**batch)["loss"]
            engine.backward(loss)
            losses.append(float(loss.detach()))
            engine.step()
            if number % count == 0:
                watch.stepped()
        if handle is not None:
            handle.remove()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        watch.ended(engine.module, losses)
    engine.destroy()
    return engine


def _set_up(stage: int, ranks: int = 1, **changes: Any) -> SetUp:
    return SetUp(
        stack=f"DeepSpeed ZeRO-{stage}",
        ranks=ranks,
        model="Llama",
        precision=changes.get("precision", "fp32"),
        accumulation=changes.get("accumulation", 1),
        shapes="8 x 64",
        requires="deepspeed",
        train=functools.partial(train, stage=stage, **changes),
    )


SET_UPS = (
    _set_up(1),
    _set_up(2, precision="bf16"),
    _set_up(1, ranks=2, precision="bf16"),
    _set_up(2, ranks=2, accumulation=2),
    _set_up(3),
    _set_up(3, ranks=2, precision="bf16"),
    _set_up(3, ranks=2, accumulation=2),
)
