"""Targets for tests of the command line, as users write them: ``plimsoll plan targets:stack``."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import steps

number = 3


def linear():
    return nn.Linear(2, 2), torch.zeros(1, 2), torch.sum


def wrong():
    return 3


def broken():
    raise OSError("the data set is gone")


def leaves():
    raise SystemExit(3)


def layers():
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    return nn.Sequential(*made), torch.randn(256, 32), steps.mean_square


def without_loss():
    return steps.stack()[:2]


def broken_loss():
    return *steps.stack()[:2], lambda output: output.loss


def refused():
    return steps.stack()[0], torch.ones(2, 31), steps.mean_square


def larger():
    return steps.stack(rows=64)


def checkpointed():
    return steps.CheckpointedStack(), torch.ones(4, 32), steps.mean_square


class Own(steps.Net):
    """The name that explanations show."""


def run_layers(net, x):
    for layer in net.layers:
        x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=net.preserve)
    return x


def own(*, preserve: bool = True):
    """Checkpoints its layers itself; random state may be forgotten."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.GELU()) for _ in range(3))
    return Own(run_layers, layers=layers, preserve=preserve), torch.randn(8, 16), steps.mean_square


def own_forgetful():
    return own(preserve=False)


# Streams of batches -------------------------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))


def batches(count: int = 30) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(4, 8, generator=random) for _ in range(count)]


def stream():
    return small(), batches(), steps.mean_square


def loader():
    data = torch.stack(batches()).flatten(0, 1)
    return small(), torch.utils.data.DataLoader(data, batch_size=4, shuffle=True), steps.mean_square


def once():
    return small(), iter(batches(5)), steps.mean_square


def fixed():
    return small(), batches(1)[0], steps.mean_square


def empty():
    return small(), [], steps.mean_square


def diverging():
    return small(), [*batches(3), torch.full((4, 8), float("nan")), *batches(8)], steps.mean_square


def noisy():
    noise = random.SystemRandom()  # a generator with a state would begin anew in each part of a probe
    return small(), batches(), lambda output: output.square().mean() * noise.uniform(0.5, 1.5)
