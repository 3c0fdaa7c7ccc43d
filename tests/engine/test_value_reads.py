"""Regions whose code reads values of tensors: the plain model's bits, at most checkpoint's memory, and few recordings."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import plimsoll
from long_cases import some
from plimsoll.artifacts.decision import Engine
from plimsoll.tracing.meters.memory import PeakMeter
from steps import mean_square

WIDTH, ROWS, BLOCKS, STEPS = 32, 192, 4, 24
MOST_RECORDED = 16
"""The most recordings of a block that reads values."""
MORE_THAN_CHECKPOINT = 1.1


class Reader(nn.Module):
    """A residual block around a function that may read values: ``function(block, x)``."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 3)
        self.register_buffer("table", torch.randn(8, WIDTH))
        self._function = function

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(self, x)


class Readers(nn.Module):
    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reader(function) for _ in range(BLOCKS))
        self.is_checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


def picked(x: torch.Tensor, count: int) -> torch.Tensor:
    """A number below ``count`` that depends on the data, in a tensor without dimensions."""
    return (x.detach().sum().abs() * 1000).long() % count


def guarded(block: Reader, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    return x + (wide / 10 if wide.abs().max().item() > 1e4 else wide)


def any_above(block: Reader, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    return x + (wide.clamp(max=100) if bool((wide > 100).any()) else wide)


def counted(block: Reader, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    return x + wide / (wide > 0).sum().item() * 1e3


def scaled_by_itself(block: Reader, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    return x + wide * (0.1 / float(wide.detach().std()))


def branched(block: Reader, x: torch.Tensor) -> torch.Tensor:
    wide = block.wide(x)
    return x + (wide * F.silu(wide) if x.detach()[0, 0].item() > 0 else wide)


def looked_up(block: Reader, x: torch.Tensor) -> torch.Tensor:
    return x + block.wide(x + block.table[picked(x, 8)])


def filled(block: Reader, x: torch.Tensor) -> torch.Tensor:
    return x + block.wide(x) * torch.full((WIDTH,), x.detach().abs().mean())


def sliced(block: Reader, x: torch.Tensor) -> torch.Tensor:
    start = picked(x, 16) + 2
    return torch.cat([x[:start], x[start:] + block.wide(x[start:])])


def one_hot(block: Reader, x: torch.Tensor) -> torch.Tensor:
    choice = F.one_hot(block.gate(x).argmax(-1), 3).to(x.dtype)
    return x + block.wide(x) * (choice @ block.gate.weight)


def parted(block: Reader, x: torch.Tensor) -> torch.Tensor:
    first, second = x.tensor_split(torch.tensor([int(picked(x, 16)) + 2]))
    return torch.cat([first + block.wide(first), second * 2])


def routed(block: Reader, x: torch.Tensor) -> torch.Tensor:
    rows = (x.detach()[:, 0] > 0).nonzero().squeeze(1)
    return x.index_add(0, rows, block.wide(x[rows]))


def masked(block: Reader, x: torch.Tensor) -> torch.Tensor:
    mask = x.detach()[:, 0] > 0
    result = x.clone()
    result[mask] = x[mask] + block.wide(x[mask])
    return result


def split(block: Reader, x: torch.Tensor) -> torch.Tensor:
    choice = block.gate(x).argmax(-1)
    counts = torch.bincount(choice, minlength=3).tolist()
    order = choice.argsort(stable=True)
    parts = x[order].split(counts)
    return torch.zeros_like(x).index_copy(0, order, torch.cat([part + block.wide(part) for part in parts]))


def unique(block: Reader, x: torch.Tensor) -> torch.Tensor:
    codes, inverse = (x.detach()[:, 0] * 40).long().unique(return_inverse=True)
    return x + block.wide(x) + torch.zeros(len(codes), WIDTH).index_add(0, inverse, x)[inverse] / len(codes)


def early(block: Reader, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        wide = block.wide(x)
        x = x + wide
        if float(wide.detach().abs().mean()) < 0.155:
            break
    return x


def dropped_out(block: Reader, x: torch.Tensor) -> torch.Tensor:
    rows = (x.detach()[:, 0] > 0).nonzero().squeeze(1)
    return x.index_add(0, rows, F.dropout(block.wide(x[rows]), 0.2))


KINDS = {
    each.__name__: each
    for each in (
        *(guarded, any_above, counted, scaled_by_itself, branched, looked_up, filled),
        *(sliced, one_hot, parted, routed, masked, split, unique, early, dropped_out),
    )
}


def rows_of(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    torch.manual_seed(step)
    model.zero_grad()
    mean_square(model(rows_of(step))).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def peak_bytes(model: nn.Module, step: int) -> int:
    gradients(model, step)  # gradients exist
    with PeakMeter("cpu") as meter:
        gradients(model, step)
    return meter.peak_bytes


@pytest.mark.parametrize("kind", some(KINDS, 2))
def test_a_region_that_reads_values_is_planned_like_any_other(kind: str, recorded: list[int]):
    torch.manual_seed(0)
    plain = Readers(KINDS[kind])
    model, checkpointed = copy.deepcopy(plain), copy.deepcopy(plain)
    checkpointed.is_checkpointed = True
    plan = plimsoll.plan(model, rows_of(99), loss=mean_square, strategy="full")
    with plimsoll.apply(model, plan) as handle, warnings.catch_warnings():
        warnings.simplefilter("error")  # no call keeps its activations
        for step in range(STEPS):
            assert all(map(torch.equal, gradients(plain, step), gradients(model, step))), step
        assert recorded[0] <= BLOCKS * MOST_RECORDED
        assert handle.faults == ()
        for step in range(STEPS, STEPS + 3):
            assert peak_bytes(model, step) <= MORE_THAN_CHECKPOINT * peak_bytes(checkpointed, step)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["counted", "branched", "looked_up", "early"])
def test_a_budget_is_kept_in_every_step_by_a_model_that_reads_values(kind: str):
    torch.manual_seed(0)
    plain = Readers(KINDS[kind])
    model = copy.deepcopy(plain)
    plan = plimsoll.plan(model, rows_of(99), "1GiB", loss=mean_square)
    budget_bytes = (plan.floor_bytes + plan.predicted_peak_bytes) // 2
    own_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())  # with gradients
    expected = [gradients(plain, step) for step in range(8)]
    with plimsoll.attach(model, budget_bytes):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # A batch may take a way that holds more than all before it. Which one does depends on how a machine adds up.
            warnings.filterwarnings("ignore", message="plimsoll: a training step took")
            for step in range(8):
                assert all(map(torch.equal, expected[step], gradients(model, step))), step
            gradients(model, 0)  # the warning about a step comes when the next one begins
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(8):  # every way is known now
                assert own_bytes + peak_bytes(model, step) <= budget_bytes


def leaving_early(block: Reader, x: torch.Tensor) -> torch.Tensor:
    return x * 0.9 + block.norm.bias if x.detach()[0, 0].item() > 0 else x + block.wide(x)


def short_rows() -> torch.Tensor:
    """A batch that makes every block leave early."""
    rows = rows_of(99)
    rows[0, 0] = 1.0
    return rows


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["full", "auto"])
def test_a_region_that_left_early_in_the_planned_step_drops_what_it_saves_on_its_long_way(strategy: str):
    torch.manual_seed(0)
    plain = Readers(leaving_early)
    model, checkpointed = copy.deepcopy(plain), copy.deepcopy(plain)
    checkpointed.is_checkpointed = True
    plan = plimsoll.plan(model, short_rows(), loss=mean_square, strategy="full")
    if strategy == "auto":  # there is room for dropping on the long way, but not for keeping
        own_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())  # with gradients
        budget_bytes = own_bytes + round(1.1 * max(peak_bytes(checkpointed, step) for step in range(STEPS)))
        plan = plimsoll.plan(model, short_rows(), budget_bytes, loss=mean_square)
    assert not any(region.dropped for region in plan.regions)
    with plimsoll.apply(model, plan) as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        # This test's loop holds copies of gradients, which count in a step.
        warnings.filterwarnings("ignore", message="plimsoll: a training step took")
        for step in range(STEPS):
            assert all(map(torch.equal, gradients(plain, step), gradients(model, step))), step
        for step in range(STEPS, STEPS + 3):
            assert peak_bytes(model, step) <= MORE_THAN_CHECKPOINT * peak_bytes(checkpointed, step)
        assert {outcome.streams for outcome in handle.outcomes()} <= {1, 2}


def test_a_region_keeps_what_the_plan_does_not_know_if_the_budget_has_room_for_it():
    torch.manual_seed(0)
    model = Readers(leaving_early)
    plain_bytes = max(peak_bytes(model, step) for step in range(8))
    plan = plimsoll.plan(model, short_rows(), 64 * plain_bytes, loss=mean_square)
    with plimsoll.apply(model, plan) as handle:
        for step in range(8):
            gradients(model, step)
        assert not any(outcome.dropped_bytes for outcome in handle.outcomes())


def test_a_region_that_saves_much_is_left_alone_if_the_budget_has_much_room():
    plan = plimsoll.plan(Readers(branched), rows_of(99), "1GiB", loss=mean_square)
    assert [region.is_left_alone for region in plan.regions] == [True] * BLOCKS


@pytest.mark.long
def test_a_plan_names_the_line_that_reads_values():
    plan = plimsoll.plan(Readers(branched), rows_of(99), loss=mean_square, strategy="full")
    line = branched.__code__.co_firstlineno + 2
    assert {region.value_read for region in plan.regions} == {f"test_value_reads.py:{line}"}
    assert f"reads values: test_value_reads.py:{line}" in plan.explain()
    known = plimsoll.plan(Readers(lambda block, x: x + block.wide(x)), rows_of(99), loss=mean_square, strategy="full")
    assert {region.value_read for region in known.regions} == {""}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["routed", "branched", "unique", "dropped_out"])
def test_new_sizes_after_many_calls_of_one_size_keep_every_bit(kind: str):
    torch.manual_seed(0)
    plain = Readers(KINDS[kind])
    model = copy.deepcopy(plain)
    plan = plimsoll.plan(model, rows_of(99), loss=mean_square, strategy="full")
    with plimsoll.apply(model, plan) as handle:
        for step in range(STEPS):
            rows = rows_of(step)[: None if step < STEPS // 2 else ROWS - 5 * step]
            found = []
            for each in (plain, model):
                torch.manual_seed(step)
                each.zero_grad()
                mean_square(each(rows)).backward()
                found.append([parameter.grad for parameter in each.parameters() if parameter.grad is not None])
            assert all(map(torch.equal, *found)), step
        assert handle.faults == ()


@pytest.mark.long
def test_results_that_are_tuples_of_one_tensor_match_their_recording(recorded: list[int]):
    def parted(block: Reader, x: torch.Tensor) -> torch.Tensor:
        (part,) = x.split(len(x))
        (rows,) = torch.where(x.detach()[:, 0] > 0)
        return part + block.wide(x).index_fill(0, rows, 0.0)

    torch.manual_seed(0)
    model = Readers(parted)
    plan = plimsoll.plan(model, rows_of(99), loss=mean_square, strategy="full")
    with plimsoll.apply(model, plan) as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            gradients(model, step)
        assert recorded[0] <= 5 * BLOCKS
        assert {outcome.reruns for outcome in handle.outcomes()} == {0}


@pytest.mark.long
def test_outcomes_count_recipes_and_second_runs():
    torch.manual_seed(0)
    model = Readers(branched)
    with plimsoll.attach(model, "1GiB") as handle:
        assert handle.outcomes() == ()
        gradients(model, 0)
        assert {outcome.engine for outcome in handle.outcomes()} <= set(Engine)
    plan = plimsoll.plan(model, rows_of(99), loss=mean_square, strategy="full")
    with plimsoll.apply(model, plan) as handle:
        for step in range(STEPS):
            gradients(model, step)
        assert {outcome.streams for outcome in handle.outcomes()} == {2}
        reruns = [outcome.reruns for outcome in handle.outcomes()]
        says = [
            f"and its forward again in {count} calls" in outcome.how
            for outcome, count in zip(handle.outcomes(), reruns, strict=True)
        ]
        assert says == [count > 0 for count in reruns]


class Spiking(nn.Module):
    """Its state is a number after a reset and a tensor from the first time step on, as in libraries for spiking networks."""

    def __init__(self):
        super().__init__()
        self.inner, self.potential, self.spikes = nn.Linear(WIDTH, WIDTH), 0.0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.potential = 0.9 * self.potential + self.inner(x)
        spikes = torch.sigmoid(self.potential - 1.0)
        self.spikes += float(spikes.detach().sum())
        return spikes


class OverTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Spiking() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.potential = 0.0
        return torch.stack([self.blocks(x) for _ in range(4)]).mean(0)


@pytest.mark.parametrize("verb", ["attach", "apply"])
def test_an_attribute_that_is_a_number_first_and_then_a_tensor_is_no_error(verb: str):
    torch.manual_seed(0)
    plain = OverTime()
    model = copy.deepcopy(plain)
    if verb == "attach":
        handle = plimsoll.attach(model, "1GiB")
    else:
        handle = plimsoll.apply(model, plimsoll.plan(model, rows_of(99), loss=mean_square, strategy="full"))
    with handle:
        for step in range(6):
            assert all(map(torch.equal, gradients(plain, step), gradients(model, step))), step
    assert [block.spikes for block in model.blocks] == [block.spikes for block in plain.blocks]
