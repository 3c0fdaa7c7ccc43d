"""A call of a model that the user makes in, what ``attach`` needs of it out: its batch, a loss for it, a hook around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from plimsoll.errors import BudgetBelowFloor, InvalidLoss
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.units import format_bytes


class CallHook:
    """Calls a method of an attachment. Copies and pickles of the model get a hook that does nothing."""

    def __init__(self, run: Callable[..., None] | None = None) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> None:
        if self._run is not None:
            self._run(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> CallHook:
        return CallHook()

    def __reduce__(self) -> tuple[type[CallHook], tuple[()]]:
        return (CallHook, ())


def as_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as a batch; where some are positional and some are not, by the names of ``forward``."""
    if args and kwargs:
        return dict(inspect.signature(inner_module(model).forward).bind(*args, **kwargs).arguments)
    return args if args else kwargs


def refuse_optimizer_above(budget_bytes: int, optimizer_peak_bytes: int) -> None:
    """Refuse a budget that the optimizer's step alone exceeds.

    Raises:
        BudgetBelowFloor: no decision about activations changes that.
    """
    if optimizer_peak_bytes > budget_bytes:
        raise BudgetBelowFloor(
            f"budget {format_bytes(budget_bytes)} is below what the optimizer's step takes, "
            f"{format_bytes(optimizer_peak_bytes)}.",
            why="parameters, gradients, the optimizer's state and its temporaries are there together in its step, and no "
            "decision about activations changes that",
            next=f'budget "{optimizer_peak_bytes}B", or an optimizer with less state, or foreach=False',
        )


def stand_in_loss(output: Any) -> torch.Tensor:
    """The model's own loss; else a sum of what it returns, since the user's loss is not known in its first call.

    Raises:
        InvalidLoss: nothing that it returns can be trained.
    """
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.numel() == 1 and own.requires_grad:
        return own
    parts = [t.float().sum() for t in output_tensors(output) if t.requires_grad and t.is_floating_point()]
    if not parts:
        raise InvalidLoss(
            f"The output of the model ({type(output).__name__}) does not depend on any parameter.",
            why="attach calibrates on the first training call, and nothing in it can be trained",
            next="unfreeze parameters, or use plimsoll.plan with loss=",
        )
    return torch.stack(parts).sum()
