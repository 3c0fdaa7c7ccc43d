"""Calls with an unknown stream of torch calls, in regions that read values: backward runs the region's forward again."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plimsoll
from long_cases import some
from plimsoll.artifacts.decision import Engine
from plimsoll.engine.apply import Handle
from plimsoll.errors import ReplayMismatch, SavedTensorModified
from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.tracing.recorder.untouched import RandomState
from steps import mean_square

WIDTH, ROWS, KNOWN_STEPS = 16, 96, 6
Way = Callable[[Any, torch.Tensor], torch.Tensor]


def _counting(calls: list[int], *_: Any) -> None:
    calls.append(1)


class Counting:
    """An object of the model's own class that counts."""

    def __init__(self) -> None:
        self.total, self.cells = 0, {"seen": []}


class Branching(nn.Module):
    """A block that takes ``way`` if the first number of its input is negative. No step has taken it when recording ends."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm, self.inner = nn.BatchNorm1d(3 * WIDTH), nn.Tanh()
        self.register_buffer("total", torch.zeros(()))
        self.calls, self.scale, self.seen = 0, 1.0, []
        self.own = None
        self.mean, self.counter = torch.ones(()), Counting()
        self._way = way

    def forward(self, x: torch.Tensor, *options: Any) -> torch.Tensor:
        wide = torch.tanh(self.up(x))
        if x.detach()[0, 0].item() < 0:
            wide = self._way(self, wide)
        return x + self.down(F.gelu(wide))


def as_it_is(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    return wide.sin() * wide.sigmoid()


def writes_its_statistics(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    return block.norm(wide).sin()


def counts(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    block.calls += 1
    return wide.sin() * block.calls


def writes_what_it_reads(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    """Scale by a running mean in place, which forward reads before and after."""
    found = wide.sin() * (1 + block.total.clone())
    block.total.mul_(0.5).add_(wide.detach().mean())
    return found * (1 + block.total.clone())


def replaces_a_buffer(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    found = wide.sin() * (1 + block.total)
    block.total = 0.5 * block.total + wide.detach().mean()
    return found


def replaces_a_tensor(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    found = wide.sin() * block.mean
    block.mean = 0.5 * block.mean + wide.detach().mean()
    return found


def writes_a_tensor(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    found = wide.sin() * block.mean.clone()
    block.mean.mul_(0.5).add_(wide.detach().mean())
    return found


def sets_a_new_attribute(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    """Take another way in the first call."""
    found = wide.sin() if hasattr(block, "has_run") else wide.cos()
    block.has_run = True
    return found


def counts_in_an_object(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    block.counter.total += 1
    block.counter.cells["seen"].append(block.counter.total)
    return wide.sin() * sum(block.counter.cells["seen"])


def leaves_memory_unset(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    logits = wide.reshape(48, 2, -1).log_softmax(-1)
    targets, lengths = torch.randint(1, 9, (2, 5), generator=torch.Generator().manual_seed(0)), torch.tensor([5, 2])
    return wide.sin() * F.ctc_loss(logits, targets, torch.tensor([48, 48]), lengths)


WAYS: dict[str, Way] = {
    "operations": as_it_is,
    "dropout": lambda block, wide: F.dropout(wide, 0.3).sin(),
    "numbers from Python": lambda block, wide: wide.sin() * random.random(),
    "numbers from numpy": lambda block, wide: wide.sin() * float(np.random.rand()),
    "a list that grows": lambda block, wide: (block.seen.append(1), wide.sin() * len(block.seen) ** 0)[1],
    "statistics of batch norm": writes_its_statistics,
    "a number of calls": counts,
    "a running mean in place": writes_what_it_reads,
    "a buffer that is replaced": replaces_a_buffer,
    "a list whose length is used": lambda block, wide: (block.seen.append(1), wide.sin() * len(block.seen))[1],
    "a tensor that is replaced": replaces_a_tensor,
    "a tensor in place": writes_a_tensor,
    "a new attribute": sets_a_new_attribute,
    "an object that counts": counts_in_an_object,
    "memory that is partly unset": leaves_memory_unset,
    "a product in place": lambda block, wide: (wide * 2).sin_().mul_(0.5).exp(),
}


def step_of(model: nn.Module, number: int, *, takes_way: bool) -> torch.Tensor:
    """Run the forward of one step. The sign of the batch's first number decides about the way."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
    batch = torch.randn(ROWS, WIDTH)
    batch[:, 0] = batch[:, 0].abs() * (-1 if takes_way else 1)
    return model(batch)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def trained(model: nn.Module, number: int, *, takes_way: bool) -> list[torch.Tensor]:
    mean_square(step_of(model, number, takes_way=takes_way)).backward()
    return gradients(model)


