"""State that a model reaches without a submodule or a buffer: modules in lists, hooks, closures, marks on parameters."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll
from long_cases import some
from plimsoll.artifacts.receipt import ReceiptVerdict
from steps import Block, Stack, mean_square

WIDTH, ROWS, STEPS = 32, 96, 4
Tick = Callable[[torch.Tensor], None]
Read = Callable[[], Any]


class Ticking(Stack):
    """Does something on the side in each forward."""

    tick: Tick = staticmethod(lambda x: None)

    def __init__(self) -> None:
        super().__init__(3, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tick(x)
        return self.head(super().forward(x))


class Holder:
    """An object of the user's."""

    def __init__(self, held: Any = None) -> None:
        self.held, self.calls = held, 0

    def hook(self, *_: Any) -> None:
        self.calls += 1

    def applied(self, value: torch.Tensor) -> torch.Tensor:
        return self.held(value)


def averaged(norm: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        norm(x)


def in_a_list(model: Ticking) -> tuple[Tick, Read]:
    model.others = [nn.BatchNorm1d(WIDTH)]
    return lambda x: averaged(model.others[0], x), lambda: int(model.others[0].num_batches_tracked)


def in_an_object(model: Ticking) -> tuple[Tick, Read]:
    model.other = Holder(nn.BatchNorm1d(WIDTH))
    return lambda x: averaged(model.other.held, x), lambda: model.other.held.running_mean.sum().item()


def behind_a_partial(model: Ticking) -> tuple[Tick, Read]:
    model.other = functools.partial(nn.BatchNorm1d(WIDTH))
    return lambda x: averaged(model.other, x), lambda: int(model.other.func.num_batches_tracked)


def a_teacher(model: Ticking) -> tuple[Tick, Read]:
    model.teacher = [nn.Linear(WIDTH, WIDTH)]

    def tick(x: torch.Tensor) -> None:
        with torch.no_grad():
            model.teacher[0].weight.lerp_(model.head.weight.new_ones(WIDTH, WIDTH), 0.1)

    return tick, lambda: model.teacher[0].weight.sum().item()


def flags_of_a_teacher(model: Ticking) -> tuple[Tick, Read]:
    model.teacher = [nn.Linear(WIDTH, WIDTH)]

    def tick(x: torch.Tensor) -> None:
        teacher = model.teacher[0]
        teacher.train(not teacher.training)
        teacher.calls = getattr(teacher, "calls", 0) + 1

    return tick, lambda: (model.teacher[0].training, model.teacher[0].calls)


def trained_within(model: Ticking) -> tuple[Tick, Read]:
    inner = nn.Linear(WIDTH, WIDTH)
    model.inner, model.own = [inner], torch.optim.Adam(inner.parameters(), lr=0.01)

    def tick(x: torch.Tensor) -> None:
        with torch.enable_grad():
            model.own.zero_grad()
            inner(x.detach()).square().mean().backward()
            model.own.step()

    return tick, lambda: (inner.weight.sum().item(), model.own.state[inner.weight]["step"].item())


def trains_itself(model: Ticking) -> tuple[Tick, Read]:
    """A part of the model is trained within forward (Forward-Forward), by an optimizer that only a closure holds."""
    model.probe = nn.Linear(WIDTH, WIDTH)
    own = torch.optim.Adam(model.probe.parameters(), lr=0.01)
    model.schedule = torch.optim.lr_scheduler.StepLR(own, step_size=2)

    def tick(x: torch.Tensor) -> None:
        with torch.enable_grad():
            model.probe(x.detach()).square().mean().backward()
            own.step()
            own.zero_grad()
            model.schedule.step()

    weight = model.probe.weight
    return tick, lambda: (weight.sum().item(), own.state[weight]["step"].item(), model.schedule.last_epoch)


def gradients_of_its_own(model: Ticking) -> tuple[Tick, Read]:
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.register_hook(functools.partial(_add, parameter))
    return lambda x: None, lambda: sum(float(parameter.main_grad.abs().sum()) for parameter in model.parameters())


def _add(parameter: Any, gradient: torch.Tensor) -> None:
    parameter.main_grad.add_(gradient)


def a_hook_on_gradients(model: Ticking) -> tuple[Tick, Read]:
    held = Holder()
    model.head.weight.register_hook(held.hook)
    return lambda x: None, lambda: held.calls


def a_hook_on_a_block(model: Ticking) -> tuple[Tick, Read]:
    held = Holder()
    model.blocks[0].register_forward_hook(held.hook)
    model.blocks[1].register_full_backward_hook(held.hook)
    return lambda x: None, lambda: held.calls


def a_closure(model: Ticking) -> tuple[Tick, Read]:
    norms: list[float] = []
    count = 0

    def hook(gradient: torch.Tensor) -> None:
        nonlocal count
        count += 1
        norms.append(float(gradient.norm()))

    model.head.weight.register_hook(hook)
    return lambda x: None, lambda: (count, norms)


def a_default_value(model: Ticking) -> tuple[Tick, Read]:
    def tick(x: torch.Tensor, seen: list[int] = []) -> None:  # noqa: B006
        seen.append(1)

    return tick, lambda: len(tick.__defaults__[0])


def a_weak_dictionary(model: Ticking) -> tuple[Tick, Read]:
    model.calls = weakref.WeakKeyDictionary()

    def tick(x: torch.Tensor) -> None:
        model.calls[model.head] = model.calls.get(model.head, 0) + 1

    return tick, lambda: model.calls[model.head]


def of_this_thread(model: Ticking) -> tuple[Tick, Read]:
    model.local = threading.local()
    model.local.calls = 0

    def tick(x: torch.Tensor) -> None:
        model.local.calls += 1

    return tick, lambda: model.local.calls


KINDS = {
    each.__name__: each
    for each in (
        *(in_a_list, in_an_object, behind_a_partial, a_teacher, flags_of_a_teacher, trained_within, trains_itself),
        *(gradients_of_its_own, a_hook_on_gradients, a_hook_on_a_block, a_closure, a_default_value),
        *(a_weak_dictionary, of_this_thread),
    )
}


def built(kind: str) -> tuple[Ticking, Read]:
    torch.manual_seed(0)
    model = Ticking()
    tick, read = KINDS[kind](model)
    model.tick = tick
    return model, read


def trained(kind: str, budget: str | None, rows: Callable[[int], int] = lambda _: ROWS) -> Any:
    model, read = built(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = None if budget is None else plimsoll.attach(model, budget, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(model(torch.randn(rows(step), WIDTH))).backward()
        optimizer.step()
    if handle is not None:
        handle.remove()
    return read(), [parameter.sum().item() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", some(KINDS, 4))
def test_training_moves_hidden_state_as_it_does_without_a_budget(kind: str):
    assert trained(kind, "1GiB") == trained(kind, None)


@pytest.mark.parametrize("kind", some(["in_a_list", "gradients_of_its_own", "a_closure"], 1))
def test_a_new_shape_moves_it_no_further(kind: str):
    assert trained(kind, "1GiB", lambda step: ROWS + 16 * step) == trained(kind, None, lambda step: ROWS + 16 * step)


@pytest.mark.parametrize(
    "kind", some(["in_an_object", "a_teacher", "trains_itself", "a_hook_on_a_block", "a_closure"], 1)
)
def test_planning_and_verifying_move_nothing(kind: str):
    model, read = built(kind)
    batch = torch.randn(ROWS, WIDTH)
    mean_square(model(batch)).backward()
    model.zero_grad()
    before = read()
    before = list(before) if isinstance(before, tuple) else before
    plan = plimsoll.plan(model, batch, strategy="full", loss=mean_square)
    plimsoll.verify(model, batch, plan, loss=mean_square)
    after = read()
    assert (list(after) if isinstance(after, tuple) else after) == before


class Centred(nn.Module):
    """A loss with a running centre, as DINO has it, and a record of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))
        self.calls: list[int] = []

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        loss = (output - self.centre).square().mean()
        self.calls.append(len(self.calls))
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return loss


LOSSES: dict[str, Callable[[Centred], Callable[[torch.Tensor], torch.Tensor]]] = {
    "module": lambda loss: loss,
    "closure": lambda loss: lambda output: loss(output),
    "partial": lambda loss: functools.partial(Centred.forward, loss),
    "bound method": lambda loss: loss.forward,
    "object": lambda loss: Holder(loss).applied,
}


@pytest.mark.parametrize("kind", some(LOSSES, 2))
def test_planning_and_verifying_leave_the_state_of_the_loss(kind: str):
    torch.manual_seed(0)
    model, batch, centred = Ticking(), torch.randn(ROWS, WIDTH), Centred()
    loss = LOSSES[kind](centred)
    plan = plimsoll.plan(model, batch, strategy="full", loss=loss)
    receipt = plimsoll.verify(model, batch, plan, loss=loss)
    assert receipt.verdict is ReceiptVerdict.VERIFIED
    assert centred.calls == []
    assert not centred.centre.any()


class Teaching(Stack):
    """Takes a module as an argument."""

    def forward(self, x: torch.Tensor, teacher: Any) -> torch.Tensor:
        averaged(teacher.held if isinstance(teacher, Holder) else teacher, x)
        return super().forward(x)


@pytest.mark.parametrize("wrap", [lambda module: module, Holder], ids=["module", "object"])
def test_a_module_among_the_arguments_is_moved_as_without_a_budget(wrap: Callable[[nn.Module], Any]):
    torch.manual_seed(0)
    model, norm = Teaching(3, WIDTH), nn.BatchNorm1d(WIDTH)
    with plimsoll.attach(model, "1GiB"):
        for _ in range(STEPS):
            mean_square(model(torch.randn(ROWS, WIDTH), wrap(norm))).backward()
    assert int(norm.num_batches_tracked) == STEPS


def test_a_weight_that_parametrize_caches_is_not_left_behind_by_a_trial():
    class Symmetric(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.triu() + weight.triu(1).T

    def losses(budget: str | None) -> list[float]:
        torch.manual_seed(0)
        model = Stack(3, WIDTH)
        for block in model.blocks:
            nn.utils.parametrize.register_parametrization(block.up, "bias", nn.Identity())
        model.add = nn.Linear(WIDTH, WIDTH)
        nn.utils.parametrize.register_parametrization(model.add, "weight", Symmetric())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = None if budget is None else plimsoll.attach(model, budget, optimizer=optimizer)
        found = []
        for _ in range(STEPS):
            with nn.utils.parametrize.cached():
                loss = mean_square(model(torch.randn(ROWS, WIDTH)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        if handle is not None:
            handle.remove()
        return found

    assert losses("1GiB") == losses(None)


COLLECTED: list[torch.Tensor] = []
BY_NAME: dict[str, torch.Tensor] = {}


class CollectingBlock(Block):
    """Leaves a loss of its own in global variables."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        COLLECTED.append(y.pow(2).mean())
        BY_NAME[str(len(BY_NAME))] = y.abs().mean()
        return y


def collecting(budget: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Stack(3, WIDTH)
    model.blocks = nn.ModuleList(CollectingBlock(WIDTH) for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    if budget is not None:
        plimsoll.attach(model, budget, verify_every=0)
    for number in range(4):
        torch.manual_seed(number)
        COLLECTED.clear()
        BY_NAME.clear()
        loss = mean_square(model(torch.randn(16, WIDTH)))
        assert len(COLLECTED) == len(BY_NAME) == 3
        (loss + sum(COLLECTED) + sum(BY_NAME.values())).backward()
        optimizer.step()
        optimizer.zero_grad()
    COLLECTED.clear()
    BY_NAME.clear()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("budget", [2**30, 300_000])
def test_global_variables_that_blocks_fill_do_not_keep_what_trial_steps_made(budget: int):
    expected = collecting(None)

    found = collecting(budget)

    assert all(map(torch.equal, expected, found))
