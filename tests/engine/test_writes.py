"""In-place writes: on memory of the region's own, on its inputs, and by others before backward."""

from __future__ import annotations

import copy
import ctypes

import msgspec
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import plimsoll
from contracts.harness import assert_unchanged, batch, manage, plain_step, stack_of, weigh
from engine.models import Inner, Lined, Wrapped
from plimsoll.artifacts.decision import Engine
from plimsoll.errors import SavedTensorModified


def writes_to_its_input(line, x):
    y = (x + 1).exp()
    x.mul_(0.5)
    return line(y * x).tanh() + x


def test_a_region_that_writes_to_its_input_keeps_and_stays_right():
    build = lambda: Wrapped(Lined(writes_to_its_input))  # noqa: E731
    report = assert_unchanged(build, plain_step, regions=["block"], engine=None)
    assert report.engines <= {Engine.KEEP, Engine.RECIPE}


class Switched(Lined):
    """What it does depends on a switch that no guard sees."""

    def __init__(self, function):
        super().__init__(function)
        self.switch = [False]

    def forward(self, x):
        return self.function(self.line, x, is_on=self.switch[0])


def test_a_region_that_writes_to_its_input_only_sometimes_stays_right():
    def sometimes(line, x, *, is_on):
        z = line((x + 1).exp()).tanh()
        if is_on:
            with torch.no_grad():
                x.mul_(0.5)
        return z

    def step(model, index):
        model.block.switch[0] = index >= 1
        return plain_step(model, index)

    assert_unchanged(lambda: Wrapped(Switched(sometimes)), step, regions=["block"], engine=None)


@torch.no_grad()
def write_to_the_input(x, y):
    x.zero_()


def write_to_the_output(x, y):
    y.mul_(2)


@pytest.mark.parametrize("write", [write_to_the_input, write_to_the_output])
def test_a_write_to_an_input_or_output_that_nobody_saved_changes_nothing(write):
    """Autograd saves neither, but recipes start from the input."""

    def step(model, index):
        x = model.entrance(batch(index))
        y = model.block(x)
        write(x, y)
        loss = weigh(model.head(y))
        loss.backward()
        return loss

    unsaved = lambda: Wrapped(Lined(lambda line, x: line((x + 1).exp().tanh()) + 1))  # noqa: E731
    assert_unchanged(unsaved, step, regions=["block"])


@pytest.mark.parametrize("recorded_first", [False, True])
def test_a_write_to_a_saved_input_is_an_error_before_the_optimizer(recorded_first):
    model = Wrapped(Lined(lambda line, x: torch.tanh(line(x) * x)))
    with manage(model, ["block"]):
        if recorded_first:
            plain_step(model, 0)
        x = model.entrance(batch(1))
        loss = weigh(model.block(x))
        with torch.no_grad():
            x.add_(1)
        with pytest.raises((RuntimeError, SavedTensorModified), match=r"modified"):
            loss.backward()


@pytest.mark.parametrize("starts_after_recording", [False, True])
def test_a_write_inside_the_region_to_what_autograd_saved_is_an_error_as_without_a_plan(starts_after_recording):
    def writes(line, x, *, is_on):
        y = line(x).exp()
        z = y.tanh() * x
        if is_on:
            with torch.no_grad():
                y.add_(1)
        return z

    plain = Wrapped(Switched(writes))
    managed = copy.deepcopy(plain)
    plain.block.switch[0] = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain_step(plain, 0)
    with manage(managed, ["block"]):
        if starts_after_recording:
            plain_step(managed, 0)
        managed.block.switch[0] = True
        for index in range(3):
            with pytest.raises((RuntimeError, SavedTensorModified), match=r"modified"):
                plain_step(managed, index)


