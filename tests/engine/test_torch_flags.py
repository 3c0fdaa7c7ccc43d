"""Flags of torch in force around forward alone, or within it, and regions that use torch in ways that allow no plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plimsoll
from long_cases import some
from plimsoll.engine.torch_flags import flags_for
from steps import Net

Around = Callable[[], contextlib.AbstractContextManager[object]]


def convolutions(within: Around = contextlib.nullcontext) -> Net:
    """Gives other bits with oneDNN and without."""

    def convolve(net: Net, x: torch.Tensor) -> torch.Tensor:
        with within():
            hidden = net.first(x)
        return x + net.second(F.gelu(hidden))

    return Net(convolve, first=nn.Conv1d(16, 16, 5, padding=2), second=nn.Conv1d(16, 16, 3, padding=1))


def flagged() -> Net:
    """Sets the flag itself."""
    return convolutions(lambda: torch.backends.mkldnn.flags(enabled=False))


def noise() -> Net:
    """Draws numbers of the default type."""

    def draw(net: Net, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(net.linear(x) * (torch.rand(32) > 0.3) * torch.full((32,), 0.7).to(x.dtype))

    return Net(draw, linear=nn.Linear(32, 32))


class Transforming(Net):
    """Has a class of its own: all regions of a class are left alone of which one runs a transform."""


def between(function: Callable[[torch.Tensor], torch.Tensor], kind: type[Net] = Net) -> Net:
    """Two linear layers around a function."""
    way = lambda net, x: x + net.second(function(F.gelu(net.first(x))))  # noqa: E731
    return kind(way, first=nn.Linear(32, 32), second=nn.Linear(32, 32))


def gradient() -> Net:
    """Uses the gradient of a function of its values."""
    steepness = torch.func.grad(lambda t: torch.tanh(t).square().sum())
    return between(lambda hidden: F.gelu(hidden) * torch.sigmoid(steepness(hidden)), Transforming)


def neighbours() -> Net:
    """Mixes its rows by a sparse matrix, made in every call."""

    def mix(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.flatten(0, -2)
        return F.gelu(torch.sparse.mm(torch.eye(len(rows)).roll(1, 0).to_sparse(), rows).view_as(hidden))

    return between(mix)


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
    some(
        [
            (convolutions, lambda: torch.backends.mkldnn.flags(enabled=False), True),
            (convolutions, deterministic, True),
            (flagged, contextlib.nullcontext, True),
            (noise, doubles, True),
            (neighbours, contextlib.nullcontext, True),
            (gradient, contextlib.nullcontext, False),
        ],
        3,
    ),
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
    model = nn.Sequential(*[noise() for _ in range(3)], gradient())
    batch = torch.randn(4, 16, 32)
    with pytest.warns(UserWarning, match="'3' keep all activations"):
        plan = plimsoll.plan(model, batch, strategy="full", loss=torch.sum, regions=["*"])
    assert [region.name for region in plan.regions if region.dropped] == ["0", "1", "2"]
