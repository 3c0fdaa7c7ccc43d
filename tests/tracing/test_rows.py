"""Rows are followed through ops: which module calls work row by row, and which mix rows."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plimsoll.tracing.rows import find_rowwise_calls, reshaped


class Block(nn.Module):
    """A block whose inner call runs ``function`` with some weights. The cumulative sum makes the block itself mix rows."""

    def __init__(self, function, width=16):
        super().__init__()
        self.inner = Inner(function, width)

    def forward(self, x):
        return x + self.inner(x.cumsum(1))


class Inner(nn.Module):
    def __init__(self, function, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.batch_norm = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.ones(width))
        self.table = nn.Parameter(torch.ones(24, width))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def found(function, *, batch=2, rows=24):
    """Return the row-wise calls of a model of two such blocks."""
    model = nn.Sequential(Block(function), Block(function))
    return find_rowwise_calls(model, torch.randn(batch, rows, 16))


def mlp(m, x):
    return m.down(F.gelu(m.up(x)))


def heads(x):
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


ROWWISE = {
    "mlp": mlp,
    "norm and mlp": lambda m, x: mlp(m, m.norm(x)),
    "rms norm by hand": lambda m, x: mlp(m, x * x.square().mean(-1, keepdim=True).rsqrt() * m.scale),
    "flattened rows": lambda m, x: mlp(m, x.reshape(-1, x.shape[-1])).view_as(x),
    "gated": lambda m, x: m.down(torch.cat([F.silu(g) * u for g, u in [m.up(x).chunk(2, -1)]] * 2, -1)),
    "heads": lambda m, x: mlp(m, heads(x).softmax(-1).transpose(1, 2).flatten(-2)),
    "einsum over features": lambda m, x: torch.einsum("btd,ed->bte", mlp(m, x), m.down.weight[:, :16]),
    "dropout": lambda m, x: F.dropout(mlp(m, x), 0.1),
    "top values of each row": lambda m, x: mlp(m, x) * x.topk(3, -1).values.sum(-1, keepdim=True),
    "written in place": lambda m, x: m.down(m.up(x).relu_().mul_(2)),
    "buffer of the same rows": lambda m, x: mlp(m, torch.zeros_like(x).copy_(x)),
    "stacked": lambda m, x: torch.stack([mlp(m, x), x], 1).sum(1),
}

MIXING = {
    "written argument": lambda m, x: mlp(m, x.relu_()),
    "sum over rows": lambda m, x: mlp(m, x) * x.sum(1, keepdim=True),
    "softmax over rows": lambda m, x: mlp(m, x).softmax(1),
    "cumulative sum": lambda m, x: mlp(m, x).cumsum(1),
    "shifted": lambda m, x: mlp(m, F.pad(x[:, 1:], (0, 0, 0, 1))),
    "rolled": lambda m, x: mlp(m, x.roll(1, 1)),
    "flipped": lambda m, x: mlp(m, x.flip(1)),
    "attention": lambda m, x: mlp(m, x @ x.transpose(1, 2) @ x),
    "positions": lambda m, x: mlp(m, x + m.table[: x.shape[1]]),
    "random numbers by position": lambda m, x: mlp(m, x + torch.rand(x.shape[1], 1)),
    "sorted rows": lambda m, x: mlp(m, x.sort(1).values),
    "written over": lambda m, x: torch.zeros(*x.shape).copy_(mlp(m, x)),
    "a loss": lambda m, x: mlp(m, x).mean(),
    "rows that a value chooses": lambda m, x: mlp(m, x) * (x.amax(1).argmax() + 1),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_calls_whose_rows_do_not_meet_are_found_with_their_rows(name):
    calls = found(ROWWISE[name])

    call = calls["0.inner"]
    assert calls.keys() == {"0.inner", "1.inner"}
    assert (call.dim, call.rows, call.inputs, call.outputs) == (1, 24, {"0": 1}, (1,))


@pytest.mark.parametrize("name", MIXING)
def test_calls_that_mix_rows_are_not_found(name):
    calls = found(MIXING[name], batch=1)

    assert "0.inner" not in calls


def test_rows_are_the_batch_where_only_the_batch_does_not_mix():
    calls = found(lambda m, x: mlp(m, x.softmax(1)), batch=6)

    assert (calls["0"].dim, calls["0"].rows) == (0, 6)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: mlp(m, x) / x.shape[1],
        lambda m, x: mlp(m, x) * (1 + (len(x[0]) > 20)),
        lambda m, x: mlp(m, x) if x.shape[1] % 24 == 0 else -mlp(m, x),
        lambda m, x: mlp(m, x) if x.shape[1] % 24 == 0 else [][0],
    ],
)
def test_python_code_that_depends_on_the_number_of_rows_is_noticed(function):
    assert "0.inner" not in found(function)


def test_batch_norm_mixes_samples():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(2)))

    calls = find_rowwise_calls(model, torch.randn(32, 8))

    assert calls.keys() == {"0.0", "0.2", "1.0", "1.2"}


def test_pointwise_convolutions_work_pixel_by_pixel_and_others_sample_by_sample():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.pointwise, self.spatial = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            return x.cumsum(0) + self.spatial(self.pointwise(x))

    calls = find_rowwise_calls(nn.Sequential(Pair(), Pair()), torch.randn(2, 8, 16, 12))

    assert (calls["0.pointwise"].dim, calls["0.pointwise"].rows) == (2, 16)
    assert (calls["0.spatial"].dim, calls["0.spatial"].rows) == (0, 2)


def test_a_call_that_raises_and_is_caught_does_not_hide_the_calls_around_it():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(16, 64)

        def forward(self, x):
            raise ValueError(self.up(x).shape)

    def with_a_fallback(m, x):
        with contextlib.suppress(ValueError):
            x = m.picky(x)
        return mlp(m, x)

    blocks = [Block(with_a_fallback), Block(with_a_fallback)]
    for block in blocks:
        block.inner.picky = Picky()
    calls = find_rowwise_calls(nn.Sequential(*blocks), torch.randn(2, 24, 16))
    call = calls["0.inner"]
    assert calls.keys() == {"0.inner", "1.inner"}
    assert (call.path, call.dim, call.rows, call.outputs) == ("0.inner", 1, 24, (1,))


def test_a_module_with_a_hook_on_a_part_is_not_cut():
    model = nn.Sequential(Block(mlp), Block(mlp))
    model[0].inner.up.register_forward_hook(lambda *_: None)

    calls = find_rowwise_calls(model, torch.randn(2, 24, 16))

    assert "0.inner" not in calls
    assert "1.inner" in calls


def test_the_same_calls_are_found_without_data():
    with torch.device("meta"):
        model = nn.Sequential(Block(mlp), Block(mlp))

    calls = find_rowwise_calls(model, torch.randn(2, 24, 16), device_name="H100-SXM")

    assert calls.keys() == {"0.inner", "1.inner"}


def test_the_search_leaves_model_and_random_states_as_they_were():
    model = nn.Sequential(Block(ROWWISE["dropout"]), Block(ROWWISE["dropout"]))
    hooks = [len(module._forward_hooks) for module in model.modules()]
    state = torch.get_rng_state()

    find_rowwise_calls(model, torch.randn(2, 24, 16, generator=torch.Generator()))

    assert torch.equal(torch.get_rng_state(), state)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("layout", "rows", "shape", "expected"),
    [
        (((2,), (-1,), (8,)), 6, (12, 8), ((2, -1), (8,))),
        (((2, -1), (8,)), 6, (2, 6, 2, 4), ((2,), (-1,), (2,), (4,))),
        (((-1,), (1,), (8,)), 6, (6, 8), ((-1,), (8,))),
    ],
)
def test_reshapes_join_and_split_dimensions(layout, rows, shape, expected):
    assert reshaped(layout, rows, shape) == expected
