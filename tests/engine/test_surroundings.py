"""What users do around a training step: caches, frozen parts, anomaly detection, removal while a graph is in flight."""

from __future__ import annotations

import contextlib
import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from contracts.harness import (
    Block,
    Stack,
    assert_unchanged,
    batch,
    differences,
    manage,
    plain_step,
    stack_of,
    train,
    weigh,
)
from engine.models import Inner, Through, step_on
from steps import Net


class Cache:
    """An opaque argument that a block appends to, as key-value caches of language models are."""

    def __init__(self):
        self.rows = []


class Remembering(Block):
    def forward(self, x, cache):
        cache.rows.append(x)
        return super().forward(torch.cat(cache.rows[-2:])[: len(x)])


def test_a_region_that_writes_to_an_object_of_its_caller_runs_once():
    def cached(blocks, x):
        for block in blocks:
            cache = Cache()
            x = block(x, cache)
            assert len(cache.rows) == 1
        return x

    build = lambda: Through(Remembering(nn.Tanh()), Remembering(nn.Tanh()), way=cached)  # noqa: E731
    assert_unchanged(build, step_on(lambda index: batch(index, index + 2, 8)), steps=6)


def test_a_region_that_counts_its_calls_in_an_attribute_runs_once():
    class Counting(Block):
        def __init__(self):
            super().__init__(nn.Tanh())
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x * (1 + 0.01 * self.calls))

    def step(model, index):
        return plain_step(model, index), torch.tensor([block.calls for block in model.blocks])

    assert_unchanged(lambda: Stack(Counting(), Counting()), step, steps=6)


@pytest.mark.filterwarnings("ignore")
def test_tensors_outside_that_were_one_while_recording_are_told_apart_later():
    def listed(net, x):
        first, second = net.scales
        return net.line((x * first).exp().tanh()) * (x * second).sigmoid().sin()

    def step(model, index):
        if index == 1:
            for block in model.blocks:
                block.inner.scales = [torch.linspace(0, 1, 32), torch.linspace(1, 2, 32)]
        return plain_step(model, index)

    assert_unchanged(
        stack_of(lambda: Net(listed, line=nn.Linear(32, 32), scales=[torch.linspace(0, 1, 32)] * 2)),
        step,
        steps=5,
        engine=None,
    )


@pytest.mark.parametrize("boundaries", [(), (1, 2, 3)])
def test_frozen_first_blocks_keep_every_bit(boundaries):
    def build():
        model = stack_of(lambda: nn.Dropout(0.2), count=4)()
        for part in (model.entrance, model.blocks[0], model.blocks[1]):
            part.requires_grad_(False)
        return model

    assert_unchanged(build, plain_step, boundaries=boundaries)


def test_removing_the_plan_while_a_graph_is_in_flight_leaves_backward_right():
    torch.manual_seed(0)
    plain = stack_of(lambda: nn.Dropout(0.2))()
    model = copy.deepcopy(plain)
    handle = manage(model, boundaries=(1,))

    def step(subject, index):
        loss = weigh(subject(batch(index)))
        if subject is model and index == 1:
            handle.remove()
        loss.backward()
        return loss

    assert differences(train(plain, step, 3), train(model, step, 3)) == []


def test_threads_that_call_one_model_at_once_get_their_own_gradients():
    """Their first calls overlap, and so do those that recipes serve."""
    torch.manual_seed(0)
    model = stack_of(nn.Tanh)()
    inputs = [batch(index) for index in range(4)]
    parameters = list(model.parameters())

    def gradients(x):
        return torch.autograd.grad(weigh(model(x)), parameters)

    expected = [gradients(x) for x in inputs]
    with manage(model, boundaries=(1, 2)), ThreadPoolExecutor(len(inputs)) as pool:
        for _ in range(6):
            for one, other in zip(expected, pool.map(gradients, inputs), strict=True):
                assert all(map(torch.equal, one, other))


@contextlib.contextmanager
def deterministic(index):
    """New memory is filled, too."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [lambda index: torch.autograd.set_detect_anomaly(index != 1), deterministic])
def test_anomaly_detection_and_deterministic_mode_change_nothing(mode):
    def step(model, index):
        with mode(index):
            return plain_step(model, index)

    assert_unchanged(stack_of(lambda: nn.Dropout(0.2)), step)


def test_two_forwards_before_backward_in_batch_norm_keep_every_bit():
    def build():
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2)))

    def step(model, index):
        loss = weigh(model(batch(index)), model(batch(index + 50)))
        loss.backward()
        return loss

    assert_unchanged(build, step)


def test_hooks_on_modules_and_tensors_inside_a_region_see_and_change_what_they_would():
    seen = {}

    def build():
        model = stack_of(nn.Tanh)()
        for block in model.blocks:
            block.up.register_forward_hook(lambda module, args, output: output * 1.5)
            block.inner.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 0.5,))
            block.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        return model

    def step(model, index):
        x = batch(index).requires_grad_()
        y = model.entrance(x)
        y.register_hook(lambda gradient: seen.__setitem__(id(model), gradient.clone()))
        for block in model.blocks:
            y = block(y)
        loss = weigh(model.head(y))
        loss.backward()
        return loss, x.grad, seen[id(model)]

    assert_unchanged(build, step)


def test_spectral_and_weight_normalised_layers_keep_every_bit():
    def build():
        model = stack_of(nn.Tanh)()
        for block in model.blocks:
            nn.utils.parametrizations.weight_norm(block.up)
            nn.utils.parametrizations.spectral_norm(block.down)
        return model

    assert_unchanged(build, plain_step, engine=None)


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_layers_of_torch_itself_keep_every_bit(layer):
    def way(blocks, x):
        for block in blocks:
            x = block(x, x) if isinstance(block, nn.TransformerDecoderLayer) else block(x)
        return x

    def build():
        return Through(*(layer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)), way=way)

    report = assert_unchanged(build, step_on(lambda index: batch(index, 2, 5, 8)))
    assert report.dropped_share > 0.9, report.obstacles


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_keep_every_bit(kind):
    class Recurrent(kind):
        def forward(self, x):
            return super().forward(x[None])[0][0]

    assert_unchanged(stack_of(lambda: Recurrent(32, 32, batch_first=True)), plain_step, engine=None)


def test_a_profile_and_marks_in_it_change_nothing_about_a_call():
    def marked(x):
        with torch.profiler.record_function("activation"):
            return x.tanh()

    model = stack_of(lambda: Inner(marked))()
    with manage(model), warnings.catch_warnings():
        warnings.simplefilter("error")  # a call that is not the recorded one warns
        train(model, plain_step, 3)
        with torch.profiler.profile():
            train(model, plain_step, 2)


def test_a_region_that_takes_a_forward_mode_derivative_is_served():
    """Its tangents are zeros without memory, and shapes are looked for on the meta device."""

    def way(net, x):
        out, tangent = torch.func.jvp(lambda x: net.line(net.norm(x)).tanh(), (x,), (torch.ones_like(x),))
        return out + 0.1 * tangent

    build = stack_of(lambda: Net(way, norm=nn.LayerNorm(32), line=nn.Linear(32, 32)))
    assert_unchanged(build, plain_step)
