"""Calls in tiles: outputs and gradients of the whole call up to rounding, one tile's memory, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plimsoll.artifacts.tile import Tile
from plimsoll.engine.tiles import Tiles, in_tiles
from plimsoll.errors import InvalidLoss, InvalidModel, PlanMismatch
from plimsoll.tracing.constant_random import ConstantRandomNumbers
from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.tracing.trace import trace

ROWS = 48


class Inner(nn.Module):
    def __init__(self, dropout=0.0, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.dropout = dropout

    def forward(self, x, scale=1.0, gate=None):
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), self.dropout, self.training)
        out = self.down(hidden) * scale
        return out if gate is None else out * gate


class Model(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def max_alive_bytes(step):
    """Return the largest sum of bytes of a traced step's storages that live at one time."""
    ends = [len(step.ops) if each.dies is None else each.dies for each in step.storages]
    lives = list(zip(step.storages, ends, strict=True))
    return max(sum(each.bytes for each, dies in lives if each.born <= at < dies) for at in range(len(step.ops)))


def tile(count=5, *, dim=1, outputs=(1,), inputs=None, is_random=False):
    return Tile(
        path="inner",
        count=count,
        rows=ROWS,
        inputs={"0": dim} if inputs is None else inputs,
        outputs=outputs,
        is_random=is_random,
    )


def gradients(model, inputs, tiles, *, loss=lambda out: out.square().sum(), **kwargs):
    """Return the loss and all gradients of one step, in these tiles."""
    leaves = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
    model.zero_grad()
    with in_tiles(model, tiles):
        value = loss(model(*leaves, **kwargs))
        value.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": value.detach(), **{f"input {at}": leaf.grad for at, leaf in enumerate(leaves)}, **named}


def assert_equal_up_to_rounding(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        if reference is None:
            assert found[name] is None, name
            continue
        assert found[name].dtype is reference.dtype, name
        apart = (found[name].double() - reference.double()).norm() / reference.double().norm()
        assert apart <= tolerance, (name, apart)


@pytest.fixture
def rows():
    return torch.randn(2, ROWS, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.mark.parametrize("count", [2, 5, 48])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13), (torch.bfloat16, 0.02)]
)
def test_gradients_are_those_of_the_whole_call(rows, count, dtype, tolerance):
    model = Model(Inner()).to(dtype)
    inputs = [rows.detach().to(dtype).requires_grad_()]

    expected = gradients(model, inputs, [])
    found = gradients(model, inputs, [tile(count)])

    assert_equal_up_to_rounding(found, expected, tolerance)


def test_tensors_without_rows_and_keywords_reach_every_tile(rows):
    model = Model(Inner())
    gate = torch.randn(16, requires_grad=True)

    def step(tiles):
        gate.grad = None
        return gradients(model, [rows], tiles, scale=2.0, gate=gate) | {"gate": gate.grad}

    assert_equal_up_to_rounding(step([tile()]), step([]), 1e-5)


def test_frozen_weights_and_frozen_inputs_get_no_gradient(rows):
    model = Model(Inner())
    model.inner.up.requires_grad_(False)

    found = gradients(model, [rows.detach()], [tile()])

    assert_equal_up_to_rounding(found, gradients(model, [rows.detach()], []), 1e-5)
    assert found["inner.up.weight"] is None
    assert found["input 0"] is None


def test_gradients_of_narrow_weights_do_not_lose_digits_with_the_number_of_tiles(rows):
    model = Model(Inner()).to(torch.bfloat16)
    narrow = rows.detach().to(torch.bfloat16)
    exact = gradients(copy.deepcopy(model).double(), [narrow.double()], [])

    def error(tiles):
        found = gradients(model, [narrow], tiles)["inner.down.weight"].double()
        return float((found - exact["inner.down.weight"]).norm())

    assert error([tile(48)]) <= 1.5 * error([])


def test_backward_draws_the_random_numbers_of_forward(rows):
    model = Model(Inner(dropout=0.5))
    drawn = []

    def loss(out):
        drawn.append(out.detach().clone())
        torch.rand(7)  # backward must not start from here
        return (out * out.detach().sign()).sum()  # so that the gradient is the slope of the sum of absolute values

    torch.manual_seed(3)
    found = gradients(model, [rows], [tile(is_random=True)], loss=loss)
    after = torch.rand(1)
    torch.manual_seed(3)
    again = gradients(model, [rows], [tile(is_random=True)], loss=loss)

    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(found["inner.up.weight"], again["inner.up.weight"])
    assert torch.equal(after, torch.rand(1))
    # the loss is linear in the last layer, so its gradient times the weights is the loss itself
    bias = (found["inner.down.bias"] * model.inner.down.bias).sum()
    slope = (found["inner.down.weight"] * model.inner.down.weight).sum() + bias
    assert torch.isclose(slope, found["loss"], rtol=1e-4)


