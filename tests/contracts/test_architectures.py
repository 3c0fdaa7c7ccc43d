"""Real architectures, small: everything that can be dropped is dropped, and no bit changes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import zoo
from contracts.harness import Report, kernels_for, manage, train, unexplained
from plimsoll.artifacts.decision import Engine

LEAST_SHARE = {"llama": 0.9, "gpt2": 0.9, "vit": 0.9}
ARCHITECTURES = ("llama", "gpt2", "vit", "bert", "t5", "clip", "resnet", "mixtral")


def step(name: str, device: torch.device, *, autocast: bool = False):
    def run(model: nn.Module, index: int):
        batch = {key: each.to(device) if torch.is_tensor(each) else each for key, each in zoo.batch(name).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        return loss

    return run


def managed_run(name: str, device: torch.device, *, autocast: bool = False, **settings) -> Report:
    plain, twin, model = (zoo.build(name).to(device) for _ in range(3))
    run = step(name, device, autocast=autocast)
    with kernels_for(name):
        expected = train(plain, run, 2)
        again = expected if device.type == "cpu" else train(twin, run, 2)
        with warnings.catch_warnings(), manage(model, **settings) as handle:
            warnings.simplefilter("ignore")
            found = train(model, run, 2)
            report = Report(handle.outcomes(), handle.obstacles())
    assert unexplained(expected, again, found) == []
    return report


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_everything_droppable_is_dropped_and_every_bit_stays(name, device):
    report = managed_run(name, device)
    if name == "mixtral":
        assert Engine.RECIPE in report.engines
        return
    assert report.engines == {Engine.RECIPE}
    share = report.dropped_share
    print(f"{name}: {share:.1%} of the activations that blocks save are dropped")
    assert share >= LEAST_SHARE.get(name, 0.8), report.obstacles


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_dropped_boundaries_keep_every_bit(name, device):
    managed_run(name, device, boundaries=(1, 2, 3))


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_mixed_precision_keeps_every_bit(name, device):
    assert managed_run(name, device, autocast=True).dropped_share >= 0.9