@pytest.mark.parametrize("boundaries", [(), (1, 2)])
@pytest.mark.parametrize("name", ["up.weight", "up.bias", "down.bias", "norm.weight"])
def test_a_parameter_written_between_forward_and_backward_is_an_error_where_autograd_saved_it(name, boundaries):
    def step(model, index):
        loss = weigh(model(batch(index)))
        with torch.no_grad():
            model.blocks[1].get_parameter(name).add_(1)
        loss.backward()
        return loss

    model = stack_of(nn.Tanh)()
    try:
        step(copy.deepcopy(model), 0)
    except RuntimeError:
        with manage(model, boundaries=boundaries):
            plain_step(model, 0)
            with pytest.raises(SavedTensorModified, match=f"parameter {name}|saved tensor"):
                step(model, 1)
    else:
        assert_unchanged(stack_of(nn.Tanh), step, boundaries=boundaries)


@pytest.mark.parametrize("name", ["up.bias", "down.bias"])
def test_a_bias_may_be_written_also_after_a_switch_to_a_plan_that_drops_boundaries(name):
    def step(model, index):
        loss = weigh(model(batch(index)))
        with torch.no_grad():
            model.blocks[1].get_parameter(name).add_(1)
        return torch.autograd.grad(loss, model.blocks[0].up.weight)[0]

    model = stack_of(nn.Tanh)()
    plain = copy.deepcopy(model)
    full = plimsoll.plan(model, batch(0), loss=weigh, strategy="full")
    *others, last = full.regions
    linked = msgspec.structs.replace(full, regions=(*others, msgspec.structs.replace(last, is_boundary_dropped=True)))
    with plimsoll.apply(model, full, verify_every=0) as handle:
        for index, plan in enumerate((full, full, linked, linked, full, linked)):
            handle.switch(plan)
            assert torch.equal(step(plain, index), step(model, index))


def test_a_frozen_bias_is_held_as_it_is_so_writing_to_it_is_an_error():
    """A quantized weight's scales and a frozen model's biases are many, and no optimizer writes them."""

    def step(model, index):
        loss = weigh(model(batch(index)))
        with torch.no_grad():
            model.blocks[1].up.bias.add_(1)
        loss.backward()

    model = stack_of(nn.Tanh)()
    for block in model.blocks:
        block.up.bias.requires_grad_(False)
    with manage(model):
        plain_step(model, 0)
        with pytest.raises(SavedTensorModified, match=r"parameter up\.bias"):
            step(model, 1)


