"""Random ops inside regions: rebuilt from the generator's state, which afterwards is what it would have been."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from contracts.harness import Block, Stack, assert_unchanged, batch, plain_step, stack_of, weigh
from engine.models import Inner
from plimsoll.artifacts.decision import Engine


def dropout_in_several_places(x):
    return F.dropout(F.dropout(x, 0.2).exp(), 0.3) * F.dropout(x, 0.1)


def two_draws_without_a_saved_tensor_between(x):
    noise = torch.rand_like(x) + torch.randn_like(x)
    return (x + noise).exp() * noise.sigmoid()


def alpha_and_feature_dropout(x):
    return F.alpha_dropout(x, 0.2, training=True) * F.dropout1d(x[None], 0.3)[0]


def randomised_leaky_relu(x):
    return F.rrelu(x, 0.1, 0.4, training=True) * x.exp()


def randomised_leaky_relu_in_place(x):
    return F.rrelu(x * 2, 0.1, 0.4, training=True, inplace=True) * x.exp()


def seeds_inside(x):
    y = F.dropout(x, 0.3)
    torch.manual_seed(7)
    return F.dropout(y.exp(), 0.3) * torch.rand_like(y)


def attention_dropout(x):
    q = x.view(1, 2, -1, 16)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).reshape(x.shape)


def bernoulli_and_multinomial(x):
    x = x.nan_to_num(0.0).clamp(-3, 3)
    mask = torch.bernoulli(x.sigmoid())
    picked = torch.multinomial(x.softmax(-1), 4)
    return x * mask + x.gather(-1, picked).exp().sum(-1, keepdim=True)


def gumbel(x):
    return F.gumbel_softmax(x, tau=0.7) * x


def permuted(x):
    return x[torch.randperm(x.shape[0])].exp() * x


FUNCTIONS = [
    dropout_in_several_places,
    two_draws_without_a_saved_tensor_between,
    alpha_and_feature_dropout,
    randomised_leaky_relu,
    randomised_leaky_relu_in_place,
    seeds_inside,
    attention_dropout,
    bernoulli_and_multinomial,
    gumbel,
    permuted,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_random_ops_are_rebuilt_bit_for_bit_and_the_generator_moves_as_it_would(function):
    report = assert_unchanged(stack_of(lambda: Inner(function)), plain_step)
    assert report.dropped_share > 0.95 or function is not dropout_in_several_places, report.obstacles


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_random_ops_survive_a_second_backward_and_draws_in_between(function):
    def step(model, index):
        loss = weigh(model(batch(index)))
        torch.rand(3)
        loss.backward(retain_graph=True)
        torch.rand(3)
        loss.backward()
        return loss, torch.rand(2)

    assert_unchanged(stack_of(lambda: Inner(function), count=2), step, boundaries=(1,))


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

    assert_unchanged(lambda: Stack(*(Skipping(nn.Tanh()) for _ in range(3))), plain_step, steps=6, engine=Engine.RERUN)
