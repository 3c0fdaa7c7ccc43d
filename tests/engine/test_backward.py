"""Backward in all its forms: twice, double, in parts, out of order, with custom functions that read what they saved."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from contracts.harness import assert_unchanged, batch, equal_bits, manage, plain_step, stack_of, weigh
from engine.models import Inner, attention, step_on


def attending():
    return attention(after=lambda y, x: y * x.sigmoid())


def test_backward_twice_with_retain_graph_accumulates_the_same_bits():
    assert_unchanged(stack_of(attending), step_on(backwards=3))


@pytest.mark.parametrize("boundaries", [(), (1, 2)])
def test_double_backward_keeps_every_bit(boundaries):
    def step(model, index):
        x = batch(index).requires_grad_()
        loss = weigh(model(x))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        total = loss + (slope * slope).sum()
        total.backward()
        return total, slope, x.grad

    assert_unchanged(stack_of(nn.Tanh), step, boundaries=boundaries)


def test_gradients_of_gradients_of_gradients_keep_every_bit():
    def step(model, index):
        x = batch(index, 2, 8).requires_grad_()
        value = weigh(model(x))
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        value.sum().backward()
        return value

    assert_unchanged(stack_of(nn.Sigmoid, count=2), step)


@pytest.mark.parametrize("boundaries", [(), (1, 2)])
def test_gradients_of_parts_of_the_graph_keep_every_bit(boundaries):
    def step(model, index):
        x = batch(index).requires_grad_()
        y = model(x)
        loss = weigh(y)
        made = list(torch.autograd.grad(loss, [model.blocks[1].up.weight], retain_graph=True))
        made += torch.autograd.grad(y[0].sum(), [x], retain_graph=True)
        made += torch.autograd.grad(y[1].sum(), [model.blocks[0].norm.weight, model.head.bias], retain_graph=True)
        loss.backward()
        return made

    assert_unchanged(stack_of(attending), step, boundaries=boundaries)


def test_a_backward_inside_a_hook_of_a_backward_keeps_every_bit():
    def step(model, index):
        x = batch(index).requires_grad_()
        y = model(x)
        inner = []

        @torch.enable_grad()
        def again(gradient):
            inner.extend(torch.autograd.grad(y.sum(), [x, model.blocks[0].up.weight], retain_graph=True))

        with model.blocks[1].down.weight.register_hook(again):
            weigh(y).backward(retain_graph=True)
        return inner

    assert_unchanged(stack_of(attending), step)


def test_an_error_in_the_middle_of_backward_leaves_the_graph_usable():
    class Stop(Exception):
        pass

    def step(model, index):
        loss = weigh(model(batch(index)))
        state = torch.get_rng_state()

        def stop(gradient):
            raise Stop

        with model.blocks[1].up.weight.register_hook(stop), pytest.raises(Stop):
            loss.backward(retain_graph=True)
        assert torch.equal(torch.get_rng_state(), state)
        model.zero_grad()
        loss.backward()
        return loss

    assert_unchanged(stack_of(lambda: nn.Dropout(0.4)), step)


class ReadsTwice(torch.autograd.Function):
    """Reads ``saved_tensors`` twice and carries a tensor as an attribute."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        ctx.carried = x.exp()
        ctx.scale = 2.0
        return x * y * ctx.scale

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        again_x, again_y = ctx.saved_tensors
        assert equal_bits(x, again_x)
        assert equal_bits(y, again_y)
        return gradient * again_y * ctx.scale * ctx.carried / x.exp(), gradient * x * ctx.scale


class SavesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.detach().exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y


class WritesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(3)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 + 0 * x


def test_custom_functions_that_read_twice_carry_attributes_and_save_outputs_keep_every_bit():
    def custom(x):
        y = ReadsTwice.apply(x.sin(), x.cos())
        z = SavesItsOutput.apply(y)
        return z * WritesInPlace.apply(y * 0.5).tanh()

    assert_unchanged(stack_of(lambda: Inner(custom)), step_on(backwards=2))


def saved_tensors(node):
    """What the nodes of a graph show of what they saved, in order."""
    tensors, pending, seen = [], [node], {None}
    while pending:
        node = pending.pop(0)
        if node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        values = [getattr(node, name) for name in sorted(dir(node)) if name.startswith("_saved_")]
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
    return tensors


def test_saved_tensors_may_be_looked_at_outside_of_backward():
    def step(model, index):
        loss = weigh(model(batch(index)))
        found = saved_tensors(loss.grad_fn)
        loss.backward()
        return found

    assert_unchanged(stack_of(nn.Tanh), step)