def test_without_random_differences_dropout_gives_the_gradients_of_the_whole_call(rows):
    model = Model(Inner(dropout=0.5))

    with ConstantRandomNumbers():
        expected = gradients(model, [rows], [])
        found = gradients(model, [rows], [tile(is_random=True)])

    assert_equal_up_to_rounding(found, expected, 1e-5)


def test_autocast_of_forward_holds_in_backward(rows):
    model = Model(Inner())

    def step(tiles):
        leaf = rows.detach().requires_grad_()
        model.zero_grad()
        with in_tiles(model, tiles):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(leaf)
            out.float().square().sum().backward()
        return {"out": out.detach(), "input": leaf.grad, "weight": model.inner.up.weight.grad}

    found = step([tile()])

    assert_equal_up_to_rounding(found, step([]), 0.02)
    assert found["out"].dtype is torch.bfloat16


def test_a_weight_that_others_use_under_autocast_keeps_its_gradient(rows):
    model = Model(Inner())

    def step(tiles):
        model.zero_grad()
        with in_tiles(model, tiles), torch.autocast("cpu", torch.bfloat16):
            out = model(rows.detach()) + F.linear(
                F.linear(rows.detach(), model.inner.up.weight), model.inner.down.weight
            )
        out.float().sum().backward()
        return {"up": model.inner.up.weight.grad}

    assert_equal_up_to_rounding(step([tile()]), step([]), 0.02)


def test_evaluation_between_forward_and_backward_changes_nothing(rows):
    model = Model(Inner(dropout=0.5))

    def step(evaluates):
        torch.manual_seed(0)
        model.train().zero_grad()
        with in_tiles(model, [tile(is_random=True)]):
            out = model(rows.detach())
            model.train(not evaluates)
            out.square().sum().backward()
        return model.inner.up.weight.grad.clone()

    assert torch.equal(step(evaluates=True), step(evaluates=False))


def test_several_outputs_and_whole_numbers(rows):
    class Both(Inner):
        def forward(self, x):
            out = super().forward(x)
            return out, out.argmax(-1), out.transpose(1, 2)

    model = Model(Both())
    both = tile(inputs={"0": 1}, outputs=(1, 1, 2))

    def loss(outputs):
        first, chosen, turned = outputs
        assert isinstance(outputs, tuple)
        assert not chosen.requires_grad
        return first.gather(-1, chosen[..., None]).sum() + turned.square().sum()

    assert_equal_up_to_rounding(
        gradients(model, [rows], [both], loss=loss), gradients(model, [rows], [], loss=loss), 1e-5
    )


def test_gradients_accumulate_and_backward_runs_twice(rows):
    model = Model(Inner())
    with in_tiles(model, [tile()]):
        value = model(rows).square().sum()
        value.backward(retain_graph=True)
        once = model.inner.up.weight.grad.clone()
        value.backward()

    assert torch.allclose(model.inner.up.weight.grad, 2 * once)


def test_a_weight_changed_before_backward_raises(rows):
    model = Model(Inner())

    with in_tiles(model, [tile()]):
        value = model(rows).sum()
        with torch.no_grad():
            model.inner.up.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


def test_gradients_of_gradients_are_refused_in_words(rows):
    model = Model(Inner())

    with in_tiles(model, [tile()]):
        value = model(rows).square().sum()
        with pytest.raises(InvalidLoss, match="cannot be differentiated twice"):
            torch.autograd.grad(value, rows, create_graph=True)


def test_calls_without_gradients_and_under_torch_func_run_as_a_whole(rows):
    model = Model(Inner())
    calls = []
    forward = Inner.forward
    parameters = dict(model.named_parameters())

    def counted(self, *args, **kwargs):
        calls.append(args[0].shape[1])
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, in_tiles(model, [tile(4)]):
        patch.setattr(Inner, "forward", counted)
        with torch.no_grad():
            model(rows)
        torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (rows,)).sum())(parameters)
        model(rows)

    assert calls == [ROWS, ROWS, 12, 12, 12, 12]


