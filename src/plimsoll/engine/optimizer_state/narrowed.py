"""Runs the code of an optimizer's step for some of its parameters only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch.optim import Optimizer


def step_without_hooks(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the step of the optimizer's class without its hooks, which run once for a whole step.

    Example:
        >>> step_without_hooks(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])).__name__
        'step'
    """
    step: Any = type(optimizer).step
    found: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return found


@contextlib.contextmanager
def narrowed(optimizer: Optimizer, chosen: Container[int]) -> Iterator[None]:
    """Return a context manager. In its block, the groups of the optimizer hold only the chosen parameters (their ``id``).

    Example:
        >>> one, two = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        >>> optimizer = torch.optim.SGD([one, two])
        >>> with narrowed(optimizer, {id(two)}):
        ...     len(optimizer.param_groups[0]["params"])
        1
    """
    groups = optimizer.param_groups
    whole: list[list[torch.Tensor]] = [group["params"] for group in groups]
    try:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = [each for each in params if id(each) in chosen]
        yield
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params
