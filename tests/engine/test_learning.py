"""Regions that read values are recorded while recordings pay. Otherwise backward runs them again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import plimsoll
from plimsoll.engine.learning import FIRST_RECORDINGS, FIRST_STEPS, PAYING_CALLS, Learning, Pace
from steps import mean_square

WIDTH, ROWS, BLOCKS = 8, 64, 3


class Cutting(nn.Module):
    """A block that repeats operations as often as its input says, and returns the rows that the input has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        for _ in range(int(count)):
            wide = torch.tanh(wide)
        return x + self.down(wide)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cutting() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, count)
        return x


def _step(model: nn.Module, rows: int, count: int) -> list[torch.Tensor | None]:
    torch.manual_seed(rows + 100 * count)
    model.zero_grad()
    mean_square(model(torch.randn(rows, WIDTH), torch.tensor(count))).backward()
    return [parameter.grad for parameter in model.parameters()]


def _recordings(model: Stack) -> list[int]:
    return [block.forward.learning.recordings for block in model.blocks]


def test_more_recordings_have_to_be_earned():
    learning = Learning()
    learning.recordings = FIRST_RECORDINGS - 1
    assert learning.pays()
    learning.recordings += 1
    assert not learning.pays()
    learning.served += PAYING_CALLS
    assert learning.pays()
    learning.recordings += 1
    assert not learning.pays()


def test_after_the_first_steps_one_region_is_recorded_in_a_step():
    pace = Pace()
    for _ in range(FIRST_STEPS):
        pace.begin_step()
        assert [pace.take(), pace.take()] == [True, True]
    for _ in range(2):
        pace.begin_step()
        assert [pace.take(), pace.take()] == [True, False]


@pytest.mark.parametrize("changes", [pytest.param("operations", marks=pytest.mark.long), "rows"])
def test_a_region_that_never_does_the_same_is_not_recorded_any_more_and_keeps_every_bit(changes: str):
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    batch = {"x": torch.randn(ROWS, WIDTH), "count": torch.tensor(1)}
    with plimsoll.apply(model, plimsoll.plan(model, batch, strategy="full", loss=mean_square)):
        for step in range(2 * FIRST_RECORDINGS):
            # known rows come back in between: they must not make the region forget what it has spent
            rows = ROWS if changes == "operations" else ROWS - 3 * (step if step % 4 else 0)
            expected, found = (_step(each, rows, step + 2) for each in (plain, model))
            assert all(map(torch.equal, expected, found))
        known = _recordings(model)
        assert max(known) <= FIRST_RECORDINGS
        reruns = sum(service.reruns for block in model.blocks for service in block.forward.services.values())
        assert reruns >= BLOCKS * FIRST_RECORDINGS


def test_recordings_are_spread_over_steps_once_the_first_steps_are_over():
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    batch = {"x": torch.randn(ROWS, WIDTH), "count": torch.tensor(1)}
    with plimsoll.apply(model, plimsoll.plan(model, batch, strategy="full", loss=mean_square)):
        for _ in range(FIRST_STEPS + 1):
            _step(model, ROWS, 1)
        before = sum(_recordings(model))
        spent = []
        for _ in range(BLOCKS + 1):
            assert all(map(torch.equal, _step(plain, ROWS, 5), _step(model, ROWS, 5)))
            spent.append(sum(_recordings(model)) - before)
    assert spent == [1, 2, 3, 3]  # one block in each step, until all know the new way
