"""Modules and parameters that are used more than once."""

from __future__ import annotations

import torch
from torch import nn

from contracts.harness import Block, Stack, assert_unchanged, batch, plain_step, weigh


class Looped(Stack):
    """Runs its blocks twice."""

    def forward(self, x):
        x = self.entrance(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def looped():
    return Looped(Block(nn.Dropout(0.2)), Block(nn.Tanh()))


def test_blocks_that_run_twice_per_forward_keep_every_bit():
    assert_unchanged(looped, plain_step)
    assert_unchanged(looped, plain_step, boundaries=(1,))


def test_one_block_under_several_names_keeps_every_bit():
    def build():
        block = Block(nn.Dropout(0.2))
        return Stack(block, Block(nn.Tanh()), block)

    assert_unchanged(build, plain_step)
    assert_unchanged(build, plain_step, boundaries=(1,))


def test_parameters_tied_between_blocks_keep_every_bit():
    def build():
        model = Stack(Block(nn.Tanh()), Block(nn.Tanh()))
        model.blocks[1].up.weight = model.blocks[0].up.weight
        model.blocks[1].norm = model.blocks[0].norm
        return model

    assert_unchanged(build, plain_step)


def test_parameters_tied_inside_a_block_keep_every_bit():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.second = nn.Linear(32, 32)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).exp().tanh()) * torch.nn.functional.linear(x, self.first.weight.t())

    assert_unchanged(lambda: Stack(Block(Tied()), Block(Tied())), plain_step)


def test_a_region_that_is_called_with_and_without_a_managed_caller_keeps_every_bit():
    """A block inside another managed block is left to the outer one; called alone it is managed itself."""

    def build():
        inner = Block(nn.Tanh())
        outer = Block(nn.Identity())
        outer.inner = nn.Sequential(nn.Linear(32, 16), inner, nn.Linear(16, 32))
        return Stack(outer, inner)

    assert_unchanged(build, plain_step, regions=["blocks.0", "blocks.0.inner.1"])


def test_blocks_called_without_their_model_keep_every_bit():
    def step(model, index):
        x = batch(index, 5, 16).requires_grad_()
        loss = weigh(model.blocks[1](model.blocks[0](x)))
        loss.backward()
        return loss, x.grad

    assert_unchanged(lambda: Stack(Block(nn.Tanh()), Block(nn.Tanh())), step)
    assert_unchanged(lambda: Stack(Block(nn.Tanh()), Block(nn.Tanh())), step, boundaries=(1,))
