"""Tensors that a loop trains together with the model, wherever it holds them, get the gradients of its own backwards alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll
from long_cases import all_but, mostly_short
from plimsoll.tracing.recorder.foreign_leaves import foreign_leaves_kept
from steps import Stack, mean_square

ROWS, WIDTH = 256, 64


class Shifted(Stack):
    """Adds what it is given to its input."""

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        return super().forward(x if given is None else x + found_in(given))


def found_in(given: Any) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else given.held["shift"]


class Criterion(nn.Module):
    def __init__(self, shift: torch.Tensor) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return mean_square(output + self.shift)


def in_an_object(shift: torch.Tensor) -> tuple[tuple[Any, ...], Callable[..., torch.Tensor]]:
    return (SimpleNamespace(held={"shift": shift}),), mean_square


def as_a_view_in_an_object(shift: torch.Tensor) -> tuple[tuple[Any, ...], Callable[..., torch.Tensor]]:
    return (SimpleNamespace(held={"shift": shift.view(-1)}),), mean_square


def as_an_argument(shift: torch.Tensor) -> tuple[tuple[Any, ...], Callable[..., torch.Tensor]]:
    return (shift,), mean_square


def in_the_loss(shift: torch.Tensor) -> tuple[tuple[Any, ...], Callable[..., torch.Tensor]]:
    return (), Criterion(shift)


def in_a_closure(shift: torch.Tensor) -> tuple[tuple[Any, ...], Callable[..., torch.Tensor]]:
    return (), lambda output: mean_square(output * (1 + shift))


PLACES = (in_an_object, as_a_view_in_an_object, as_an_argument, in_the_loss, in_a_closure)


@pytest.mark.parametrize("accumulates", [False, True], ids=["anew", "accumulating"])
@pytest.mark.parametrize("verb", mostly_short(["attach", "apply", "verify"], "verify"))
@pytest.mark.parametrize("place", all_but(PLACES, in_an_object, in_the_loss))
def test_a_tensor_of_the_loop_is_trained_as_without_a_plan(place: Callable[..., Any], verb: str, accumulates: bool):
    def trained(verb: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, shift = Shifted(4, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        optimizer = torch.optim.SGD([*model.parameters(), shift], lr=1e-2)
        seen: list[int] = []
        shift.register_hook(lambda gradient: seen.append(1))
        shift.register_post_accumulate_grad_hook(lambda parameter: seen.append(2))
        if accumulates:
            shift.grad = torch.ones(WIDTH)
        before = shift.grad
        handle = plimsoll.attach(model, "2.9MiB") if verb == "attach" else None
        gradients = []
        for number in range(3):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
            given, loss = place(shift)
            if verb in ("apply", "verify") and number == 0:
                plan = plimsoll.plan(model, (x, *given), strategy="full", loss=loss)
                if verb == "verify":
                    assert plimsoll.verify(model, (x, *given), plan, loss=loss, steps=1).verdict.is_pass
                handle = plimsoll.apply(model, plan)
                assert shift.grad is before
                assert seen == []
            loss(model(x, *given)).backward()
            gradients.append(shift.grad.clone())
            optimizer.step()
            if not accumulates:
                optimizer.zero_grad()
        assert seen == [1, 2] * 3
        if handle is not None:
            handle.remove()
        return [*gradients, shift.detach(), *(parameter.detach() for parameter in model.parameters())]

    assert all(map(torch.equal, trained("plain"), trained(verb)))


class Constrained(Shifted):
    """Writes to the tensor that it is given, and to the gradient of it."""

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        weight = given.held["shift"]
        with torch.no_grad():
            weight.mul_(0.9)
        if weight.grad is not None:
            weight.grad += 1
        return super().forward(x, given)


@pytest.mark.parametrize("kind", [nn.Parameter, lambda data: data.requires_grad_()], ids=["parameter", "tensor"])
@pytest.mark.parametrize("verb", ["attach", "apply"])
def test_what_forward_writes_to_a_weight_within_an_argument_is_written_once_in_each_step(verb: str, kind: Any):
    def trained(verb: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, holder = Constrained(4, WIDTH), SimpleNamespace(held={"shift": kind(torch.ones(WIDTH))})
        holder.held["shift"].grad = torch.ones(WIDTH)
        if verb == "attach":
            plimsoll.attach(model, "2.9MiB")
        elif verb == "apply":
            plan = plimsoll.plan(model, (torch.randn(ROWS, WIDTH), holder), strategy="full", loss=mean_square)
            plimsoll.apply(model, plan)
        found = []
        for number in range(3):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
            torch.manual_seed(number)
            mean_square(model(x, holder)).backward()
            found += [holder.held["shift"].detach().clone(), holder.held["shift"].grad.clone()]
        return found

    assert all(map(torch.equal, trained("plain"), trained(verb)))


class AddsByHand(torch.autograd.Function):
    """Scales by the weight of a holder, and adds to the weight's gradient itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, holder: Any) -> torch.Tensor:
        ctx.holder = holder
        ctx.save_for_backward(x)
        return x * holder.weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight, own = ctx.holder.weight, (gradient * ctx.saved_tensors[0]).sum(0)
        weight.grad = own if weight.grad is None else weight.grad + own
        return gradient * weight.detach(), None


class Scaled(Stack):
    def __init__(self) -> None:
        super().__init__(4, WIDTH)
        self.holder = SimpleNamespace(weight=torch.ones(WIDTH, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return AddsByHand.apply(super().forward(x), self.holder)


def test_planning_leaves_gradients_that_a_backward_sets_by_hand():
    model, x = Scaled(), torch.randn(ROWS, WIDTH)
    plimsoll.plan(model, x, strategy="full", loss=mean_square)
    assert model.holder.weight.grad is None
    model.holder.weight.grad = before = torch.ones(WIDTH)
    plimsoll.plan(model, x, strategy="full", loss=mean_square)
    assert model.holder.weight.grad is before
    assert torch.equal(before, torch.ones(WIDTH))


def test_a_backward_that_fails_leaves_gradients_and_hooks_as_they_were():
    model, shift = Stack(1, WIDTH), nn.Parameter(torch.zeros(WIDTH))
    shift.grad = before = torch.ones(WIDTH)
    hook = shift.register_post_accumulate_grad_hook(lambda parameter: None)
    loss = mean_square(model(torch.randn(ROWS, WIDTH)) + shift)
    with contextlib.suppress(RuntimeError), foreign_leaves_kept(model, loss):
        assert not shift._post_accumulate_grad_hooks
        assert torch.equal(shift.grad, torch.zeros(WIDTH))
        raise RuntimeError
    assert shift.grad is before
    assert list(shift._post_accumulate_grad_hooks) == [hook.id]
