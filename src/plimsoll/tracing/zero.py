"""All that knows DeepSpeed, with ZeRO in stages 1 and 2 or without: the model in its engine, what it steps, what it holds.

The engine calls the model, whose parameters are views of flat ones. Hooks on the parameters move every gradient into a bucket
while backward runs; a trial step must not reach them, so it runs on twins (see ``ddp``). The optimizer inside steps flat
partitions in its own type (without ZeRO, copies of 16-bit parameters in 32 bits), of which the model knows nothing.

Source: deepspeed.runtime.zero.stage_1_and_2, bf16_optimizer and fp16. What it writes on parameters, and what it calls its own,
was seen in DeepSpeed 0.19. Importing it takes seconds; where nobody has, no model is in its hands.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from plimsoll.tracing.meters.memory import storage_bytes

_ENGINE = "deepspeed.runtime.engine"
_STEPPED = "_hp_mapping"
"""What stages 1 and 2 write on every parameter."""


def inside_engine(model: nn.Module) -> nn.Module:
    """The module that a DeepSpeed engine calls; any other model is its own."""
    kind = _engine_kind()
    return model.module if kind is not None and isinstance(model, kind) else model


def is_stepped_by_zero(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether ZeRO, stage 1 or 2, has hooks on the parameters."""
    return any(_STEPPED in vars(parameter) for parameter in parameters)


def engine_of(model: nn.Module) -> Any | None:
    """The engine that calls a model: it is found in the engine's own hooks on that."""
    kind = _engine_kind()
    if kind is None:
        return None
    hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())  # seen in torch 2.9 to 2.13
    cells = [cell for hook in hooks for cell in getattr(hook, "__closure__", None) or ()]
    return next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, kind)), None)


def partitions(model: nn.Module) -> list[nn.Parameter]:
    """What DeepSpeed steps on this rank in place of the parameters: flat partitions (ZeRO), or copies in 32 bits."""
    wrapper = _wrapper_of(model)
    return [] if wrapper is None else [each for group in wrapper.optimizer.param_groups for each in group["params"]]


def held_by_deepspeed(model: nn.Module) -> list[torch.Tensor]:
    """What DeepSpeed holds between steps beside optimizer state: partitions, and gradients while they accumulate."""
    wrapper = _wrapper_of(model)
    leaves = [] if wrapper is None else tree_leaves(list(vars(wrapper).values()))
    return [*partitions(model), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]


def bytes_beside(model: nn.Module) -> int:
    """The same, but for the flat parameters themselves, of which the model's are views."""
    own = list(model.parameters())
    return storage_bytes([*own, *held_by_deepspeed(model)], own[0].device) - storage_bytes(own, own[0].device)


def _wrapper_of(model: nn.Module) -> Any | None:
    """DeepSpeed's optimizer around torch's, if the engine has one: without ZeRO and in 32 bits it has torch's alone."""
    wrapper = getattr(engine_of(model), "optimizer", None)
    return wrapper if wrapper is not None and "optimizer" in vars(wrapper) else None


def _engine_kind() -> Any | None:
    return getattr(sys.modules.get(_ENGINE), "DeepSpeedEngine", None)
