"""Random ops inside regions: rebuilt from the generator's state, which afterwards is what it would have been."""

from __future__ import annotations

import torch
from torch import nn

from contracts.harness import Block, Stack, assert_unchanged, plain_step, stack_of


def test_a_generator_of_the_user_is_never_drawn_from_twice():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.seed = torch.Generator()
            self.line = nn.Linear(32, 32)

        def forward(self, x):
            noise = torch.rand(x.shape, generator=self.seed)
            return self.line((x * noise).exp().tanh()) * torch.empty_like(x).uniform_(generator=self.seed)

        def __deepcopy__(self, memo):
            fresh = Own()
            fresh.load_state_dict(self.state_dict())
            fresh.seed.set_state(self.seed.get_state())
            return fresh

    def step(model, index):
        loss = plain_step(model, index)
        return loss, *(block.inner.seed.get_state() for block in model.blocks)

    report = assert_unchanged(stack_of(Own), step)
    assert any("generator" in why for found in report.obstacles.values() for why in found.values())


def test_a_dropped_path_that_is_skipped_at_random_stays_right():
    class Skipping(Block):
        def forward(self, x):
            return x if torch.rand(()) < 0.5 else super().forward(x)

    assert_unchanged(lambda: Stack(*(Skipping(nn.Tanh()) for _ in range(3))), plain_step, steps=6)
