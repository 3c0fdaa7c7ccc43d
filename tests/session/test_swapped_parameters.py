"""`torch.utils.swap_tensors` exchanges what parameters hold, as ``model.to`` does where torch is asked to swap."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll
from long_cases import some
from plimsoll.units import MIB
from steps import Stack, mean_square

ROWS, WIDTH, STEPS = 512, 64, 8
Change = Callable[[Any], None]


@contextlib.contextmanager
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def swaps_one(model: Any) -> None:
    weight = model.blocks[1].up.weight
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().flip(0).clone()))


def swaps_all(model: Any) -> None:
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 1.5))


def to_another_type(model: Any) -> None:
    with swapping():
        model.to(torch.bfloat16)


def to_strided(model: Any) -> None:
    """The same numbers, elsewhere and in another order."""
    weight = model.blocks[1].up.weight
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().T.contiguous().T))


def loads(model: Any) -> None:
    with swapping():
        model.load_state_dict({name: each * 0.5 for name, each in model.state_dict().items()}, assign=True)


def trained(verb: str, change: Change) -> list[float]:
    torch.manual_seed(0)
    model: Any = Stack(4, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(ROWS, WIDTH)
    with contextlib.ExitStack() as stack:
        if verb == "attach":
            stack.enter_context(plimsoll.attach(model, int(4.5 * MIB), optimizer=optimizer))
        elif verb == "apply":
            stack.enter_context(plimsoll.apply(model, plimsoll.plan(model, batch, int(4.5 * MIB), loss=mean_square)))
        found = []
        for number in range(STEPS):
            if number in (3, 6):
                change(model)
            loss = mean_square(model(batch.to(model.blocks[0].up.weight.dtype)))
            loss.backward()
            found += [loss.item(), *(each.grad.double().sum().item() for each in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("verb", ["attach", "apply"])
@pytest.mark.parametrize("change", some([swaps_one, swaps_all, to_another_type, to_strided, loads], 2))
def test_parameters_of_a_managed_model_may_be_swapped(verb: str, change: Change):
    assert trained(verb, change) == trained("", change)
