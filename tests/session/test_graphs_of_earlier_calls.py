"""If backward continues in the graph of an earlier call, that call runs once: a trial step would free the graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll
from long_cases import some
from plimsoll.errors import BudgetBelowFloor
from plimsoll.units import MIB
from steps import Stack, mean_square

ROWS, WIDTH, STEPS = 512, 64, 4


class Remembers(Stack):
    """Adds what its last call has returned, with its graph."""

    last: Any = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x + self.last)
        return self.last


class LearnedLoss(Stack):
    """Holds a loss that is learned in the outer loop; its forward runs only the blocks."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.learned = [nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1)]  # a list: no part of the model


class Corrected(Stack):
    """Reads a tensor that the loop computes from a parameter, like the output of a hypernetwork."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.small = nn.Parameter(torch.ones(1, WIDTH))
        self.shift: Any = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.shift)


def fast_weights(model: Any, x: torch.Tensor) -> torch.Tensor:
    """An inner step of gradient descent through which the outer loss is differentiated, as in MAML."""
    weights = dict(model.named_parameters())
    inner = mean_square(torch.func.functional_call(model, weights, (x,)))
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    moved = {name: each - 0.1 * gradient for (name, each), gradient in zip(weights.items(), gradients, strict=True)}
    return mean_square(torch.func.functional_call(model, moved, (x,)))


def learned_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    parameters = dict(model.named_parameters())
    inner = mean_square(nn.Sequential(*model.learned)(model(x)))
    gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
    fast = {name: each - 0.1 * gradient for (name, each), gradient in zip(parameters.items(), gradients, strict=True)}
    return mean_square(torch.func.functional_call(model, fast, (x,)))


def truncated(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.last = 0
    return sum(mean_square(model(x * number)) for number in (1, 2, 3))


def computed(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.shift = 0
    first = mean_square(model(x))
    model.shift = (model.small.sin() * model.small).exp()
    return first + mean_square(model(x))


LOOPS: dict[str, tuple[type[Stack], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "fast weights": (Stack, fast_weights),
    "a learned loss": (LearnedLoss, learned_loss),
    "a state on the model": (Remembers, truncated),
    "a value that the loop computes": (Corrected, computed),
}


def losses(kind: str, budget: int | None = None) -> list[float]:
    torch.manual_seed(0)
    make, loss_of = LOOPS[kind]
    model = make(3, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = None if budget is None else plimsoll.attach(model, budget, optimizer=optimizer)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, torch.randn(ROWS, WIDTH))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    if handle is not None:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", some(["fast weights", "a learned loss"], 1))
def test_gradients_of_fast_weights_are_not_read(kind: str):
    """Torch would warn: fast weights are no leaves, so they have no gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not a leaf")
        losses(kind, 24 * MIB)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("budget", some([3, 6, 10, 14, 18, 24], 1))
@pytest.mark.parametrize("kind", LOOPS)
def test_a_budget_trains_alike_or_is_refused_in_words(kind: str, budget: int):
    try:
        found = losses(kind, budget * MIB)
    except BudgetBelowFloor:
        assert budget < 24
        return
    assert found == losses(kind)


class Normalized(nn.Module):
    """Blocks with batch norm, whose backward reads averages that forward writes."""

    def __init__(self, blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


CROPS: dict[str, list[list[tuple[int, int]]]] = {
    "from the first step on": [[(4, 24), (8, 12)]] * STEPS,
    "another number of images": [[(8, 12), (4, 12)]] * STEPS,
    "later": [[(4, 24)], [(4, 24)], [(4, 24), (8, 12)], [(4, 24), (8, 12), (2, 20)]],
}
"""For each training, for each step, for each call before the backward: the number of images and their width."""


def trained_on_crops(steps: list[list[tuple[int, int]]], budget: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Normalized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = None if budget is None else plimsoll.attach(model, budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first steps may exceed the smaller budget
        for calls in steps:
            sum(mean_square(model(torch.randn(count, 16, side, side))) for count, side in calls).backward()
            optimizer.step()
            optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return [tensor.clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("budget", some([3 * MIB, 40 * MIB], 1))
@pytest.mark.parametrize("kind", CROPS)
def test_batch_norm_is_called_on_several_shapes_before_one_backward(kind: str, budget: int):
    # The second shape is traced while the first call waits. Restoring the averages must not invalidate its graph.
    assert all(map(torch.equal, trained_on_crops(CROPS[kind], None), trained_on_crops(CROPS[kind], budget)))