def pair_of(way: Way) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Branching(way) for _ in range(2)))
    with torch.no_grad():
        for block in plain:
            block.down.weight.mul_(0.01)  # the sign of the first number stays
    return plain, copy.deepcopy(plain)


@pytest.fixture
def managed() -> Iterator[Callable[[nn.Module], Handle]]:
    """Apply a plan that drops everything, and train until nothing is recorded any more."""
    handles = []

    def manage(model: nn.Module) -> Handle:
        batch = torch.rand(ROWS, WIDTH)
        plan = plimsoll.plan(model, batch, loss=mean_square, strategy="full")
        handles.append(plimsoll.apply(model, plan))
        for number in range(KNOWN_STEPS):
            trained(model, number, takes_way=False)
        return handles[-1]

    yield manage
    for handle in handles:
        handle.remove()


def reruns(model: nn.Sequential) -> int:
    return sum(service.reruns for block in model for service in block.forward.services.values())


@pytest.mark.parametrize("kind", some(WAYS, 3))
def test_a_way_that_was_never_recorded_is_run_again_and_keeps_every_bit(kind: str, managed: Any):
    plain, model = pair_of(WAYS[kind])
    managed(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in (10, 11, 12):
            expected = trained(plain, number, takes_way=True)
            state = RandomState()
            found = trained(model, number, takes_way=True)
            assert all(map(torch.equal, expected, found))
            assert state.is_current()
    assert reruns(model) >= len(model)
    assert [len(block.seen) for block in model] == [len(block.seen) for block in plain]
    assert [block.calls for block in model] == [block.calls for block in plain]
    assert [block.mean for block in model] == [block.mean for block in plain]
    assert [vars(block.counter) for block in model] == [vars(block.counter) for block in plain]
    assert all(map(torch.equal, plain.buffers(), model.buffers()))


def test_what_a_way_saves_is_dropped_until_backward(managed: Any):
    plain, model = pair_of(as_it_is)
    managed(model)
    held = []
    for each in (plain, model):
        with PeakMeter("cpu") as meter:
            loss = mean_square(step_of(each, 20, takes_way=True))
            meter.mark("between")
        held.append(meter.window("between").resident_bytes)
        loss.backward()
    assert held[1] < held[0] / 3


def test_backward_may_run_twice(managed: Any):
    plain, model = pair_of(WAYS["dropout"])
    managed(model)
    for each in (plain, model):
        loss = mean_square(step_of(each, 20, takes_way=True))
        loss.backward(retain_graph=True)
        loss.backward()
    assert reruns(model)
    assert all(map(torch.equal, gradients(plain), gradients(model)))


def test_derivatives_of_gradients_are_right(managed: Any):
    plain, model = pair_of(as_it_is)
    managed(model)
    found = []
    for each in (plain, model):
        loss = mean_square(step_of(each, 20, takes_way=True))
        first = torch.autograd.grad(loss, list(each[0].up.parameters()), create_graph=True)
        sum(part.square().sum() for part in first).backward()
        found.append(gradients(each))
    assert reruns(model)
    assert all(map(torch.equal, *found))


def test_several_forwards_may_wait_for_one_backward(managed: Any):
    plain, model = pair_of(WAYS["dropout"])
    managed(model)
    for each in (plain, model):
        losses = [mean_square(step_of(each, number, takes_way=number != 31)) for number in (30, 31, 32)]
        sum(losses).backward()
    assert reruns(model)
    assert all(map(torch.equal, gradients(plain), gradients(model)))


def test_forward_runs_again_under_its_own_autocast(managed: Any):
    plain, model = pair_of(as_it_is)
    handle = managed(model)
    found = []
    for each in (plain, model):
        for number, takes_way in [*((40 + number, False) for number in range(4)), (50, True)]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mean_square(step_of(each, number, takes_way=takes_way))
            loss.backward()
            grads = gradients(each)
        found.append(grads)
    assert handle.faults == ()
    assert reruns(model)
    assert all(map(torch.equal, *found))


def draws_from_its_own_generator(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    return wide.sin() * torch.rand((), generator=block.own)


def calls_a_hooked_part(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    return block.inner(wide).sin()


def writes_a_large_buffer(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    """Write to a buffer that takes more bytes than the call saves, so that a copy would save nothing."""
    block.memory.add_(1)
    return wide.sin() * block.memory[0]


def writes_a_large_tensor(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    block.large.add_(1)
    return wide.sin() * block.large[0]


def replaces_a_large_tensor(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    """Replace a tensor that takes more bytes than the call saves, so that holding it would save nothing."""
    block.large = block.large + 1
    return wide.sin() * block.large[0]


def appends_to_a_long_list(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    block.long.append(1)
    return wide.sin() * len(block.long)


UNFIT = (
    draws_from_its_own_generator,
    calls_a_hooked_part,
    writes_a_large_buffer,
    writes_a_large_tensor,
    replaces_a_large_tensor,
    appends_to_a_long_list,
)


@pytest.mark.parametrize("way", UNFIT)
def test_a_way_that_must_not_run_twice_keeps_its_activations(way: Way, managed: Any):
    plain, model = pair_of(way)
    seen: dict[int, list[int]] = {id(plain): [], id(model): []}
    for each in (plain, model):
        for block in each:
            block.own = torch.Generator().manual_seed(1) if way is draws_from_its_own_generator else None
            block.large, block.long = torch.zeros(1 << 16), [0] * 20_000
            if way is writes_a_large_buffer:
                block.register_buffer("memory", torch.zeros(1 << 16))
            if way is calls_a_hooked_part:
                block.inner.register_forward_hook(functools.partial(_counting, seen[id(each)]))
    managed(model)
    for number in range(KNOWN_STEPS):
        trained(plain, number, takes_way=False)
    with pytest.warns(UserWarning, match="kept all its activations"):
        found = trained(model, 20, takes_way=True)
    assert not reruns(model)
    assert all(map(torch.equal, trained(plain, 20, takes_way=True), found))
    assert seen[id(plain)] == seen[id(model)]
    assert all(map(torch.equal, plain.buffers(), model.buffers()))


def depends_on_a_scale(block: Branching, wide: torch.Tensor) -> torch.Tensor:
    return (wide * SCALE[0]).sin()


SCALE = [1.0]


def test_state_that_changes_before_backward_is_found_and_ends_in_an_error(managed: Any):
    plain, model = pair_of(depends_on_a_scale)
    managed(model)
    loss = mean_square(step_of(model, 20, takes_way=True))
    SCALE[0] = 2.0
    try:
        with pytest.raises(ReplayMismatch, match="again gave other tensors"):
            loss.backward()
    finally:
        SCALE[0] = 1.0
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trained(model, 21, takes_way=True)
    assert all(map(torch.equal, trained(plain, 21, takes_way=True), found))


def test_after_a_wrong_second_run_the_region_keeps_everything_at_every_size_and_under_every_plan(managed: Any):
    batch = torch.rand(ROWS, WIDTH)
    twin, model = pair_of(depends_on_a_scale)
    other = plimsoll.plan(twin, batch, loss=mean_square, strategy="selective:gelu")
    handle = managed(model)
    mean_square(model(batch[:32])).backward()
    loss = mean_square(step_of(model, 20, takes_way=True))
    SCALE[0] = 2.0
    try:
        with pytest.raises(ReplayMismatch, match=r"region '1' .*\n.*\n.*from now on the region keeps all"):
            loss.backward()
    finally:
        SCALE[0] = 1.0
    for plan in (handle.plan, other):
        handle.switch(plan)
        for rows in (32, 48, ROWS):  # known, new, and the size that failed
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(batch[:rows])
        assert [(each.name, each.engine) for each in handle.outcomes() if each.name == "1"] == [("1", Engine.KEEP)] * 3


def test_a_parameter_that_is_written_before_backward_ends_in_an_error(managed: Any):
    _, model = pair_of(as_it_is)
    managed(model)
    loss = mean_square(step_of(model, 20, takes_way=True))
    with torch.no_grad():
        model[0].up.weight.add_(1)  # autograd saves it only if the batch needs a gradient
    with pytest.raises(SavedTensorModified):
        loss.backward()


class AddingInPlace(nn.Module):
    """Adds the result of a block to the block's input, which no operation of the block saves."""

    def __init__(self) -> None:
        super().__init__()
        self.entrance = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Picking() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entrance(x)
        for block in self.blocks:
            x = x.add_(block(x))
        return x


class Picking(Branching):
    def __init__(self) -> None:
        super().__init__(as_it_is)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.up(x * 0.5))
        if len(WAY):
            wide = self._way(self, wide)
        return self.down(F.gelu(wide)) * float(wide.detach().mean() * 0 + 1)


WAY: list[int] = []


def test_an_argument_may_be_written_before_backward_as_without_a_plan(managed: Any):
    torch.manual_seed(0)
    plain = AddingInPlace()
    model = copy.deepcopy(plain)
    managed(model)
    WAY.append(1)
    try:
        expected, found = trained(plain, 20, takes_way=True), trained(model, 20, takes_way=True)
    finally:
        WAY.clear()
    assert sum(service.reruns for block in model.blocks for service in block.forward.services.values())
    assert all(map(torch.equal, expected, found))


def recordings(model: nn.Sequential) -> list[int]:
    return [service.learning.recordings for block in model for service in block.forward.services.values()]


def test_a_second_run_is_recorded_so_that_a_recipe_serves_the_next_call_of_its_kind(managed: Any):
    plain, model = pair_of(WAYS["dropout"])
    handle = managed(model)
    known = recordings(model)
    for number in range(10, 18):
        takes_way = number % 2 == 0
        expected = trained(plain, number, takes_way=takes_way)
        assert all(map(torch.equal, expected, trained(model, number, takes_way=takes_way)))
    assert recordings(model) == [count + 1 for count in known]
    assert [(outcome.streams, outcome.reruns) for outcome in handle.outcomes()] == [(2, 1), (2, 1)]
    assert {outcome.how for outcome in handle.outcomes()} == {"2 recipes, and its forward again in 1 calls"}


def test_a_second_run_has_the_parameters_of_its_forward(managed: Any):
    plain, model = pair_of(as_it_is)
    managed(model)
    found = []
    for each in (plain, model):
        others = {name: (2 * parameter.detach()).requires_grad_() for name, parameter in each.named_parameters()}
        torch.manual_seed(30)
        batch = -torch.rand(ROWS, WIDTH)
        loss = mean_square(torch.func.functional_call(each, others, (batch,)))
        found.append(torch.autograd.grad(loss, list(others.values()), allow_unused=True))
    assert reruns(model) == len(model)
    pairs = zip(*found, strict=True)
    assert all(one is other is None or torch.equal(one, other) for one, other in pairs)


class Masking(Branching):
    """A branching block that multiplies by a second argument, which autograd does not save."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if mask is None else super().forward(x).masked_fill(mask, 0.0)


class Comparing(Branching):
    """A branching block that does something else if its two arguments are one tensor. It saves the tensor or not."""

    def forward(self, x: torch.Tensor, other: torch.Tensor, *saves: bool) -> torch.Tensor:
        wide = torch.tanh(self.up(x)) if saves else torch.tanh(self.up.bias + x[:, :1])
        if x.detach()[0, 0].item() < 0:
            wide = wide.sin() if other is x else wide.sigmoid()
        return x + self.down(F.gelu(wide))


class TakingOneTwice(nn.Module):
    def __init__(self, *saves: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Comparing(as_it_is) for _ in range(2))
        self._saves = saves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, x, *self._saves)
        return x


@pytest.mark.parametrize("saves", [(True,), ()], ids=["saved by autograd", "not saved"])
def test_arguments_that_are_one_tensor_are_one_tensor_in_a_second_run(saves: tuple[bool, ...], managed: Any):
    torch.manual_seed(0)
    plain = TakingOneTwice(*saves)
    with torch.no_grad():
        for block in plain.blocks:
            block.down.weight.mul_(0.01)
    model = copy.deepcopy(plain)
    handle = managed(model)
    for number in (10, 11, 12):
        expected = trained(plain, number, takes_way=True)
        assert all(map(torch.equal, expected, trained(model, number, takes_way=True)))
    # The second run of the first call was recorded, so the second call has a recipe.
    assert [(outcome.streams, outcome.reruns) for outcome in handle.outcomes()] == [(2, 1), (2, 1)]


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "a view with gaps": lambda: (torch.rand(ROWS, 3 * WIDTH) > 0.5)[:, 1 : WIDTH + 1],
    "transposed": lambda: (torch.rand(WIDTH, ROWS) > 0.5).t(),
    "expanded": lambda: (torch.rand(ROWS, 1) > 0.5).expand(ROWS, WIDTH),
    "windows that overlap": lambda: (torch.rand(ROWS + WIDTH - 1) > 0.5).unfold(0, WIDTH, 1),
    "without dimensions": lambda: torch.tensor(False),
}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masking(as_it_is) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.mark.parametrize("layout", some(LAYOUTS, 2))
def test_a_second_run_gets_arguments_of_the_same_layout(layout: str):
    torch.manual_seed(0)
    plain = Masked()
    model = copy.deepcopy(plain)

    def step(each: nn.Module, number: int, sign: int) -> list[torch.Tensor]:
        torch.manual_seed(number)
        rows = torch.rand(ROWS, WIDTH) * 0.1
        rows[:, 0] = sign
        mean_square(each(rows, LAYOUTS[layout]())).backward()
        return gradients(each)

    plan = plimsoll.plan(model, (torch.rand(ROWS, WIDTH), LAYOUTS[layout]()), loss=mean_square, strategy="full")
    with plimsoll.apply(model, plan) as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(14):
            sign = 1 if number < KNOWN_STEPS else -1
            assert all(map(torch.equal, step(plain, number, sign), step(model, number, sign))), number
        assert handle.faults == ()
        assert sum(outcome.reruns for outcome in handle.outcomes())


def test_a_loop_may_write_biases_and_evaluate_before_backward_as_without_a_plan(managed: Any):
    plain, model = pair_of(WAYS["dropout"])
    managed(model)
    found = []
    for each in (plain, model):
        loss = mean_square(step_of(each, 40, takes_way=True))
        with torch.no_grad():
            for block in each:
                block.up.bias.add_(1.0)  # autograd has not saved it
        each.eval()
        loss.backward()
        assert not any(inner.training for inner in each.modules())
        found.append([*gradients(each), each[0].up.bias.detach().clone()])
    assert reruns(model) == len(model)
    assert all(map(torch.equal, *found))


class _Biased(nn.Module):
    """Reads a value, and adds an argument that autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x) + bias)
        if h.abs().max().item() > 0.97:
            h = h * 0.9
        return x + h.sin()


class _BiasedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Biased() for _ in range(4))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, bias)
        return x


def test_an_argument_made_in_inference_mode_reaches_a_region_that_reads_values():
    def trained(budget: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = _BiasedBlocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with contextlib.nullcontext() if budget is None else plimsoll.attach(model, budget):
            for step in range(6):
                torch.manual_seed(step)
                with torch.inference_mode():
                    bias = torch.randn(32) * (1 + step % 3)
                model(torch.randn(256, 32), bias).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [each.detach() for each in model.parameters()]

    assert all(map(torch.equal, trained(None), trained("430KiB")))
