"""Normalisation: what a region writes to its buffers happens once, whatever is recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from contracts.harness import assert_unchanged, batch, plain_step
from engine.models import Only, step_on
from plimsoll.artifacts.decision import Engine
from steps import Net


def residual(norm):
    way = lambda net, x: x + net.second(torch.relu(net.norm(net.first(x))))  # noqa: E731
    return Net(way, first=nn.Conv2d(4, 8, 3, padding=1, bias=False), norm=norm(8), second=nn.Conv2d(8, 4, 1))


def network(norm):
    return lambda: nn.Sequential(*(residual(norm) for _ in range(2)))


def images(model, index, size=6, backwards=1):
    return step_on(lambda index: batch(index, 3, 4, size, size), backwards=backwards)(model, index)


NORMS = {
    "batch": nn.BatchNorm2d,
    "batch without statistics": lambda c: nn.BatchNorm2d(c, track_running_stats=False),
    "batch without parameters": lambda c: nn.BatchNorm2d(c, affine=False),
    "batch with cumulative average": lambda c: nn.BatchNorm2d(c, momentum=None),
    "group": lambda c: nn.GroupNorm(2, c),
    "instance": nn.InstanceNorm2d,
    "instance with statistics": lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True),
    "local response": lambda c: nn.LocalResponseNorm(2),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
def test_training_keeps_every_bit_of_gradients_and_statistics(norm):
    engine = None if norm is NORMS["batch with cumulative average"] else Engine.RECIPE
    report = assert_unchanged(network(norm), images, engine=engine)
    if engine is Engine.RECIPE and norm is not NORMS["instance with statistics"]:
        assert report.dropped_share > 0.9, report.obstacles


def evaluated(model, index):
    model.eval()
    return images(model, index)


def twice_backward(model, index):
    return images(model, index, backwards=2)


@pytest.mark.parametrize("step", [evaluated, twice_backward])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
def test_evaluation_mode_with_gradients_and_a_second_backward_keep_every_bit_and_move_statistics_once(norm, step):
    assert_unchanged(
        network(norm), step, engine=None if norm is NORMS["batch with cumulative average"] else Engine.RECIPE
    )


def test_statistics_move_once_when_shapes_never_stop_changing():
    assert_unchanged(network(nn.BatchNorm2d), lambda model, index: images(model, index, size=4 + index), steps=11)


def test_statistics_move_once_when_control_flow_changes():
    def branching(net, x):
        net.switch[0] += 1
        y = net.inner(x)
        return y.exp().tanh() if net.switch[0] % 2 else y

    build = lambda: nn.Sequential(*(Net(branching, inner=residual(nn.BatchNorm2d), switch=[0]) for _ in range(2)))  # noqa: E731
    assert_unchanged(build, images, steps=10)


def test_a_module_that_reads_the_statistics_that_it_updates_stays_right():
    def reading(net, x):
        early = (x + net.norm.running_mean).exp().tanh()
        y = net.norm(x)
        return net.line(early * (y - net.norm.running_var).exp().sigmoid())

    assert_unchanged(
        lambda: Only(Net(reading, line=nn.Linear(8, 8), norm=nn.BatchNorm1d(8))),
        plain_step,
        regions=["block"],
        engine=None,
    )