class OpCount(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("boundaries", [(), (1, 2)])
def test_an_op_runs_at_most_once_more_per_backward(boundaries):
    """Ops that backward itself never uses count replays: once per block, whatever the order of reading."""

    def inner(x):
        y = x.asinh().expm1()
        return torch.special.bessel_j0(y) * y + torch.lgamma(y.abs() + 1)

    torch.manual_seed(0)
    model = stack_of(lambda: Inner(inner))()
    with manage(model, boundaries=boundaries):
        for index in range(3):
            loss = weigh(model(batch(index)).detach() * 0 + model(batch(index)))
            with OpCount() as count:
                loss.backward()
            replayed = [count.names.count(name) for name in ("asinh", "expm1", "lgamma", "gelu")]
            assert max(replayed) <= 3, replayed
            assert count.names.count("asinh") == 3
            model.zero_grad()


class ReadsOneByOne(torch.autograd.Function):
    """Reads ``saved_tensors`` once for each of its tensors, so that each tensor is unpacked twice."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0]
        y = ctx.saved_tensors[1]
        return gradient * y, gradient * x


def test_an_op_runs_once_more_where_a_function_reads_its_saved_tensors_one_by_one():
    def inner(x):
        y = x.asinh()
        for _ in range(3):
            y = ReadsOneByOne.apply(y.expm1(), y.atan())
        return y.erfc()

    torch.manual_seed(0)
    model = stack_of(lambda: Inner(inner))()
    with manage(model):
        for index in range(3):
            loss = weigh(model(batch(index)))
            with OpCount() as count:
                loss.backward()
            replayed = {name: count.names.count(name) for name in ("asinh", "expm1", "atan")}
            # backward of expm1 reads its output, and that of atan its input: only replays call these ops
            assert index == 0 or replayed == {"asinh": 3, "expm1": 9, "atan": 9}, replayed
            model.zero_grad()


def called_twice(model, index):
    first, second = model(batch(index)), model(batch(index + 50, 3, 8))
    loss = weigh(second, first)
    loss.backward()
    return loss


def interleaved(model, index):
    losses = [weigh(model(batch(10 * index + i))) for i in range(3)]
    losses[1].backward(retain_graph=True)
    losses[0].backward()
    losses[1].backward()
    losses[2].backward()
    return losses


def accumulating(model, index):
    losses = []
    for micro in range(4):
        losses.append(weigh(model(batch(10 * index + micro))) / 4)
        losses[-1].backward()
    return losses


@pytest.mark.parametrize(
    ("step", "boundaries"), [(called_twice, ()), (interleaved, ()), (interleaved, (1, 2)), (accumulating, ())]
)
def test_several_forwards_and_backwards_in_any_order_keep_every_bit(step, boundaries):
    assert_unchanged(stack_of(lambda: nn.Dropout(0.2)), step, boundaries=boundaries)


def test_a_graph_that_is_dropped_without_backward_disturbs_nothing():
    def step(model, index):
        for micro in range(2):
            model(batch(10 * index + micro))
        return plain_step(model, index)

    assert_unchanged(stack_of(nn.Tanh), step, boundaries=(1,))


def test_backward_from_another_thread_keeps_every_bit():
    def step(model, index):
        loss = weigh(model(batch(index)))

        def run():
            torch.set_num_threads(1)  # each thread has its own number, and it decides how sums are split
            loss.backward()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return loss

    assert_unchanged(stack_of(attending), step)


def test_wrong_parts_of_a_recipe_cannot_have_another_shape():
    """Every rebuilt tensor has the shape, strides and dtype that forward saved, as the hooks see it."""
    torch.manual_seed(0)
    model = stack_of(attending)()
    plain = copy.deepcopy(model)
    with manage(model):
        plain_step(model, 0)
        outputs = [subject(batch(1)) for subject in (plain, model)]
        saved = [saved_tensors(output.grad_fn) for output in outputs]
    assert len(saved[0]) == len(saved[1]) > 20
    for expected, found in zip(*saved, strict=True):
        assert (expected.shape, expected.stride(), expected.dtype) == (found.shape, found.stride(), found.dtype)
        assert equal_bits(expected.detach(), found.detach())


class ReusesMemory(torch.autograd.Function):
    """Writes its gradient into the tensor that it saved, as hand-written kernels do."""

    @staticmethod
    def forward(ctx, x, is_seen):
        ctx.save_for_backward(x)
        ctx.is_seen = is_seen
        return x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        y = x.sigmoid()
        (x if ctx.is_seen else x.data).copy_(y * (1 - y))
        return x * gradient, None


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("prepare", [lambda x: x.sin(), lambda x: x * 1.5, lambda x: x])
@pytest.mark.parametrize("kept", [(), ("mul", "sin")])
def test_a_backward_that_reuses_its_saved_memory_keeps_every_bit(prepare, is_seen, kept):
    def branches(x):
        x = prepare(x)
        return (x + 1).exp().tanh() + ReusesMemory.apply(x, is_seen)

    assert_unchanged(stack_of(lambda: Inner(branches)), plain_step, steps=4, kept=kept)
