"""Views, shared storages, odd dtypes and odd layouts: what a slot is must not depend on how a tensor lies in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from contracts.harness import Block, Stack, assert_unchanged, batch, plain_step, stack_of, weigh
from engine.functions import FUNCTIONS
from engine.models import Inner, Lined, Only, step_on, step_with_input
from long_cases import some
from plimsoll.artifacts.decision import Engine
from steps import Net

WITH_OBSTACLES = (
    "chain of writes",
    "conjugates",
    "gathered",
    "sorted and unfolded",
    "two draws without a saved tensor between",
)
"""Of these at least half is dropped, of all others nearly everything."""


def drawing_between_backwards(model, index):
    loss = weigh(model(batch(index)))
    torch.rand(3)
    loss.backward(retain_graph=True)
    torch.rand(3)
    loss.backward()
    return loss, torch.rand(2)


@pytest.mark.parametrize("name", some(FUNCTIONS, 12))
def test_a_block_around_an_unusual_function_keeps_every_bit_and_moves_the_generator_as_without(name):
    report = assert_unchanged(stack_of(lambda: Inner(FUNCTIONS[name]), count=2), plain_step)
    assert report.dropped_share > (0.5 if name in WITH_OBSTACLES else 0.95), report.obstacles


@pytest.mark.parametrize("function", some(FUNCTIONS.values(), 9), ids=FUNCTIONS)
def test_only_some_values_dropped_keeps_every_bit(function):
    kept = ("norm", "exp", "sigmoid", "mul#0")
    assert_unchanged(stack_of(lambda: Inner(function), count=2), plain_step, kept=kept, steps=2)


@pytest.mark.parametrize("function", some(FUNCTIONS.values(), 9), ids=FUNCTIONS)
def test_backward_may_run_twice_with_draws_in_between(function):
    assert_unchanged(stack_of(lambda: Inner(function), count=2), drawing_between_backwards, boundaries=(1,))


def test_nan_activations_flow_through_recipes():
    def poisoned(index):
        x = batch(index)
        x[0, 0] = float("nan")
        x[1, 1] = float("inf")
        return x

    assert_unchanged(stack_of(nn.Tanh), step_on(poisoned))


@pytest.mark.parametrize(
    "lay",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, 4:12],
        lambda x: x[:1].expand(5, 8),
        lambda x: x.flip(0)[1:],
    ],
    ids=["transposed", "with an offset", "expanded", "shorter"],
)
def test_inputs_that_lie_oddly_keep_every_bit(lay):
    step = step_with_input(lambda index: lay(batch(index)))
    assert_unchanged(lambda: Only(Block(nn.GELU(), width=8)), step, regions=["block"])


def test_channels_last_convolutions_keep_every_bit():
    def build():
        layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 1)) for _ in range(2)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    step = step_with_input(lambda index: batch(index, 2, 4, 6, 6).to(memory_format=torch.channels_last))
    assert_unchanged(build, step)


def test_integer_inputs_and_embeddings_inside_a_region_keep_every_bit():
    def look_up(net, x, token):
        return x + net.line(net.table(token).exp() * net.table(token + 1))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                Net(look_up, line=nn.Linear(16, 16), table=nn.Embedding(11, 16)) for _ in range(2)
            )
            self.head = nn.Linear(16, 4)

        def forward(self, token):
            first, second = self.blocks
            return self.head(second(first(torch.zeros(16), token), token))

    assert_unchanged(Model, step_on(lambda index: torch.randint(0, 10, (3, 4))))


def pairs():
    """Two inputs that may or may not be one tensor."""
    return Only(Lined(lambda line, x, y: line((x + 1).exp() * (y + 2).exp()) + y))


def aliases_at_first(model, index):
    x = batch(index).requires_grad_()
    return (x,), x, x if index == 0 else batch(index + 50).requires_grad_()


def views_with_changing_offsets(model, index):
    both = batch(index, 5, 24).requires_grad_()
    start = 2 * index
    return (both,), both[:, :8], both[:, start : start + 8]


def a_parameter_at_first(model, index):
    x = batch(index, 8, 8).requires_grad_()
    return (x,), x, model.block.line.weight if index == 0 else batch(index + 50, 8, 8)


@pytest.mark.parametrize(
    ("inputs", "engine"),
    [
        (aliases_at_first, Engine.RECIPE),
        (views_with_changing_offsets, Engine.RECIPE),
        (a_parameter_at_first, None),
    ],
)
def test_inputs_that_are_one_memory_in_the_recorded_call_only_are_told_apart(inputs, engine):
    def step(model, index):
        leaves, x, y = inputs(model, index)
        loss = weigh(model(x, y))
        loss.backward()
        return loss, *(leaf.grad for leaf in leaves), y.grad if y.is_leaf else None

    assert_unchanged(pairs, step, regions=["block"], engine=engine)


@pytest.mark.parametrize(
    ("shape", "pick"),
    [
        (lambda y, x: (y, y.exp()), lambda out: out),
        (lambda y, x: {"a": y, "b": [y * y, None, 3]}, lambda out: (out["a"], out["b"][0])),
        (lambda y, x: (x[:, 1:4], y), lambda out: out),
        (lambda y, x: (y.t(), y[:, ::2], x), lambda out: out),
        (lambda y, x: (y.detach(), y.exp().exp()), lambda out: out[1:]),
    ],
    ids=["tuple", "nested", "view of the input", "views", "detached"],
)
def test_regions_that_return_more_than_a_tensor_keep_every_bit(shape, pick):
    def step(model, index):
        x = batch(index).requires_grad_()
        loss = weigh(*pick(model(x * 1)))
        loss.backward()
        return loss, x.grad

    build = lambda: Only(Lined(lambda line, x: shape(line(x.exp()).tanh(), x)))  # noqa: E731
    assert_unchanged(build, step, regions=["block"])


def test_a_region_that_returns_nothing_is_harmless():
    class Silent(Lined):
        def __init__(self):
            super().__init__(lambda line, x: line(x.exp()).tanh())
            self.seen = []

        def forward(self, x):
            self.seen.append(super().forward(x))

    class Model(Only):
        def forward(self, x):
            assert self.block(x) is None
            return self.block.seen.pop()

    assert_unchanged(lambda: Model(Silent()), plain_step, regions=["block"])


def test_keyword_only_calls_with_nested_inputs_keep_every_bit():
    def called(line, *, pair, options, scale=1.0):
        (x, (y, z)) = pair
        return line(x.exp() * y + options["bias"]) * z.exp() * scale

    def step(model, index):
        x, y, z, bias = (batch(10 * index + i).requires_grad_() for i in range(4))
        arguments = {"pair": (x, [y, z]), "options": {"bias": bias, "unused": None}}
        loss = weigh(model(**arguments, scale=0.5))
        loss.backward()
        return loss, x.grad, y.grad, z.grad, bias.grad

    assert_unchanged(lambda: Only(Lined(called)), step, regions=["block"])


def test_many_steps_with_changing_shapes_never_confuse_reused_addresses():
    step = step_on(lambda index: batch(index, (5, 3, 7, 5, 9, 3)[index % 6], 8))
    report = assert_unchanged(stack_of(lambda: Inner(FUNCTIONS["shared by several ops"])), step, steps=18)
    assert len(report.outcomes) == 3 * 4


def test_a_sparse_tensor_in_a_region_is_left_to_autograd():
    def step(model, index):
        x = batch(index).requires_grad_()
        loss = weigh(model(x, torch.eye(5).to_sparse()))
        loss.backward()
        return loss, x.grad

    build = lambda: Only(Lined(lambda line, x, graph: line(torch.sparse.mm(graph, x.exp())).tanh()))  # noqa: E731
    assert_unchanged(build, step, regions=["block"])


def test_a_root_module_can_be_the_region():
    assert_unchanged(lambda: Stack(Block(nn.Tanh())), plain_step, regions=[""])


def test_a_sparse_tensor_that_autograd_saves_is_left_to_autograd():
    def weighted(net, x):
        return net.line(torch.sparse.mm((net.weight * torch.eye(5)).to_sparse(), x.exp())).tanh()

    report = assert_unchanged(
        lambda: Only(Net(weighted, line=nn.Linear(8, 8), weight=nn.Parameter(torch.randn(5, 5)))),
        plain_step,
        regions=["block"],
    )
    assert any("not a plain dense tensor" in why for why in report.obstacles["block"].values())


def test_lazily_conjugated_outputs_are_never_linked_and_keep_every_bit():
    def conjugated(line, x):
        return torch.complex(line(x.real.exp()), x.imag.tanh()).conj()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Lined(conjugated) for _ in range(3))

        def forward(self, x):
            x = torch.complex(x, x)
            for block in self.blocks:
                x = block(x)
            return (x * x.conj()).real

    assert_unchanged(Model, plain_step, regions=["blocks.0", "blocks.1", "blocks.2"], boundaries=(1, 2))
