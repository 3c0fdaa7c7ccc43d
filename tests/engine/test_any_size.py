"""Recipes for sizes at which nobody watched: three recordings tell the others, and what they cannot tell is watched."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
import torch
from torch import nn

import plimsoll
import zoo
from contracts.harness import assert_unchanged, batch, differences, manage, stack_of, train, weigh
from engine.models import Inner, step_on
from long_cases import all_but, some
from plimsoll.artifacts.decision import Engine
from plimsoll.engine import region as region_module
from plimsoll.errors import PlanMismatch, ReplayMismatch

TOKENS = (12, 30, 18, 26, 22, 34, 14, 12, 28)


@pytest.fixture
def recordings(monkeypatch):
    """How often each region was recorded."""
    counted: Counter[str] = Counter()
    record_call = region_module.record_call

    def counting(subject, *rest):
        counted[subject.name] += 1
        return record_call(subject, *rest)

    monkeypatch.setattr(region_module, "record_call", counting)
    return counted


@pytest.fixture
def drifting():
    """An operator that multiplies by a number of its own."""

    class Drift:
        factor = 1.5

        def __call__(self, x):
            return torch.ops.plimsoll_tests.drift(x)

    drift = Drift()
    library = torch.library.Library("plimsoll_tests", "FRAGMENT")
    library.define("drift(Tensor x) -> Tensor")
    library.impl("drift", lambda x: x * drift.factor, "CompositeExplicitAutograd")
    yield drift
    library._destroy()


def causal(x):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    scores = (x @ x.mT) / x.shape[-1] ** 0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ x


def heads(x):
    rows, tokens, width = x.shape
    return x.view(rows, tokens, 4, width // 4).transpose(1, 2).reshape(rows * 4, tokens, width // 4).tanh().view_as(x)


def positions(x):
    steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    return x * torch.cos(steps / 10)[:, None] + steps.pow(2).mean()


FOLLOWS = {
    "elementwise": torch.tanh,
    "dropout": nn.Dropout(0.3),
    "causal attention": causal,
    "heads": heads,
    "positions": positions,
    "a mean by hand": lambda x: x.exp() + x.exp().sum(1, keepdim=True) / x.shape[1],
    "a scale by the root of the length": lambda x: (x * x.shape[1] ** -0.5).sin() * x.exp(),
    "all but the last": lambda x: torch.cat([x[:, 1:].exp(), x[:, : x.shape[1] - 1].sin()[:, -1:]], 1),
    "every second token": lambda x: x[:, ::2].exp().repeat_interleave(2, 1)[:, : x.shape[1]],
    "in place": lambda x: torch.zeros_like(x).add_(x.sin()).mul_(x.cos()).exp(),
    "square matrices": lambda x: (x @ x.mT).softmax(-1).pow(2) @ x.exp(),
}
IS_WATCHED = {
    "the first third": lambda x: torch.cat([x[:, : x.shape[1] // 3].exp(), x[:, x.shape[1] // 3 :].sin()], 1),
    "padded to eights": lambda x: nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8)).exp().sin()[:, : x.shape[1]],
    "long ones otherwise": lambda x: x.exp() if x.shape[1] > 20 else x.sin().exp(),
    "rows by the logarithm": lambda x: x.exp() * x.shape[1].bit_length(),
}


def step_of(sizes):
    return step_on(lambda index: batch(index, *sizes[index], 8))


def assert_right(does, sizes, engine=None, count=3):
    """Gradients at all of these sizes are those of the model alone."""
    assert_unchanged(stack_of(lambda: Inner(does), count), step_of(sizes), steps=len(sizes), engine=engine)


@pytest.mark.parametrize("kind", some([*FOLLOWS, *IS_WATCHED], 5))
def test_every_size_gives_the_gradients_of_the_model_alone(kind, recordings):
    assert_right({**FOLLOWS, **IS_WATCHED}[kind], [(2, tokens) for tokens in TOKENS], Engine.RECIPE)
    assert set(recordings) == {"blocks.0", "blocks.1", "blocks.2"}
    assert kind in IS_WATCHED or set(recordings.values()) == {3}


def test_several_sizes_that_vary_on_their_own_need_no_more_recordings(recordings):
    draw = random.Random(3)
    sizes = [(draw.randrange(2, 9), draw.randrange(5, 40)) for _ in range(12)]
    assert_right(causal, sizes)
    assert max(recordings.values()) <= 4


def test_a_size_of_one_is_watched_as_it_selects_other_kernels(recordings):
    sizes = [(2, 12), (2, 20), (2, 17), (2, 1), (1, 15), (1, 1), (2, 1)]
    assert_right(causal, sizes)
    assert set(recordings.values()) == {6}


def lengths(name, draw):
    """A batch of a random size for a model of the zoo."""
    if name == "t5":
        inputs, labels = (zoo.words(2, draw.randrange(4, 30))["input_ids"] for _ in range(2))
        return {"input_ids": inputs, "labels": labels}
    if name == "vit":
        return {**zoo.pictures(2, 4 * draw.randrange(3, 8)), "interpolate_pos_encoding": True}
    if name in ("resnet", "convnext"):
        return zoo.pictures(2, 16 * draw.randrange(2, 6))
    ids = zoo.words(3, draw.randrange(8, 60))
    padding = torch.ones_like(ids["input_ids"])
    padding[0, -3:] = 0
    return {**ids, "attention_mask": padding}


@pytest.mark.parametrize(
    "name", all_but(["llama", "gpt2", "bert", "t5", "vit", "resnet", "convnext", "mixtral"], "llama", "resnet")
)
def test_real_architectures_at_random_sizes_keep_every_bit(name, recordings):
    """Experts get other numbers of tokens in every step, which is data: they are watched."""
    draw = random.Random(name)
    model = zoo.build(name)
    plan = plimsoll.plan(model, zoo.batch(name), strategy="full")
    recordings.clear()
    batches = [lengths(name, draw) for _ in range(12)]

    def step(model, index):
        loss = model(**batches[index]).loss
        loss.backward()
        return loss

    with plimsoll.apply(model, plan) as handle:
        found = train(model, step, len(batches))
        assert handle.faults == ()
    assert differences(train(zoo.build(name), step, len(batches)), found) == []
    assert name == "mixtral" or max(recordings.values()) <= 3


@pytest.mark.long
def test_another_plan_is_served_by_what_was_recorded_under_the_first(recordings):
    model = zoo.build("llama")
    sample = zoo.batch("llama")
    plans = {s: plimsoll.plan(model, sample, strategy=s) for s in ("full", "none", "selective:mlp")}
    order = ["full", "none", "selective:mlp", "full", "none", "selective:mlp"]
    recordings.clear()
    with plimsoll.apply(model, plans["full"]) as handle:

        def step(model, index):
            handle.switch(plans[order[index]])
            loss = model(**sample).loss
            loss.backward()
            return loss

        found = train(model, step, len(order))
        handle.switch(plans["none"])
        assert handle.regions == {}
        assert not any("forward" in module.__dict__ for module in model.modules())
        handle.switch(msgspec.structs.replace(plans["full"], link="disk"))  # opens the link, which stays
        handle.switch(plans["none"])
        with pytest.raises(PlanMismatch, match="link"):
            handle.switch(msgspec.structs.replace(plans["full"], link="host"))
        with pytest.raises(PlanMismatch, match="another model"):
            handle.switch(msgspec.structs.replace(plans["full"], fingerprint="of another"))
    assert set(recordings.values()) == {1}
    assert not any("forward" in module.__dict__ for module in model.modules())

    def plain(model, index):
        loss = model(**sample).loss
        loss.backward()
        return loss

    assert differences(train(zoo.build("llama"), plain, len(order)), found) == []


def test_after_one_wrong_recipe_the_region_keeps_everything_at_every_size(recordings, drifting):
    """A number that no torch call shows has changed before backward: the step stops, and no later size has a recipe."""
    torch.manual_seed(0)
    model = stack_of(lambda: Inner(lambda x: (x + drifting(x.detach())).sin()), count=1)()
    sizes = [(2, tokens) for tokens in (12, 30, 18, 26, 22, 34)]
    step = step_of(sizes)
    with manage(model) as handle:
        train(model, step, 4)
        assert set(recordings.values()) == {3}
        loss = weigh(model(batch(4, *sizes[4], 8)))
        drifting.factor = 2.0
        with pytest.raises(ReplayMismatch):
            loss.backward()
        model.zero_grad()
        for index in (5, 0):  # a new size, and one with a recipe
            step(model, index)
        assert [outcome.engine for outcome in handle.outcomes()].count(Engine.KEEP) == 2
    assert set(recordings.values()) == {3}


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    """Its second half is another above 20 tokens."""
    weights = torch.ones(x.shape[1], 1)
    if x.shape[1] > 20:
        weights[20:] = 0.5
    return x * weights


def test_code_whose_torch_calls_are_not_seen_is_watched_at_every_size(recordings):
    sizes = [(2, tokens) for tokens in (10, 16, 20, 21, 22, 30)]
    assert_right(lambda x: scripted(x).exp(), sizes, count=1)
    assert set(recordings.values()) == {len(sizes)}
