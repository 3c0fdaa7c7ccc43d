"""A step and an optimizer in; the losses of some training steps from where everything stands, out; all is put back after."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn

from plimsoll.artifacts.receipt import finite
from plimsoll.session.training_step import TrainingStep

_RATE = 1e-2
"""Of plain gradient descent, for those who name no optimizer: its steps have length rate · ‖gradient‖."""


def loss_curve(step: TrainingStep, optimizer: torch.optim.Optimizer | None, steps: int) -> tuple[float | None, ...]:
    """Losses of consecutive training steps on the step's batch; random numbers go on from step to step.

    Parameters (the optimizer's own, of a loss, too), the optimizer's state and its settings are bit for bit what they were
    when it returns.

    Args:
        step: its random state and buffers are where the curve begins.
        optimizer: steps after every backward; without one, gradient descent at a rate of 0.01.
        steps: how many.
    """
    with _put_back(step.model, optimizer):
        used = optimizer or torch.optim.SGD([p for p in step.model.parameters() if p.requires_grad], lr=_RATE)
        step.rewind()
        losses = []
        for _ in range(steps):
            losses.append(finite(step.go_on()))
            used.step()
        return tuple(losses)


@contextlib.contextmanager
def _put_back(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    groups = [] if optimizer is None else optimizer.param_groups
    stepped = dict.fromkeys((*model.parameters(), *(parameter for group in groups for parameter in group["params"])))
    weights = [(parameter, parameter.detach().clone()) for parameter in stepped]
    state = {} if optimizer is None else dict(optimizer.state)
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    if optimizer is not None:
        optimizer.state.update({parameter: copy.deepcopy(of_one) for parameter, of_one in state.items()})
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in weights:
                parameter.copy_(before)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, setting in zip(groups, settings, strict=True):
                group.update(setting)
