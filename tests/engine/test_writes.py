"""In-place writes: on memory of the region's own, on its inputs, and by others before backward."""

from __future__ import annotations

import copy
import ctypes

import pytest
import torch
from torch import nn

from contracts.harness import assert_unchanged, batch, manage, plain_step, stack_of, weigh
from plimsoll.artifacts.decision import Engine
from plimsoll.errors import SavedTensorModified


class Inner(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def masked_fill(x):
    scores = x @ x.T
    scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ x


def slices_of_empty(x):
    out = torch.empty_like(x)
    half = x.shape[1] // 2
    out[:, :half] = x[:, :half].exp()
    out[:, half:] = x[:, half:].sin()
    return out * x


def zeros_then_slices(x):
    out = torch.zeros_like(x)
    out[:, 2:5] = x[:, 2:5].exp()
    return out.sigmoid() * out


def chain_of_writes(x):
    y = x * 2
    y.add_(1).mul_(x).clamp_(min=-1)
    y[0] = 0
    return y.exp()


def out_argument(x):
    with torch.no_grad():
        out = torch.empty_like(x)
        torch.exp(x, out=out)
    return x * out


def index_put(x):
    y = x * 2
    y[torch.tensor([0, 2])] = x[:2]
    return y.sigmoid() * y


def saved_then_written_by_detached_alias(x):
    y = x.detach().clone()
    z = x * y
    w = y.clone()
    w.mul_(2)
    return z * w.exp()


def leaky_in_place(x):
    y = nn.functional.leaky_relu(x * 3, 0.1, inplace=True)
    return y * nn.functional.relu(x + 1, inplace=True)


FUNCTIONS = [
    masked_fill,
    slices_of_empty,
    zeros_then_slices,
    chain_of_writes,
    out_argument,
    index_put,
    saved_then_written_by_detached_alias,
    leaky_in_place,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_writes_to_memory_of_the_region_are_replayed_on_private_copies(function):
    report = assert_unchanged(stack_of(lambda: Inner(function), count=2), plain_step)
    assert report.dropped_share > 0.6, report.obstacles


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_backward_may_run_twice_over_replayed_writes(function):
    def step(model, index):
        loss = weigh(model(batch(index)))
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    assert_unchanged(stack_of(lambda: Inner(function), count=2), step)


class Writer(nn.Module):
    """Writes to its own input, then uses it."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x):
        y = (x + 1).exp()
        x.mul_(0.5)
        return self.line(y * x).tanh() + x


class Wrapped(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.entrance = nn.Linear(8, 8)
        self.block = block
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.block(self.entrance(x)))


def test_a_region_that_writes_to_its_input_keeps_and_stays_right():
    report = assert_unchanged(lambda: Wrapped(Writer()), plain_step, regions=["block"], engine=None)
    assert report.engines <= {Engine.KEEP, Engine.RECIPE}


def test_a_region_that_writes_to_its_input_only_sometimes_stays_right():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)
            self.switch = [False]

        def forward(self, x):
            y = (x + 1).exp()
            z = self.line(y).tanh()
            if self.switch[0]:
                with torch.no_grad():
                    x.mul_(0.5)
            return z

    class Model(Wrapped):
        def __init__(self):
            super().__init__(Sometimes())

    def step(model, index):
        model.block.switch[0] = index >= 1
        return plain_step(model, index)

    assert_unchanged(Model, step, regions=["block"], engine=None)


class Unsaved(nn.Module):
    """Neither its input nor its output is saved by autograd, but recipes start from the input."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x):
        return self.line((x + 1).exp().tanh()) + 1


def test_a_write_to_an_input_that_nobody_saved_changes_nothing():
    def step(model, index):
        x = model.entrance(batch(index))
        y = model.block(x)
        with torch.no_grad():
            x.zero_()
        loss = weigh(model.head(y))
        loss.backward()
        return loss

    assert_unchanged(lambda: Wrapped(Unsaved()), step, regions=["block"])


def test_a_write_to_an_output_that_nobody_saved_changes_nothing():
    def step(model, index):
        y = model.block(model.entrance(batch(index)))
        y.mul_(2)
        loss = weigh(model.head(y))
        loss.backward()
        return loss

    assert_unchanged(lambda: Wrapped(Unsaved()), step, regions=["block"])


class Saved(nn.Module):
    """Its input and its output are saved."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.line(x) * x)


@pytest.mark.parametrize("recorded_first", [False, True])
def test_a_write_to_a_saved_input_is_an_error_before_the_optimizer(recorded_first):
    model = Wrapped(Saved())
    with manage(model, ["block"]):
        if recorded_first:
            plain_step(model, 0)
        x = model.entrance(batch(1))
        loss = weigh(model.block(x))
        with torch.no_grad():
            x.add_(1)
        with pytest.raises((RuntimeError, SavedTensorModified), match=r"modified"):
            loss.backward()


def test_a_write_inside_the_region_to_what_autograd_saved_is_an_error_as_without_a_plan():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, x):
            y = self.line(x).exp()
            z = y.tanh() * x
            with torch.no_grad():
                y.add_(1)
            return z

    plain = Wrapped(Wrong())
    managed = copy.deepcopy(plain)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain_step(plain, 0)
    with manage(managed, ["block"]):
        for index in range(3):
            with pytest.raises((RuntimeError, SavedTensorModified), match=r"modified"):
                plain_step(managed, index)


def test_a_write_inside_the_region_that_starts_after_recording_is_an_error_or_harmless():
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)
            self.switch = [False]

        def forward(self, x):
            y = self.line(x).exp()
            z = y.tanh() * x
            if self.switch[0]:
                with torch.no_grad():
                    y.add_(1)
            return z

    model = Wrapped(Later())
    with manage(model, ["block"]):
        plain_step(model, 0)
        model.block.switch[0] = True
        for index in range(2):
            with pytest.raises((RuntimeError, SavedTensorModified), match=r"modified"):
                plain_step(model, index)


@pytest.mark.parametrize("name", ["line.weight", "line.bias"])
def test_a_parameter_modified_between_forward_and_backward_is_an_error(name):
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, x):
            return self.line(x.exp()).tanh().exp()

    model = Wrapped(Region())
    with manage(model, ["block"]):
        plain_step(model, 0)
        loss = weigh(model(batch(1)))
        with torch.no_grad():
            model.block.get_parameter(name).add_(1)
        with pytest.raises(SavedTensorModified) as error:
            loss.backward()
        assert name in str(error.value)


def test_parameters_may_be_stepped_while_backward_runs():
    def step(model, index):
        handles = []
        for parameter in model.parameters():

            def update(p):
                with torch.no_grad():
                    p -= 0.1 * p.grad
                p.grad = None

            handles.append(parameter.register_post_accumulate_grad_hook(update))
        loss = weigh(model(batch(index)))
        loss.backward()
        for handle in handles:
            handle.remove()
        outputs = weigh(model(batch(index)))
        outputs.backward()
        return loss, outputs

    for kept in ((), ("gelu",), ("inner",), ("norm",)):
        assert_unchanged(stack_of(nn.Tanh), step, kept=kept)


def test_a_buffer_that_outer_code_changes_before_backward_is_read_as_forward_saw_it():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)
            self.register_buffer("scale", torch.linspace(0, 1, 8))

        def forward(self, x):
            return self.line((x + self.scale).exp()).tanh()

    def step(model, index):
        loss = weigh(model(batch(index)))
        model.block.scale.add_(1)
        loss.backward()
        return loss

    assert_unchanged(lambda: Wrapped(Scaled()), step, regions=["block"])


def test_a_counter_buffer_that_the_region_writes_and_reads_counts_once_per_call():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return self.line((x * self.calls).exp().tanh()).sigmoid()

    assert_unchanged(lambda: Wrapped(Counting()), plain_step, regions=["block"], engine=None)


def test_memory_written_behind_pytorch_is_never_rebuilt():
    def through_numpy(x):
        noise = torch.zeros_like(x)
        noise.numpy()[:] = x.detach().exp().numpy()
        return x * noise * noise.exp()

    def through_data(x):
        noise = torch.zeros_like(x)
        noise.data.copy_(x.detach().exp())
        return x * noise * noise.exp()

    def through_a_pointer(x):
        noise = torch.zeros_like(x)
        values = x.detach().exp()
        ctypes.memmove(noise.data_ptr(), values.data_ptr(), values.nbytes)
        return x * noise * noise.exp()

    for function in (through_numpy, through_data, through_a_pointer):
        assert_unchanged(stack_of(lambda f=function: Inner(f), count=2), plain_step, engine=None)
