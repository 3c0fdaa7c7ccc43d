"""Real architectures, small: everything that can be dropped is dropped, and no bit changes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import zoo
from contracts.harness import Report, differences, manage, train
from plimsoll.artifacts.decision import Engine

LEAST_SHARE = {"llama": 0.9, "gpt2": 0.9, "vit": 0.9}
ARCHITECTURES = ("llama", "gpt2", "vit", "bert", "t5", "clip", "resnet", "mixtral")


def step(name: str, *, autocast: bool = False):
    def run(model: nn.Module, index: int):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**zoo.batch(name)).loss
        loss.backward()
        return loss

    return run


def managed_run(name: str, *, autocast: bool = False, **settings) -> Report:
    plain = zoo.build(name)
    model = copy.deepcopy(plain)
    expected = train(plain, step(name, autocast=autocast), 2)
    with warnings.catch_warnings(), manage(model, **settings) as handle:
        warnings.simplefilter("ignore")
        found = train(model, step(name, autocast=autocast), 2)
        report = Report(handle.outcomes(), handle.obstacles())
    assert differences(expected, found) == []
    return report


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_everything_droppable_is_dropped_and_every_bit_stays(name):
    report = managed_run(name)
    if name == "mixtral":
        assert Engine.RECIPE in report.engines or Engine.RERUN in report.engines
        return
    assert report.engines == {Engine.RECIPE}
    share = report.dropped_share
    print(f"{name}: {share:.1%} of the activations that blocks save are dropped")
    assert share >= LEAST_SHARE.get(name, 0.8), report.obstacles


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_dropped_boundaries_keep_every_bit(name):
    managed_run(name, boundaries=(1, 2, 3))


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_mixed_precision_keeps_every_bit(name):
    assert managed_run(name, autocast=True).dropped_share >= 0.9
