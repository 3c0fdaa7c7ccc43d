"""A loop of one's own with Accelerate, on small models with random weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import plimsoll
from benchmarks.stack_setups.hugging_face import llama
from benchmarks.stack_setups.lightning import GPT2, VIT
from benchmarks.stack_setups.set_up import Arm, SetUp, Watch


def train(
    watch: Watch,
    arm: Arm,
    steps: int,
    *,
    model: Callable[[], nn.Module] = llama,
    of: dict[str, Any] | None = None,
    attaches_first: bool = False,
    **changes: Any,
) -> Any:
    """Train, with ``plimsoll.attach`` after ``prepare`` or before it; returns the module that is called."""
    AcceleratorState._reset_state(reset_partial_state=True)
    given = watch.batches(**(of or {}))
    with contextlib.nullcontext() if watch.meter is None else watch.meter:
        accelerator = Accelerator(cpu=True, **changes)
        torch.manual_seed(0)
        made: Any = model()
        if arm.own_switch:
            made.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
        budgets = [] if arm.budget is None else [arm.budget]
        handles = [plimsoll.attach(made, budget) for budget in budgets if attaches_first]
        called, optimizer = accelerator.prepare(made, optimizer)
        handles += [plimsoll.attach(called, budget) for budget in budgets if not attaches_first]
        watch.attached(made if attaches_first else called)
        losses = []
        for batch in given[: steps * accelerator.gradient_accumulation_steps]:
            with accelerator.accumulate(called):
                loss = called(**batch)["loss"]
                accelerator.backward(loss)
                losses.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                watch.stepped()
        for handle in handles:
            handle.remove()
    weights = accelerator.unwrap_model(called)
    watch.ended(weights, losses)
    return called


def _set_up(of_model: str, shapes: str, ranks: int = 1, **changes: Any) -> SetUp:
    return SetUp(
        stack="Accelerate" if ranks == 1 else "Accelerate DDP",
        ranks=ranks,
        model=of_model,
        precision=changes.get("mixed_precision", "fp32"),
        accumulation=changes.get("gradient_accumulation_steps", 1),
        shapes=shapes,
        train=functools.partial(train, **changes),
    )


SET_UPS = (
    _set_up("Llama", "8 x 64"),
    _set_up("GPT-2", "8 x 64", model=GPT2, mixed_precision="bf16"),
    _set_up("ViT", "32 pictures", model=VIT, of={"rows": 32, "name": "vit"}, gradient_accumulation_steps=2),
    _set_up("Llama", "8 x 24 to 64", of={"lengths": (24, 40, 64)}, mixed_precision="bf16"),
    _set_up("Llama", "8 x 64", 2),
    _set_up("GPT-2", "8 x 64", 2, model=GPT2, mixed_precision="bf16", gradient_accumulation_steps=2),
)
