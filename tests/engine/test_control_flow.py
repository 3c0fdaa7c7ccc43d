"""Calls that are not what was recorded: guards notice, sentinels catch what guards cannot, the result is always right."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
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
from engine.models import Inner, Wrapped, scaled, step_on
from long_cases import some
from plimsoll.artifacts.decision import Engine
from plimsoll.engine import region
from plimsoll.errors import ReplayMismatch
from steps import Net


class Experts(nn.Module):
    """Routes rows to experts with shapes that depend on data, without reading a value on the host."""

    def __init__(self, width=32):
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        choice = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.nonzero(choice == index, as_tuple=True)[0]
            out = out.index_add(0, rows, expert(x[rows]).tanh())
        return out * self.router(x).softmax(-1).amax(-1, keepdim=True)


class ListedExperts(Experts):
    """The same, with sizes that leave through ``tolist``."""

    def forward(self, x):
        order = self.router(x).argmax(-1)
        counts = torch.bincount(order, minlength=3).tolist()
        rows = order.argsort(stable=True)
        parts = x[rows].split(counts)
        made = torch.cat([expert(part).tanh() for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(x).index_copy(0, rows, made)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", some([Experts, ListedExperts], 1))
def test_shapes_that_depend_on_data_stay_right(kind):
    assert_unchanged(stack_of(kind), step_on(lambda index: batch(index, 9, 8)), steps=7)


def branch(x):
    if x.mean().item() > 0:
        return x.exp().tanh() * x
    return x.sigmoid() * x * 2


def branch_through_numpy(x):
    return x.exp().tanh() if x.detach().numpy().mean() > 0 else x.sigmoid() * x


def test_a_call_that_ends_before_the_recorded_ones_is_said_to_have_made_fewer_calls():
    returns_early: list[bool] = []

    def way(x):
        x = x.exp().tanh()
        return x if returns_early else x.sigmoid() * x

    model = Wrapped(Inner(way))
    with warnings.catch_warnings(record=True) as caught, manage(model, ["block"]):
        warnings.simplefilter("always")
        train(model, plain_step, 3)
        returns_early.append(True)
        train(model, plain_step, 1)
    (said,) = (str(warning.message) for warning in caught)
    assert "made fewer torch calls than every recorded call" in said


@pytest.mark.parametrize("function", [branch, branch_through_numpy])
def test_a_branch_on_data_has_recipes_for_both_ways(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_unchanged(stack_of(lambda: Inner(function), count=1), plain_step, steps=8)
    assert len([warning for warning in caught if "kept all its activations" in str(warning.message)]) <= 1


def flagged(x):
    if FLAGS["wide"]:
        return x.exp().tanh() * x
    return x.sigmoid().sin()


FLAGS = {"wide": False, "scale": 1.0}


def test_a_global_flag_that_changes_the_ops_is_noticed_by_guards():
    def step(model, index):
        FLAGS["wide"] = index % 3 == 1
        return plain_step(model, index)

    assert_unchanged(stack_of(lambda: Inner(flagged)), step, steps=8, engine=None)


def scheduled(net, x):
    return (x * net.scale).exp().sigmoid() * net.scale


def test_a_float_attribute_that_a_schedule_changes_is_watched_and_stays_right():
    def step(model, index):
        for block in model.blocks:
            block.inner.scale = 1.0 - index * 0.05
        return plain_step(model, index)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no call keeps everything
        assert_unchanged(stack_of(lambda: Net(scheduled, scale=1.0)), step, steps=12)


def closed(x):
    return scaled(x, FLAGS["scale"]).exp().sigmoid() * 2


@pytest.fixture
def _a_scale_of_one():
    FLAGS["scale"] = 1.0
    yield
    FLAGS["scale"] = 1.0


@pytest.mark.usefixtures("_a_scale_of_one")
@pytest.mark.parametrize("boundaries", [(), (1,)])
def test_a_global_constant_that_changes_is_caught_before_the_optimizer(boundaries):
    def later_step(model, index):
        return plain_step(model, index + 2)

    torch.manual_seed(0)
    plain = stack_of(lambda: Inner(closed), count=2)()
    managed = copy.deepcopy(plain)
    expected = train(plain, plain_step, 2)
    with manage(managed, boundaries=boundaries) as handle:
        first = train(managed, plain_step, 2)
        before = {name: parameter.clone() for name, parameter in managed.named_parameters()}
        FLAGS["scale"] = 0.5
        with pytest.raises(ReplayMismatch) as caught:
            plain_step(managed, 2)
        assert "blocks." in caught.value.found
        assert "inner::" in caught.value.found
        assert "op '" in caught.value.why
        assert all(torch.equal(before[name], p) for name, p in managed.named_parameters())
        later = []
        for _ in range(3):
            managed.zero_grad()
            try:
                later = train(managed, later_step, 2)
                break
            except ReplayMismatch:
                continue
        assert Engine.KEEP in {outcome.engine for outcome in handle.outcomes()}
    assert differences(expected, first) == []
    assert differences(train(plain, later_step, 2), later) == []


@pytest.mark.usefixtures("_a_scale_of_one")
def test_thinned_sentinels_still_catch_a_changed_constant_within_their_round():
    torch.manual_seed(0)
    model = stack_of(lambda: Inner(closed), count=1)()
    with manage(model, sentinel_every=3):
        plain_step(model, 0)
        FLAGS["scale"] = 0.5
        with pytest.raises(ReplayMismatch):
            train(model, plain_step, 3)


def test_changing_lengths_and_batch_sizes_record_once_each_and_the_oldest_go(monkeypatch):
    shapes = [(3, 8), (5, 8), (2, 3, 8), (3, 8), (1, 8)]
    build = stack_of(lambda: nn.Dropout(0.2))
    some = step_on(lambda index: batch(index, *shapes[index % len(shapes)]))
    assert len(assert_unchanged(build, some, steps=10, boundaries=(2,)).outcomes) == 3 * 4
    monkeypatch.setattr(region, "MAX_SIGNATURES", 4)
    growing = step_on(lambda index: batch(index, index + 2, 8))
    report = assert_unchanged(build, growing, steps=7, boundaries=(2,))
    assert len(report.outcomes) == 3 * 4


def test_arguments_that_are_python_numbers_are_part_of_the_signature():
    class Scaled(Block):
        def forward(self, x, scale=1.0, power=2):
            return super().forward((x * scale) ** power)

    class Model(Stack):
        def forward(self, x, scale, power):
            x = self.entrance(x)
            for block in self.blocks:
                x = block(x, scale, power=power)
            return self.head(x)

    def step(model, index):
        loss = weigh(model(batch(index), 1.0 + index % 2, 2 + index % 3))
        loss.backward()
        return loss

    assert_unchanged(lambda: Model(*(Scaled(nn.Tanh()) for _ in range(2))), step, steps=7)


def freezing_and_thawing(model, index):
    for block in model.blocks[: index % 2 + 1]:
        block.up.weight.requires_grad_(index % 3 > 0)


def training_and_evaluation(model, index):
    model.train(index % 2 == 0)


@pytest.mark.parametrize("change", [freezing_and_thawing, training_and_evaluation])
def test_what_is_frozen_and_the_mode_are_part_of_the_signature(change):
    def step(model, index):
        change(model, index)
        return plain_step(model, index)

    assert_unchanged(stack_of(lambda: nn.Dropout(0.3)), step, steps=9)


def test_evaluation_without_gradients_in_between_changes_nothing():
    def step(model, index):
        model.eval()
        with torch.no_grad():
            first = model(batch(index + 90))
        with torch.inference_mode():
            second = model(batch(index + 91)).clone()
        model.train()
        return plain_step(model, index), first, torch.tensor(second.tolist())

    assert_unchanged(stack_of(lambda: nn.Dropout(0.3)), step, boundaries=(1,))


def test_no_grad_sections_and_detached_parts_inside_a_region_keep_every_bit():
    def partly(x):
        with torch.no_grad():
            scale = x.exp().mean()
        return x.sigmoid() * scale + (x.detach() * 2).tanh() * x

    assert_unchanged(stack_of(lambda: Inner(partly)), plain_step)


def fragile(net, x):
    y = F.dropout(x.exp(), 0.3)
    if net.is_broken[0]:
        raise LookupError("broken")
    return y.tanh() * F.dropout(x, 0.2)


@pytest.mark.parametrize("broken_steps", [(0,), (1, 2), (0, 2)])
@pytest.mark.parametrize("boundaries", [(), (1,)])
def test_an_error_in_forward_leaves_everything_usable_and_the_generator_as_it_would_be(broken_steps, boundaries):
    def step(model, index):
        state = None
        if index in broken_steps:
            model.blocks[1].inner.is_broken[0] = True
            with pytest.raises(LookupError):
                model(batch(index))
            model.blocks[1].inner.is_broken[0] = False
            state = torch.get_rng_state()
        return plain_step(model, index), state

    assert_unchanged(stack_of(lambda: Net(fragile, is_broken=[False])), step, steps=4, boundaries=boundaries)


def test_an_error_that_the_region_itself_handles_stays_right():
    def handled(net, x):
        try:
            return net.inner(x)
        except LookupError:
            return x.sigmoid() * x

    assert_unchanged(stack_of(lambda: Net(handled, inner=Net(fragile, is_broken=[True]))), plain_step)
