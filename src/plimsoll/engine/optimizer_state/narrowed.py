"""Runs the code of an optimizer's step for some of its parameters only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def in_groups(optimizer: Optimizer, chosen: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return, for each group of the optimizer, its chosen parameters.

    Example:
        >>> one, two = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        >>> [len(params) for params in in_groups(torch.optim.SGD([{"params": [one, two]}]), [two])]
        [1]
    """
    ids = set(map(id, chosen))
    return [[each for each in group["params"] if id(each) in ids] for group in optimizer.param_groups]


@contextlib.contextmanager
def narrowed(optimizer: Optimizer, params: Sequence[list[torch.Tensor]]) -> Iterator[None]:
    """Return a context manager. In its block, each group of the optimizer holds only the parameters given for it.

    Example:
        >>> one, two = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        >>> optimizer = torch.optim.SGD([one, two])
        >>> with narrowed(optimizer, in_groups(optimizer, [two])):
        ...     len(optimizer.param_groups[0]["params"])
        1
    """
    groups = optimizer.param_groups
    whole: list[list[torch.Tensor]] = [group["params"] for group in groups]
    try:
        for group, chosen in zip(groups, params, strict=True):
            group["params"] = chosen
        yield
    finally:
        for group, all_ in zip(groups, whole, strict=True):
            group["params"] = all_
