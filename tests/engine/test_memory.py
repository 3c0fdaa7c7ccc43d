"""Memory: what is dropped is freed when the region returns, what is kept when nobody needs it, nothing by the collector."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from contracts.harness import Block, Stack, assert_unchanged, batch, manage, plain_step, stack_of, weigh
from engine.models import Births, UpDown
from metering import LiveStorages
from plimsoll.errors import SavedTensorModified
from plimsoll.tracing.meters.memory import PeakMeter

pytestmark = pytest.mark.usefixtures("without_the_collector")


def roomy(up, down, x):
    """Saves many large tensors, returns a small one."""
    return x + down(torch.tanh(up(x)).exp().sigmoid())


def spacious(count=3, function=roomy):
    torch.manual_seed(0)
    return Stack(*(UpDown(function, 256) for _ in range(count)))


WIDE = 64 * 256 * 4
NARROW = 64 * 16 * 4


def big(index):
    return batch(index, 64, 8)


@pytest.mark.parametrize("recorded", [0, 1, 2])
def test_dropped_storages_are_freed_when_the_region_returns_in_the_recording_call_too(recorded):
    model = spacious()
    with manage(model):
        for index in range(recorded):
            weigh(model(big(index))).backward()
        with Births() as births:
            output = model(big(recorded))
        assert births.alive_bytes < WIDE
        weigh(output).backward()


def test_kept_storages_live_until_backward_has_read_them_and_no_longer():
    model = spacious()
    with manage(model, kept=("tanh",)):
        weigh(model(big(0))).backward()
        with Births() as births:
            output = model(big(1))
        wide = [name for name, size in births.alive if size == WIDE]
        assert wide == ["aten::tanh"] * 3
        loss = weigh(output)
        loss.backward()
        del output, loss
        assert births.alive_bytes == 0


@pytest.mark.parametrize("boundaries", [(), (1, 2)])
@pytest.mark.parametrize("index", [0, 3])
def test_nothing_of_a_step_is_alive_after_it(boundaries, index):
    model = Stack(*(Block(nn.Dropout(0.3)) for _ in range(3)))
    with manage(model, boundaries=boundaries):
        for step in range(index):
            weigh(model(batch(step))).backward()
        model.zero_grad()
        with Births() as births:
            weigh(model(batch(9))).backward()
            model.zero_grad()
        assert births.alive == []


@pytest.mark.parametrize("boundaries", [(), (1, 2)])
def test_a_step_leaves_no_reference_cycles(boundaries):
    model = stack_of(lambda: nn.Dropout(0.3))()
    with manage(model, boundaries=boundaries):
        for step in range(3):
            weigh(model(batch(step))).backward()
        gc.collect()
        for step in range(3):
            weigh(model(batch(step))).backward()
        found = gc.collect()
    assert found == 0


def test_a_graph_without_backward_is_freed_with_its_output():
    model = spacious()
    with manage(model, boundaries=(1,)):
        for index in range(3):
            with Births() as births:
                output = model(big(index))
                del output
            assert births.alive_bytes == 0


@pytest.mark.parametrize("recorded", [False, True])
def test_a_forward_that_fails_frees_what_it_made(recorded):
    is_broken = False

    def failing(up, down, x):
        y = torch.tanh(up(x)).exp()
        if is_broken and up is model.blocks[1].up:
            raise LookupError
        return x + down(y.sigmoid())

    model = spacious(2, failing)
    with manage(model):
        if recorded:
            weigh(model(big(0))).backward()
            model.zero_grad()
        is_broken = True
        with Births() as births, contextlib.suppress(LookupError):
            model(big(1))
        assert births.alive_bytes == 0


def test_a_second_backward_over_a_retained_graph_frees_its_rebuilt_tensors():
    model = spacious()
    with manage(model):
        weigh(model(big(0))).backward()
        loss = weigh(model(big(1)))
        loss.backward(retain_graph=True)
        model.zero_grad()
        with Births() as births:
            loss.backward(retain_graph=True)
            model.zero_grad()
        assert births.alive_bytes < WIDE
        loss.backward()


def test_backward_holds_the_rebuilt_tensors_of_one_region_at_a_time():
    model = spacious(4)
    with manage(model):
        weigh(model(big(0))).backward()
        model.zero_grad()
        loss = weigh(model(big(1)))
        peaks = []
        for block in model.blocks:
            block.up.weight.register_post_accumulate_grad_hook(lambda p: peaks.append(births.alive_bytes))
        with Births() as births:
            loss.backward()
        assert len(peaks) == 4
        assert max(peaks) < 5 * WIDE


def test_dropped_boundaries_do_not_hold_the_input():
    model = spacious()
    counts = {}
    for boundaries in ((), (1, 2)):
        with manage(model, boundaries=boundaries):
            weigh(model(big(0))).backward()
            with Births() as births:
                output = model(big(1))
            counts[boundaries] = sum(size == NARROW for _, size in births.alive)
            loss = weigh(output)
            loss.backward()
            model.zero_grad()
            del output, loss
    assert counts[()] - counts[1, 2] == 2


def test_a_storage_shared_by_kept_slots_is_held_once_and_parameters_are_not_copied():
    def shared(up, down, x):
        wide = up(x)
        turned = wide.t().exp()
        return x + down((wide * wide.view(-1).view(wide.shape)) * turned.t())

    model = spacious(2, shared)
    with manage(model, kept=("up",)):
        weigh(model(big(0))).backward()
        model.zero_grad()
        with Births() as births:
            output = model(big(1))
        assert sum(size == WIDE for _, size in births.alive) == 2
        weigh(output).backward()


def test_removing_frees_every_program():
    model = spacious()
    handle = manage(model)
    weigh(model(big(0))).backward()
    regions = [weakref.ref(region) for region in handle.regions.values()]
    handle.remove()
    del handle
    gc.collect()
    assert all(region() is None for region in regions)


def test_recording_takes_no_more_than_a_steady_step():
    """Ops run twice then, and random masks are drawn in place; neither is the peak."""

    def masked(up, down, x):
        return x + down(nn.functional.dropout(torch.tanh(up(x)).exp(), 0.5) * 2)

    model = spacious(2, masked)
    peaks = []
    with manage(model):
        for index in range(3):
            with LiveStorages() as meter:
                meter.begin()
                output = model(big(index))
            weigh(output).backward()
            peaks += meter.peaks
    assert peaks[0] <= peaks[2] + NARROW


def test_what_a_detached_part_saves_is_neither_waited_for_nor_made_again():
    """Much of what is saved is never read, as in DoRA's norm of weights."""

    def detached(up, down, x):
        y = torch.tanh(up(x)).exp()
        return x + down(y.sigmoid() * y * (y.exp() + y.sin()).sum(1, keepdim=True).detach())

    model = spacious(2, detached)
    with manage(model):
        for index in range(3):
            output = weigh(model(big(index)))
            with Births() as births:
                output.backward()
            names = [name for name, *_ in births.made]
            assert names.count("aten::tanh") <= (2 if index else 4)


