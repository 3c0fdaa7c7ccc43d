"""Flags of torch in force around forward alone, or within it, and regions that use torch in ways that allow no plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plimsoll
from plimsoll.engine.torch_flags import flags_for

Around = Callable[[], contextlib.AbstractContextManager[object]]


class Convolutions(nn.Module):
    """Gives other bits with oneDNN and without."""

    within: Around = contextlib.nullcontext

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(16, 16, 5, padding=2), nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.within():
            hidden = self.first(x)
        return x + self.second(F.gelu(hidden))


class Flagged(Convolutions):
    """Sets the flag itself."""

    within = staticmethod(lambda: torch.backends.mkldnn.flags(enabled=False))


class Noise(nn.Module):
    """Draws numbers of the default type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(x) * (torch.rand(32) > 0.3) * torch.full((32,), 0.7).to(x.dtype))


class Gradient(nn.Module):
    """Uses the gradient of a function of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(x))
        steepness = torch.func.grad(lambda t: torch.tanh(t).square().sum())(hidden)
        return x + self.second(F.gelu(hidden) * torch.sigmoid(steepness))


class Neighbours(nn.Module):
    """Mixes its rows by a sparse matrix, made in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.first(x))
        rows = hidden.flatten(0, -2)
        near = torch.eye(len(rows)).roll(1, 0).to_sparse()
        return x + self.second(F.gelu(torch.sparse.mm(near, rows).view_as(hidden)))


@contextlib.contextmanager
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def trained(model: nn.Module, around: Around, first: int) -> list[torch.Tensor]:
    """The gradients of four steps; from the ``first`` on with flags around forward alone."""
    found = []
    for step in range(4):
        torch.manual_seed(step)
        with around() if step >= first else contextlib.nullcontext():
            loss = model(torch.randn(4, 16, 32, dtype=torch.float32)).square().mean()
        loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
    return found


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(
    ("block", "around", "drops"),
    [
        (Convolutions, lambda: torch.backends.mkldnn.flags(enabled=False), True),
        (Convolutions, deterministic, True),
        (Flagged, contextlib.nullcontext, True),
        (Noise, doubles, True),
        (Neighbours, contextlib.nullcontext, True),
        (Gradient, contextlib.nullcontext, False),
    ],
)
@pytest.mark.filterwarnings("ignore:TF32 acceleration", "ignore:.*Gradient:UserWarning", "ignore:plimsoll")
def test_gradients_are_right_whatever_torch_is_told_around_forward(block, around, drops, first):
    model = nn.Sequential(*[block() for _ in range(3)])
    expected, flags = trained(model, around, first), flags_for("cpu")
    with around() if first == 0 else contextlib.nullcontext():
        plan = plimsoll.plan(model, torch.randn(4, 16, 32, dtype=torch.float32), strategy="full", loss=torch.sum)
    assert any(region.dropped for region in plan.regions) is drops
    with plimsoll.apply(model, plan):
        found = trained(model, around, first)
    assert all(map(torch.equal, expected, found))
    assert flags_for("cpu") == flags


def test_regions_under_transforms_are_named_and_the_others_are_planned():
    model = nn.Sequential(*[Noise() for _ in range(3)], Gradient())
    batch = torch.randn(4, 16, 32)
    with pytest.warns(UserWarning, match="'3' keep what they save"):
        plan = plimsoll.plan(model, batch, strategy="full", loss=torch.sum, regions=["*"])
    assert [region.name for region in plan.regions if region.dropped] == ["0", "1", "2"]