@pytest.mark.parametrize("kept", [(), ("gelu",), ("inner",), ("norm",)])
def test_parameters_may_be_stepped_while_backward_runs(kept):
    def update(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    def step(model, index):
        handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
        loss = plain_step(model, index)
        for handle in handles:
            handle.remove()
        return loss, plain_step(model, index)

    assert_unchanged(stack_of(nn.Tanh), step, kept=kept)


class Buffered(Lined):
    """Its function gets a buffer too."""

    def __init__(self, function, buffer):
        super().__init__(function)
        self.register_buffer("buffer", buffer)

    def forward(self, x):
        return self.function(self.line, x, self.buffer)


def adding_to_the_buffer(model, index):
    loss = weigh(model(batch(index)))
    model.block.buffer.add_(1)
    loss.backward()
    return loss


def counting(line, x, calls):
    calls.add_(1)
    return line((x * calls).exp().tanh()).sigmoid()


@pytest.mark.parametrize(
    ("function", "buffer", "step", "engine"),
    [
        (lambda line, x, y: line((x + y).exp()).tanh(), torch.linspace(0, 1, 8), adding_to_the_buffer, Engine.RECIPE),
        (counting, torch.zeros(()), plain_step, None),
    ],
    ids=["outer code changes it before backward", "the region counts its calls in it"],
)
def test_a_buffer_is_read_as_forward_saw_it_and_written_once_per_call(function, buffer, step, engine):
    assert_unchanged(lambda: Wrapped(Buffered(function, buffer.clone())), step, regions=["block"], engine=engine)


def through_numpy(noise, values):
    noise.numpy()[:] = values.numpy()


def through_data(noise, values):
    noise.data.copy_(values)


def through_a_pointer(noise, values):
    ctypes.memmove(noise.data_ptr(), values.data_ptr(), values.nbytes)


@pytest.mark.parametrize("write", [through_numpy, through_data, through_a_pointer])
def test_memory_written_behind_pytorch_is_never_rebuilt(write):
    def written(x):
        noise = torch.zeros_like(x)
        write(noise, x.detach().exp())
        return x * noise * noise.exp()

    assert_unchanged(stack_of(lambda: Inner(written), count=2), plain_step, engine=None)


class Frozen(nn.Module):
    """Blocks behind a frozen embedding, so that autograd saves no block's input; ``between`` runs after the first block."""

    def __init__(self, between=lambda x: None):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(16, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(Lined(lambda line, x: line((x + 1).exp().tanh())) for _ in range(2))
        self.between, self.made = between, None

    def forward(self, ids):
        x = self.words(ids)
        self.made = StorageWeakRef(x.untyped_storage())
        y = self.blocks[0](x)
        self.between(x)
        return weigh(self.blocks[1](y))


IDS = torch.arange(16).view(4, 4)


def gradients_of(model, after_forward=lambda: None):
    model.zero_grad()
    loss = model(IDS)
    after_forward()
    loss.backward()
    return [each.grad.clone() for each in model.blocks.parameters()]


def assert_right(model, plan, after_forward=lambda: None):
    """Three steps under the plan give the gradients that one without it gives, bit for bit."""
    wanted = gradients_of(model, after_forward)
    with plimsoll.apply(model, plan):
        for _ in range(3):
            assert all(map(torch.equal, gradients_of(model, after_forward), wanted))


def test_an_input_that_forward_made_is_held_as_it_is():
    model = Frozen()
    plan = plimsoll.plan(model, IDS, strategy="full")
    assert "input:0" in plan.regions[0].steady_inputs
    with plimsoll.apply(model, plan):
        for _ in range(2):  # recorded, steady
            loss = model(IDS)
            assert not model.made.expired()
            loss.backward()
            del loss
            assert model.made.expired()
    assert_right(model, plan)


def test_an_input_that_somebody_keeps_is_copied_when_forward_is_through():
    model = Frozen()
    plan = plimsoll.plan(model, IDS, strategy="full")
    model.between = lambda x: setattr(model, "kept", x)
    assert_right(model, plan, lambda: model.kept.zero_())


def test_an_input_that_forward_writes_to_later_is_copied_at_once():
    model = Frozen(lambda x: x.zero_())
    plan = plimsoll.plan(model, IDS, strategy="full")
    assert "input:0" not in plan.regions[0].steady_inputs
    assert_right(model, plan)


def test_a_write_in_forward_that_the_planned_step_did_not_do_is_an_error_once():
    model = Frozen()
    plan = plimsoll.plan(model, IDS, strategy="full")
    model.between = lambda x: x.zero_()
    wanted = gradients_of(model)
    with plimsoll.apply(model, plan):
        with pytest.raises(SavedTensorModified, match="An in-place operation has changed a region's input"):
            gradients_of(model)
        assert all(map(torch.equal, gradients_of(model), wanted))


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, shift):
        return x + self.down(torch.tanh((self.up(x) + shift).exp()))


class ShiftedStack(nn.Module):
    """Gives its blocks an argument that is added, so that autograd does not save it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Shifted() for _ in range(3))
        self.makes_shift = False

    def forward(self, x, shift):
        if self.makes_shift:
            with torch.inference_mode():
                shift = shift * 2
        for block in self.blocks:
            x = block(x, shift)
        return x


@pytest.mark.parametrize("makes_shift", [False, True], ids=["given", "made in forward"])
def test_an_argument_made_in_inference_mode_may_be_written_before_backward(makes_shift):
    torch.manual_seed(0)
    model, x = ShiftedStack(), batch(0)
    model.makes_shift = makes_shift

    def step():
        with torch.inference_mode():
            shift = torch.linspace(-1, 1, 16)
        loss = weigh(model(x, shift))
        with torch.inference_mode():
            shift.zero_()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return gradients

    plain = step()
    plan = plimsoll.plan(model, (x, torch.zeros(16)), strategy="full", loss=weigh)
    with plimsoll.apply(model, plan) as handle:
        for _ in range(3):
            assert all(map(torch.equal, step(), plain))
        assert {each.engine for each in handle.outcomes()} == {Engine.RECIPE}
