"""A loop that trains parts of a model in turns is planned once for each part, and no later than the first part is trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import plimsoll
from long_cases import some
from metering import LiveStorages
from plimsoll.errors import InvalidModel
from plimsoll.session import step_planner
from plimsoll.session.attachment import Attachment
from plimsoll.session.states import State
from steps import Stack, mean_square

ROWS, WIDTH = 256, 32
Turn = Callable[[nn.Module, int], None]


def halves(model: Any, number: int) -> None:
    """One half of the blocks in even steps, the other half in odd ones."""
    for at, block in enumerate(model.blocks):
        block.requires_grad_(at % 2 == number % 2)


def block_by_block(model: Any, number: int) -> None:
    """Each block for two steps."""
    for at, block in enumerate(model.blocks):
        block.requires_grad_(at == number // 2 % len(model.blocks))


def all_and_then_some(model: Any, number: int) -> None:
    """One block, then all, then the same block again."""
    for at, block in enumerate(model.blocks):
        block.requires_grad_(at == 0 or number % 4 > 1)


def train(turn: Turn, steps: int, budget: int | None = None) -> tuple[list[torch.Tensor], list[int], list[int], Any]:
    """Return the weights, the number of steps traced by the end of each step, the peak of each step, and the handle."""
    torch.manual_seed(0)
    traced: list[int] = []
    with (
        LiveStorages() as live,
        mock.patch.object(step_planner, "trace_and_cost", wraps=step_planner.trace_and_cost) as tracing,
    ):
        model = Stack(3, WIDTH)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        handle = None if budget is None else plimsoll.attach(model, budget, verify_every=0)
        for number in range(steps):
            turn(model, number)
            torch.manual_seed(number)
            live.begin()
            mean_square(model(torch.randn(ROWS, WIDTH))).backward()
            optimizer.step()
            optimizer.zero_grad()
            traced.append(tracing.call_count)
        if handle is not None:
            handle.remove()
    return [each.detach() for each in model.parameters()], traced, live.peaks, handle


@pytest.mark.parametrize(
    ("turn", "sets", "met_by"), some([(halves, 2, 4), (block_by_block, 3, 6), (all_and_then_some, 2, 4)], 1)
)
def test_a_set_of_trained_parameters_that_returns_is_not_traced_again(turn: Turn, sets: int, met_by: int):
    expected, _, unmanaged, _ = train(turn, 4 * met_by)
    budget = int(0.8 * max(unmanaged))

    found, traced, peaks, handle = train(turn, 4 * met_by, budget)

    assert all(map(torch.equal, expected, found))
    assert traced[0] == 1
    assert traced[met_by - 1] <= traced[-1] == sets
    assert handle.peak_bytes <= budget  # by its own meter; a mode that counts storages sees copies of a few KiB too
    assert max(peaks[2 * met_by :]) < 0.9 * max(unmanaged)
    assert handle.state is State.RUNNING


@pytest.mark.long
def test_plans_of_a_set_are_forgotten_when_blocks_are_replaced():
    def turn(model: Any, number: int) -> None:
        if number == 8:
            model.blocks[0] = model.blocks[0].__class__(WIDTH)
        halves(model, number)

    _, _, unmanaged, _ = train(halves, 4)

    _, traced, _, handle = train(turn, 14, int(0.8 * max(unmanaged)))

    assert traced[7] == 2 < traced[-1]
    assert handle.state is State.RUNNING


def attack(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the input, moved to a higher loss while the model is frozen, as adversarial training does."""
    model.requires_grad_(False)
    moved = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(mean_square(model(moved)), moved)
    model.requires_grad_(True)
    return (x + 0.01 * gradient.sign()).detach()


def trained_on_attacks(budget: int | None = None) -> tuple[list[torch.Tensor], list[str], Attachment | None]:
    torch.manual_seed(0)
    model = Stack(3, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = None if budget is None else plimsoll.attach(model, budget, verify_every=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            torch.manual_seed(number)
            mean_square(model(attack(model, torch.randn(ROWS, WIDTH)))).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [str(each.message) for each in caught if "plimsoll" in str(each.message)]
    return [each.detach() for each in model.parameters()], said, handle


def test_calls_of_a_frozen_model_before_its_first_training_call_are_left_alone():
    expected, _, _ = trained_on_attacks()

    found, said, handle = trained_on_attacks(2**30)

    assert all(map(torch.equal, expected, found))
    assert handle is not None
    assert handle.state is State.RUNNING
    [text] = said
    assert "trains no parameter, so it is not managed" in text


def test_a_frozen_model_that_gets_no_gradients_is_left_alone_without_a_word():
    model = Stack(3, WIDTH).requires_grad_(False)
    handle = plimsoll.attach(model, 2**30)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(ROWS, WIDTH))

    assert handle.state is State.UNTRACED
    assert handle.plan is None


def adversaries(rows: Callable[[int], int], pairs: bool, budget: int | None = None) -> list[torch.Tensor]:
    """Train a discriminator, and in between a generator through it while it is frozen. Return the weights of both."""
    torch.manual_seed(0)
    discriminator, generator = Stack(3, WIDTH), nn.Linear(WIDTH, WIDTH)
    first, second = (torch.optim.SGD(each.parameters(), lr=1e-3) for each in (discriminator, generator))
    if budget is not None:
        plimsoll.attach(discriminator, budget, optimizer=first, verify_every=0)
    for number in range(7):
        torch.manual_seed(number)
        fake, real = generator(torch.randn(ROWS, WIDTH)), torch.randn(ROWS, WIDTH)
        batches = [fake.detach(), real] if pairs else [torch.cat([fake.detach(), real])]
        sum(mean_square(discriminator(each)) for each in batches).backward()
        first.step()
        first.zero_grad()
        discriminator.requires_grad_(False)
        mean_square(discriminator(generator(torch.randn(rows(number), WIDTH)))).backward()
        discriminator.requires_grad_(True)
        second.step()
        second.zero_grad()
    return [each.detach() for model in (discriminator, generator) for each in model.parameters()]


@pytest.mark.parametrize("pairs", [True, False], ids=["two forwards", "one forward"])
@pytest.mark.parametrize("budget", [3 * 2**19, 2**30])
@pytest.mark.parametrize("rows", [lambda number: ROWS, lambda number: 64 * (number + 1)], ids=["fixed", "growing"])
def test_a_generator_trains_through_a_frozen_discriminator_in_every_state(
    rows: Callable[[int], int], pairs: bool, budget: int
):
    """The discriminator's plans may be due while it is frozen. They are made in its next own call."""
    expected = adversaries(rows, pairs)
    assert all(map(torch.equal, expected, adversaries(rows, pairs, budget)))


def test_a_plan_for_a_frozen_model_is_refused_as_before():
    model = Stack(3, WIDTH).requires_grad_(False)

    with pytest.raises(InvalidModel, match="trainable"):
        plimsoll.plan(model, torch.randn(ROWS, WIDTH), 2**30, loss=mean_square)
