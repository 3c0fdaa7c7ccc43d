"""Dropped boundaries: a region's input is made again by the region before it, and only if it really was its output.
Modules and parameters that are used more than once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plimsoll
from contracts.harness import Block, Stack, assert_unchanged, batch, manage, plain_step, stack_of, weigh
from engine.models import Lined, Through, tied
from steps import mean_square


def links_of(model, *, boundaries):
    """Whether each region's input was linked, after some steps."""
    with manage(model, boundaries=boundaries) as handle:
        for index in range(2):
            plain_step(model, index)
        return [
            [
                service.program is not None and service.program.plan.choice.link is not None
                for service in r.services.values()
            ]
            for r in handle.regions.values()
        ]


@pytest.mark.parametrize("boundaries", [(1,), (1, 2), (1, 2, 3), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("kept", [(), ("gelu",), ("down",), ("norm", "inner")])
def test_chains_of_dropped_boundaries_keep_every_bit(boundaries, kept):
    def step(model, index):
        loss = weigh(model(batch(index)))
        loss.backward(retain_graph=index == 1)
        if index == 1:
            loss.backward()
        return loss

    assert_unchanged(stack_of(lambda: nn.Dropout(0.3), count=4), step, boundaries=boundaries, kept=kept)


def stack_with(way, block=lambda: Block(nn.Tanh())):
    """How to build three blocks that are gone through in this way."""
    return lambda: Through(*(block() for _ in range(3)), way=way)


def test_boundaries_are_really_linked():
    torch.manual_seed(0)
    assert links_of(stack_of(count=3)(), boundaries=(0, 1, 2)) == [[False], [True], [True]]


@pytest.mark.parametrize(
    ("between", "is_linked"),
    [
        (lambda x: x * 2, False),
        (lambda x: x.view(5, 16), True),
        (lambda x: x.t().t(), True),
        (lambda x: x[:, :], True),
        (lambda x: x.flip(0), False),
        (lambda x: x[1:], False),
        (lambda x: x.mul_(2), False),
    ],
    ids=["scaled", "same view", "turned twice", "sliced whole", "flipped", "shortened", "written in place"],
)
def test_only_the_very_output_is_linked(between, is_linked):
    def way(blocks, x):
        for block in blocks:
            x = between(block(x))
        return x

    build = stack_with(way)
    torch.manual_seed(0)
    assert links_of(build(), boundaries=(1, 2))[1:] == [[is_linked]] * 2
    assert_unchanged(build, plain_step, boundaries=(1, 2))


def test_an_output_that_is_written_in_place_after_its_consumer_stays_right():
    def consumer():
        return Lined(lambda line, x: line((x + 1).exp().tanh()) + 1, width=16)

    def way(blocks, x):
        for block in blocks:
            y = block(x)
            with torch.no_grad():
                x.zero_()
            x = y
        return x

    assert_unchanged(stack_with(way, consumer), plain_step, boundaries=(1, 2))


def test_a_link_that_is_missing_in_one_step_keeps_that_call_whole():
    factor = [1.0]

    def way(blocks, x):
        for block in blocks:
            x = block(x)
            if factor[0] != 1.0:
                x = x * factor[0]
        return x

    def step(model, index):
        factor[0] = 1.5 if index == 1 else 1.0
        return plain_step(model, index)

    assert_unchanged(stack_with(way), step, steps=4, boundaries=(1, 2))


@pytest.mark.parametrize("kept", [(), ("tanh",), ("sin",), ("exp",), ("addmm", "linear")])
def test_regions_with_several_outputs_are_linked_through_the_right_one(kept):
    """Each returns a dropped and a kept tensor, and one that it was given."""

    def two_outputs(line, x, memory):
        y = line(x).sin()
        return y, y.exp().tanh() * memory, memory

    def way(blocks, x):
        memory = x.sigmoid()
        for block in blocks:
            x, extra, memory = block(x, memory)
        return x + extra

    build = stack_with(way, lambda: Lined(two_outputs, width=16))
    assert_unchanged(build, plain_step, regions=[f"blocks.{i}" for i in range(3)], boundaries=(1, 2), kept=kept)


def test_a_boundary_whose_region_drops_nothing_else_keeps_every_bit():
    def summed(line, x):
        return x + line(x.exp() * line.bias.sigmoid())

    everything = ("exp", "mul", "add", "linear", "mm", "sigmoid")
    names = [f"blocks.{i}" for i in range(3)]
    assert_unchanged(
        lambda: Stack(*(Lined(summed, width=16) for _ in range(3))),
        plain_step,
        regions=names,
        boundaries=(1, 2),
        kept=everything,
        engine=None,  # nothing is left to drop: the input is not saved either
    )


def test_the_order_of_calls_decides_who_is_linked_not_the_order_of_names():
    def backwards(blocks, x):
        for block in reversed(blocks):
            x = block(x)
        return x

    assert_unchanged(stack_with(backwards, lambda: Block(nn.Dropout(0.2))), plain_step, boundaries=(0, 1))


def test_one_output_for_two_regions_is_made_once_and_right():
    def forked(blocks, x):
        x = blocks[0](x)
        return blocks[1](x) * blocks[2](x)

    assert_unchanged(stack_with(forked), plain_step, boundaries=(1, 2))


# Modules and parameters that are used more than once.


def looped(blocks, x):
    for block in (*blocks, *blocks):
        x = block(x)
    return x


@pytest.mark.parametrize("boundaries", [(), (1,)])
def test_blocks_that_run_twice_per_forward_keep_every_bit(boundaries):
    build = lambda: Through(Block(nn.Dropout(0.2)), Block(nn.Tanh()), way=looped)  # noqa: E731
    assert_unchanged(build, plain_step, boundaries=boundaries)


@pytest.mark.parametrize("boundaries", [(), (1,)])
def test_one_block_under_several_names_keeps_every_bit(boundaries):
    def build():
        block = Block(nn.Dropout(0.2))
        return Stack(block, Block(nn.Tanh()), block)

    assert_unchanged(build, plain_step, boundaries=boundaries)


def test_parameters_tied_between_blocks_or_inside_a_block_keep_every_bit():
    def build():
        model = Stack(Block(nn.Tanh()), Block(nn.Tanh()))
        model.blocks[1].up.weight = model.blocks[0].up.weight
        model.blocks[1].norm = model.blocks[0].norm
        return model

    assert_unchanged(build, plain_step)
    assert_unchanged(stack_of(tied, count=2), plain_step)


def test_a_region_that_is_called_with_and_without_a_managed_caller_keeps_every_bit():
    """A block inside another managed block is left to the outer one; called alone it is managed itself."""

    def build():
        inner = Block(nn.Tanh())
        outer = Block(nn.Identity())
        outer.inner = nn.Sequential(nn.Linear(32, 16), inner, nn.Linear(16, 32))
        return Stack(outer, inner)

    assert_unchanged(build, plain_step, regions=["blocks.0", "blocks.0.inner.1"])


@pytest.mark.parametrize("boundaries", [(), (1,)])
def test_blocks_called_without_their_model_keep_every_bit(boundaries):
    def step(model, index):
        x = batch(index, 5, 16).requires_grad_()
        loss = weigh(model.blocks[1](model.blocks[0](x)))
        loss.backward()
        return loss, x.grad

    assert_unchanged(stack_of(nn.Tanh, count=2), step, boundaries=boundaries)


class Residual(nn.Module):
    """A block that may be skipped, as those of pruned models."""

    def __init__(self, *, is_skipped: bool) -> None:
        super().__init__()
        self.up, self.down, self.is_skipped = nn.Linear(64, 64), nn.Linear(64, 64), is_skipped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_skipped else x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize(
    ("skipped", "named"),
    [
        (-1, {"strategy": "every:2", "overrides": ["0::tanh=compress:int8"]}),
        (1, {"strategy": "hybrid:1,2"}),
    ],
    ids=["override", "skipped block"],
)
def test_an_input_that_is_rebuilt_from_a_lossy_value_is_not_taken_for_wrong(skipped, named):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Residual(is_skipped=place == skipped) for place in range(4))), torch.randn(256, 64)
    plan = plimsoll.plan(model, x, loss=mean_square, allow="recompute,compress", max_error=0.5, **named)
    assert any(region.is_boundary_dropped and region.is_input_lossy for region in plan.regions)
    with plimsoll.apply(model, plan):
        for _ in range(3):
            mean_square(model(x)).backward()