def test_a_tile_holds_the_memory_of_its_rows():
    model = Model(Inner(width=16))
    rows = torch.randn(1, 4096, 16, requires_grad=True)

    def peak(tiles):
        with in_tiles(model, tiles), PeakMeter(torch.device("cpu")) as meter:
            model(rows).square().mean().backward()
        model.zero_grad()
        return meter.peak_bytes

    hidden = 4096 * 64 * 4

    assert peak([]) > 3 * hidden
    assert peak([Tile(path="inner", count=16, rows=4096, inputs={"0": 1}, outputs=(1,))]) < 1.5 * hidden


def test_gradients_of_rows_are_freed_without_the_garbage_collector():
    # Given weights in 16 bits, whose gradients are added up in float32 by hooks
    model = Model(Inner()).bfloat16()
    x = torch.randn(2, ROWS, 16, dtype=torch.bfloat16, requires_grad=True)
    made: list[weakref.ref[torch.Tensor]] = []
    x.register_hook(lambda gradient: made.append(weakref.ref(gradient)))
    # When a step in tiles runs while the collector is off
    gc.collect()
    gc.disable()
    try:
        with in_tiles(model, [tile()]):
            model(x).square().sum().backward()
        x.grad = None
        is_freed = made[0]() is None
    finally:
        gc.enable()
    # Then nothing holds the gradient of its rows any more
    assert is_freed


def test_a_trace_may_run_only_the_first_tiles_and_has_the_memory_of_all():
    # Given a model whose weights are narrow, so that sums of gradients appear after the first tile
    x = torch.randn(2, ROWS, 16, dtype=torch.bfloat16, requires_grad=True)

    def peak(only_first):
        model = Model(Inner()).bfloat16()
        with in_tiles(model, [tile(8)], only_first=only_first):
            return max_alive_bytes(trace(model, x, loss=lambda out: out.square().sum(), device_name="H100-SXM"))

    # When the step is traced with all eight tiles, and with two
    # Then the peak is the same, and one tile is not enough for it
    assert peak(None) == peak(2) > peak(1)


def test_other_numbers_of_rows_are_cut_as_well_and_other_arguments_are_not():
    model = Model(Inner())

    for rows in (torch.randn(2, 7, 16), torch.randn(2, 3, 16), torch.randn(1, 100, 16)):
        assert_equal_up_to_rounding(gradients(model, [rows], [tile()]), gradients(model, [rows], []), 1e-5)
    flat = torch.randn(16)
    with in_tiles(model, [tile()]):
        assert model(flat).shape == (16,)


def test_the_module_is_as_before_also_after_an_error(rows):
    model = Model(Inner())
    before = dict(model.inner.__dict__)

    with pytest.raises(ZeroDivisionError), in_tiles(model, [tile()]):
        raise ZeroDivisionError

    assert model.inner.__dict__ == before


def test_copies_and_pickles_of_a_tiled_module_run_as_a_whole(rows):
    model = Model(Inner())

    with in_tiles(model, [tile()]):
        twin, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        twin.inner.up.weight.data.zero_()
        outputs = [each(rows) for each in (model, twin, unpickled)]

    assert torch.allclose(outputs[0], outputs[2], atol=1e-5)
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-2)


@pytest.mark.parametrize("kind", ["missing", "twice"])
def test_a_plan_of_another_model_is_refused(kind):
    model = Model(Inner())

    with in_tiles(model, [tile()]), pytest.raises(PlanMismatch, match=r"does not have it|another plan does so"):
        Tiles(
            model,
            [Tile(path="outer" if kind == "missing" else "inner", count=2, rows=4, inputs={"0": 1}, outputs=(1,))],
        )


def test_a_call_without_rows_runs_as_a_whole():
    model = Model(Inner())

    with in_tiles(model, [tile()]):
        assert model(torch.randn(2, 0, 16)).shape == (2, 0, 16)


def test_a_gradient_that_goes_elsewhere_is_refused_before_it_is_wrong(rows):
    class Reading(Inner):
        context = None

        def forward(self, x):
            return super().forward(x) * self.context

    model = Model(Reading())
    model.inner.context = torch.randn(16, requires_grad=True).exp()

    with in_tiles(model, [tile()]):
        value = model(rows).sum()
        with pytest.raises(InvalidModel, match="neither its argument nor its own weight"):
            value.backward()
