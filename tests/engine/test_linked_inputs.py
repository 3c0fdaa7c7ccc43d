"""Dropped boundaries: a region's input is made again by the region before it, and only if it really was its output."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from contracts.harness import Block, Stack, assert_unchanged, batch, manage, plain_step, stack_of, weigh


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


def test_boundaries_are_really_linked():
    torch.manual_seed(0)
    assert links_of(stack_of(count=3)(), boundaries=(0, 1, 2)) == [[False], [True], [True]]


class Between(Stack):
    """Something happens between the blocks."""

    def __init__(self, *blocks, between):
        super().__init__(*blocks)
        self.between = between

    def forward(self, x):
        x = self.entrance(x)
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(x)


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
    def build():
        return Between(Block(nn.Tanh()), Block(nn.Tanh()), Block(nn.Tanh()), between=between)

    torch.manual_seed(0)
    assert links_of(build(), boundaries=(1, 2))[1:] == [[is_linked]] * 2
    assert_unchanged(build, plain_step, boundaries=(1, 2))


def test_an_output_that_is_written_in_place_after_its_consumer_stays_right():
    class Consumer(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(16, 16)

        def forward(self, x):
            return self.line((x + 1).exp().tanh()) + 1

    class Model(Stack):
        def forward(self, x):
            x = self.entrance(x)
            for block in self.blocks:
                y = block(x)
                with torch.no_grad():
                    x.zero_()
                x = y
            return self.head(x)

    assert_unchanged(lambda: Model(*(Consumer() for _ in range(3))), plain_step, boundaries=(1, 2))


def test_a_link_that_is_missing_in_one_step_keeps_that_call_whole():
    class Sometimes(Stack):
        def __init__(self, *blocks):
            super().__init__(*blocks)
            self.step = [0]

        def forward(self, x):
            self.step[0] += 1
            x = self.entrance(x)
            for block in self.blocks:
                x = block(x)
                if self.step[0] == 2:
                    x = x * 1.5
            return self.head(x)

    assert_unchanged(lambda: Sometimes(*(Block(nn.Tanh()) for _ in range(3))), plain_step, steps=4, boundaries=(1, 2))


class TwoOutputs(nn.Module):
    """Returns a dropped and a kept tensor, and one that it was given."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(16, 16)

    def forward(self, x, memory):
        y = self.line(x).sin()
        return y, y.exp().tanh() * memory, memory


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.entrance = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(TwoOutputs() for _ in range(3))

    def forward(self, x):
        x = self.entrance(x)
        memory = x.sigmoid()
        for block in self.blocks:
            x, extra, memory = block(x, memory)
        return x + extra


@pytest.mark.parametrize("kept", [(), ("tanh",), ("sin",), ("exp",), ("addmm", "linear")])
def test_regions_with_several_outputs_are_linked_through_the_right_one(kept):
    names = [f"blocks.{i}" for i in range(3)]
    assert_unchanged(Pairs, plain_step, regions=names, boundaries=(1, 2), kept=kept)


def test_a_boundary_whose_region_drops_nothing_else_keeps_every_bit():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))
            self.line = nn.Linear(16, 16)

        def forward(self, x):
            return x + self.line(x.exp() * self.scale)

    everything = ("exp", "mul", "add", "linear", "mm")
    names = [f"blocks.{i}" for i in range(3)]
    assert_unchanged(
        lambda: Stack(*(Sum() for _ in range(3))),
        plain_step,
        regions=names,
        boundaries=(1, 2),
        kept=everything,
        engine=None,  # nothing is left to drop: the input is not saved either
    )


def test_the_order_of_calls_decides_who_is_linked_not_the_order_of_names():
    class Backwards(Stack):
        def forward(self, x):
            x = self.entrance(x)
            for block in reversed(self.blocks):
                x = block(x)
            return self.head(x)

    assert_unchanged(lambda: Backwards(*(Block(nn.Dropout(0.2)) for _ in range(3))), plain_step, boundaries=(0, 1))


def test_one_output_for_two_regions_is_made_once_and_right():
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.entrance = nn.Linear(8, 16)
            self.blocks = nn.ModuleList(Block(nn.Tanh()) for _ in range(3))

        def forward(self, x):
            x = self.blocks[0](self.entrance(x))
            return self.blocks[1](x) * self.blocks[2](x)

    assert_unchanged(Forked, plain_step, boundaries=(1, 2))
