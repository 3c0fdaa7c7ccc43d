"""Trial steps put back what a model keeps in attributes of its classes and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll
from long_cases import some
from steps import mean_square


def made() -> type[nn.Module]:
    """A module whose classes and functions are new, so that no run sees what another one has left on them."""

    class Schedule:
        steps = 0

    def describe() -> None:
        """A function that holds a counter."""

    class Base(nn.Module):
        calls = 0
        history: list[int] = []
        total = torch.zeros(())
        old: Any = "old"

        def counts(self) -> int:
            Base.calls += 1
            return Base.calls

        def counts_below(self) -> int:
            type(self).calls = type(self).calls + 1  # hides the counter of the base class
            return self.calls

        def appends(self) -> int:
            self.history.append(1)
            return len(self.history)

        def adds_in_place(self) -> float:
            self.total.add_(1)
            return self.total.item()

        def makes_new(self) -> int:
            Base.made = getattr(Base, "made", 0) + 1
            return Base.made

        def deletes(self) -> int:
            if not hasattr(Base, "old"):
                return 2
            del Base.old
            return 1

        def counts_in_an_object(self) -> int:
            Schedule.steps += 1
            return self.schedule.steps

        def counts_in_a_function(self) -> int:
            self.describe.calls = getattr(self.describe, "calls", 0) + 1
            return self.describe.calls

    class Counting(Base):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.line, self.schedule, self.describe = kind, nn.Linear(4, 4), Schedule(), describe

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x) * getattr(self, self.kind)()

    return Counting


KINDS = [name for name, value in vars(made().__mro__[1]).items() if callable(value) and not name.startswith("_")]


def trained(kind: str, around: Callable[[nn.Module], Any]) -> list[float]:
    torch.manual_seed(0)
    counting = made()
    model = nn.Sequential(counting(kind), counting(kind))
    around(model)
    losses = []
    for _ in range(3):
        loss = mean_square(model(torch.randn(8, 4)))
        loss.backward()
        losses.append(loss.item())
    return losses


def attaches(model: nn.Module) -> None:
    plimsoll.attach(model, "1GiB")


def plans(model: nn.Module) -> None:
    state = torch.get_rng_state()
    plimsoll.plan(model, torch.randn(8, 4), "1GiB", loss=mean_square)
    torch.set_rng_state(state)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("work", some([attaches, plans], 1))
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_if_no_trial_step_had_run(kind: str, work: Callable[[nn.Module], Any]):
    assert trained(kind, work) == trained(kind, lambda model: None)
