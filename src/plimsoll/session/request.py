"""What a user passed in; the same, checked and in the form that the stages take, out; or the error that says what is wrong."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from plimsoll.artifacts.plan import Plan
from plimsoll.engine.region import ManagedRegion
from plimsoll.errors import (
    InvalidLoss,
    InvalidModel,
    InvalidOption,
    InvalidRegions,
    PlanNotUsable,
    PlimsollError,
    TracingFailed,
)
from plimsoll.tracing.recorder.calling import Loss, split_batch

_OF_OURS = (PlimsollError, torch.OutOfMemoryError)


def check_module(model: object) -> nn.Module:
    """Refuse what is no module.

    Raises:
        InvalidModel: says what it is.
    """
    if not isinstance(model, nn.Module):
        raise InvalidModel(
            f"A {type(model).__name__} is no model.",
            why="Plimsoll manages the regions of a torch.nn.Module",
            next="pass the module that is trained",
        )
    return model


def check_model(model: object, optimizer: object = None) -> None:
    """Refuse what is no module, what is managed already, and what is no optimizer.

    Raises:
        InvalidModel: says which.
    """
    model = check_module(model)
    managed = next((name for name, module in model.named_modules() if is_managed(module)), None)
    if managed is not None:
        raise InvalidModel(
            f"{type(model).__name__} is managed by a plan already: {managed or 'the model itself'}.",
            why="what its step needs without a plan cannot be seen while one is at work",
            next="call handle.remove() first, or do this before plimsoll.apply",
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidModel(
            f"optimizer= is a {type(optimizer).__name__}, which is no torch.optim.Optimizer.",
            why="its state and the memory of its step are found by running it",
            next="pass the optimizer itself, or leave it out to budget forward, backward and gradients",
        )


def is_profiled() -> bool:
    """Whether a profiler of the user runs (our own meters do not raise this flag)."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def refuse_profiler(model: nn.Module) -> None:
    """Refuse to measure memory while a profiler runs: on a CPU that takes torch's profiler, and there is only one.

    Raises:
        TracingFailed: a profiler runs, and the model is on a CPU.
    """
    if is_profiled() and any(parameter.device.type == "cpu" for parameter in model.parameters()):
        raise TracingFailed(
            "A profiler is running.",
            why="on a CPU memory is measured with torch's profiler, of which there is one: yours would lose its records",
            next="call Plimsoll before the profiler starts; training under a plan can be profiled",
        )


def is_managed(module: nn.Module) -> bool:
    """Whether a plan is at work on this very module."""
    return isinstance(module.__dict__.get("forward"), ManagedRegion)


def check_plan(plan: object) -> None:
    """Refuse what is no plan.

    Raises:
        PlanNotUsable: a path or something else was passed in its place.
    """
    if not isinstance(plan, Plan):
        raise PlanNotUsable(
            f"A {type(plan).__name__} is no plan.",
            why="decisions come from plimsoll.plan(...), or from a file by plimsoll.load(path)",
            next="plimsoll.load(path)" if isinstance(plan, str) else "plan = plimsoll.plan(model, batch, budget=...)",
        )


def check_count(name: str, count: object, *, least: int) -> None:
    """Refuse an option that counts steps or calls and is no whole number, or too small.

    Raises:
        InvalidOption: says which.
    """
    if isinstance(count, int) and not isinstance(count, bool) and count >= least:
        return
    raise InvalidOption(
        f"{name}={count!r} is no count.",
        why=f"it has to be a whole number, {least} or more",
        next=f"{name}={max(least, 1)}" + (f", or {name}=0 for never" if least == 0 else ""),
    )


def split_detached(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the call, cut from the graph that made them: a trial backward must not run into it.

    Raises:
        InvalidBatch: neither a tensor, nor a tuple, nor a mapping.
    """
    args, kwargs = split_batch(batch)
    cut: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(torch.Tensor, _detached, (args, kwargs))
    return cut


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


def detached(batch: Any) -> Any:
    """The batch in its own form, cut from the graph that made it."""
    if isinstance(batch, torch.Tensor):
        return _detached(batch)
    args, kwargs = split_detached(batch)
    return kwargs or args


def explained_loss(loss: object) -> Loss | None:
    """The loss as given, but what it raises is an ``InvalidLoss``.

    Raises:
        InvalidLoss: it cannot be called.
    """
    if loss is None:
        return None
    if not callable(loss):
        raise InvalidLoss(
            f"loss= is a {type(loss).__name__}, which cannot be called.",
            why="it is called with the model's output and returns one number",
            next="pass loss=lambda output: ..., or leave it out where the output has a loss",
        )

    @functools.wraps(loss, updated=())
    def explained(output: Any) -> torch.Tensor:
        try:
            value: torch.Tensor = loss(output)
        except _OF_OURS:
            raise
        except Exception as error:  # a user's function may raise anything
            raise InvalidLoss(
                f"loss= refused the model's output: {type(error).__name__}: {error}",
                why=f"it was given a {type(output).__name__}",
                next="check that loss(model(...)) works without Plimsoll",
            ) from error
        return value

    # What has no name of its own (an nn.Module, a partial) goes by its class in the signature of the step.
    explained.__qualname__ = getattr(loss, "__qualname__", type(loss).__qualname__)
    return explained


def as_patterns(regions: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """Region patterns as a tuple; one pattern may stand alone.

    Raises:
        InvalidRegions: an empty list, which would manage nothing.
    """
    if regions is None:
        return None
    patterns = (regions,) if isinstance(regions, str) else tuple(regions)
    if not patterns:
        raise InvalidRegions(
            "regions= is empty.",
            why="without regions there is nothing to decide about",
            next="leave it out for the repeated blocks, or name modules as in 'model.layers.*'",
        )
    return patterns


def as_strategies(strategies: Sequence[str] | str) -> tuple[str, ...]:
    """Names of strategies, each once; one name may stand alone."""
    return (strategies,) if isinstance(strategies, str) else tuple(dict.fromkeys(strategies))