class Weight(nn.Parameter):
    """Frozen, with a scale that is no buffer, as bitsandbytes keeps its own."""


class Quantized(nn.Module):
    """A product with a frozen weight of bytes and the scale that it keeps beside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Weight(torch.randint(-99, 99, (16, 256), dtype=torch.int8), requires_grad=False)
        self.weight.state = SimpleNamespace(scale=torch.rand(16, 1) / 99, inner=SimpleNamespace(shift=torch.rand(1)))
        self.adapter = nn.Linear(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.weight.state
        wide = x @ (self.weight * state.scale + state.inner.shift)
        return x + self.adapter(torch.tanh(wide).exp())


def test_what_frozen_weights_keep_beside_themselves_stands_in_no_recipes_way():
    model, plain = (Stack(Quantized(), Quantized()) for _ in range(2) if torch.manual_seed(0))
    with manage(model):
        for index in range(3):
            with Births() as births:
                output = model(big(index))
            assert births.alive_bytes < WIDE // 4  # of the weight as floats
            weigh(output).backward()
            weigh(plain(big(index))).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)


def test_a_scale_that_is_written_before_backward_is_an_error():
    model = Stack(Quantized(), Quantized())
    with manage(model):
        for index in range(2):
            output = weigh(model(big(index)))
            if index:
                model.blocks[0].weight.state.scale.mul_(2)
                with pytest.raises(SavedTensorModified, match=r"weight\.scale|scale"):
                    output.backward()
            else:
                output.backward()


def normed(up, down, x):
    """Scaled by a sum over a product, detached, as DoRA scales by a norm; the product is in ``normed.products``."""
    wide = up.weight @ down.weight
    normed.products.append(weakref.ref(wide.untyped_storage()))
    scale = wide.pow(2).sum().add(1).detach()
    del wide
    normed.alive.append(normed.products[-1]() is not None)
    return x + down(torch.tanh(up(x)).exp()) * scale


def test_what_autograd_lets_go_of_within_a_region_is_gone_at_once():
    normed.products, normed.alive = [], []
    model = spacious(2, normed)
    with manage(model):
        for index in range(4):
            weigh(model(big(index))).backward()
    assert normed.alive == [False] * 8


@pytest.mark.parametrize("kept_in", [{0}, {2}, {1, 3}])
def test_a_part_of_the_graph_that_lives_in_some_steps_and_not_in_others_changes_no_bit(kept_in):
    class Watching(Block):
        index, graphs = 0, ()

        def forward(self, x):
            norm = (self.up.weight * 2).pow(2).sum()
            self.graphs = [norm] if self.index in kept_in else ["none"]
            return super().forward(x) * norm.detach().rsqrt()

    def step(model, index):
        for block in model.blocks:
            block.index = index
        loss = plain_step(model, index)
        for block in model.blocks:
            if index in kept_in:
                block.graphs[0].backward()  # through what was saved for it
        return loss

    assert_unchanged(lambda: Stack(*(Watching(nn.Tanh()) for _ in range(2))), step, steps=5, engine=None)


def test_random_states_are_held_without_a_tensor():
    """A CPU's would be one of 5056 bytes for each of the ops that draw."""
    model = Stack(Block(nn.Sequential(*(nn.Dropout(0.1) for _ in range(6)))))
    with manage(model):
        for index in range(2):
            weigh(model(batch(index, 1, 8))).backward()
        with PeakMeter() as meter:
            output = model(batch(2, 1, 8))
    assert 0 < meter.resident_bytes < 5056
    weigh(output).backward()
