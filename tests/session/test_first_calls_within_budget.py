"""Calls that trace, time and try plans keep to the budget too: all that they take is counted here."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll
import zoo
from long_cases import some
from metering import LiveStorages, loss_of
from plimsoll.engine.offload.measure import _measured_once
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.capture import saved_as_zeros
from plimsoll.tracing.compiled.capture import capture
from plimsoll.tracing.compiled.units import find_units
from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.units import MIB
from steps import Biased, PaddingFree, Stack

ROWS, WIDTH, STEPS = 2048, 64, 3
Batch = tuple[tuple[Any, ...], dict[str, Any]]


def rows(count: int = ROWS) -> Batch:
    return (torch.randn(count, WIDTH),), {}


def masked() -> Batch:
    return (torch.randn(ROWS, WIDTH), torch.arange(ROWS) < ROWS // 2), {}


def words() -> Batch:
    return (), {name: each.repeat(8, 1) for name, each in zoo.batch("llama").items()}


def images() -> Batch:
    pixels, labels = torch.randn(32, 3, zoo.IMAGE, zoo.IMAGE), torch.zeros(32, dtype=torch.long)
    return (), {"pixel_values": pixels, "labels": labels}


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "blocks": (lambda: Stack(6, WIDTH), rows),
    "blocks with buffers": (lambda: nn.Sequential(*(Biased(1024, WIDTH) for _ in range(4))), lambda: rows(1024)),
    "no padding": (lambda: PaddingFree(5, WIDTH), masked),
    "llama": (lambda: zoo.build("llama", num_hidden_layers=4), words),
    "vit": (lambda: zoo.build("vit", num_hidden_layers=4), images),
}


def mean_square_of(output: Any) -> torch.Tensor:
    loss = loss_of(output)
    return loss if loss.dim() == 0 else loss.square().mean()


def train(
    make: Callable[[], nn.Module], batches: list[Callable[[], Batch]], budget: int = 0, **attach: Any
) -> tuple[list[int], list[torch.Tensor], list[str]]:
    """The peak of every step with all that ``attach`` does in it, the weights after the last, and what was warned of."""
    torch.manual_seed(0)
    peaks = []
    with LiveStorages() as live, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        handle = plimsoll.attach(model, budget, optimizer=optimizer, **attach) if budget else None
        for number, batch in enumerate(batches):
            torch.manual_seed(number)
            args, kwargs = batch()
            live.begin()
            mean_square_of(model(*args, **kwargs)).backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(live.peaks[-1])
        if handle is not None:
            handle.remove()
    return peaks, [each.detach().clone() for each in model.parameters()], [str(each.message) for each in caught]


def budget_of(make: Callable[[], nn.Module], batch: Callable[[], Batch], share: float) -> int:
    model, (args, kwargs) = make(), batch()
    free = plimsoll.plan(model, kwargs or args, loss=mean_square_of, strategy="none")
    return int(free.floor_bytes + share * (free.baseline_peak_bytes - free.floor_bytes))


def check(make: Callable[[], nn.Module], batches: list[Callable[[], Batch]], budget: int, **attach: Any) -> None:
    plain, expected, _ = train(make, batches)
    peaks, weights, said = train(make, batches, budget, **attach)
    assert budget < max(plain)
    assert max(peaks) <= budget
    assert all(map(torch.equal, expected, weights))
    assert [each for each in said if each.startswith("plimsoll")] == []


CASES = [(kind, share) for kind in KINDS for share in (0.1, 0.5) if (kind, share) != ("blocks with buffers", 0.1)]


@pytest.mark.parametrize(("kind", "share"), some(CASES, 2))
def test_no_call_exceeds_the_budget(kind: str, share: float):
    make, batch = KINDS[kind]
    check(make, [batch] * STEPS, budget_of(make, batch, share))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["blocks", "no padding"])
def test_no_call_with_a_batch_of_a_new_shape_exceeds_it(kind: str):
    make, largest = KINDS[kind]

    def part(share: float) -> Callable[[], Batch]:
        def cut() -> Batch:
            args, kwargs = largest()
            return tuple(each[: int(share * len(each))] for each in args), kwargs

        return cut

    check(make, [part(0.6), part(0.8), largest, part(0.3), largest], budget_of(make, largest, 0.4))


def test_measuring_a_link_takes_no_more_than_a_small_model_has():
    make, batch = KINDS["blocks"]
    budget = budget_of(make, batch, 0.6)
    _, expected, _ = train(make, [batch] * 4)
    _measured_once.cache_clear()
    peaks, weights, said = train(make, [batch] * 4, budget, allow="recompute,offload")
    assert all(map(torch.equal, expected, weights))
    assert peaks[0] <= budget
    # Tensors stay until the disk has them. On a loaded machine a step may take more than predicted, and that is said.
    assert max(peaks[1:]) <= budget or "it needed more than was predicted" in "".join(said)


def test_plans_that_offload_follow_plans_that_do_not():
    """The link is opened when the first plan needs it, and stays for later ones: the model never had two plans at once."""
    make, batch = KINDS["llama"]
    budget = budget_of(make, batch, 0.3)
    _, expected, _ = train(make, [batch] * 4)
    _, weights, _ = train(make, [batch] * 4, budget, allow="recompute,offload")
    assert all(map(torch.equal, expected, weights))


@pytest.mark.long
def test_a_trial_that_copies_buffers_over_the_budget_is_named(caplog: pytest.LogCaptureFixture):
    """Far from the floor no trial is needed, and close to it nothing but the copies exceeds the budget."""
    make, batch = KINDS["blocks with buffers"]
    budget = budget_of(make, batch, 0.1)
    peaks, _, _ = train(make, [batch] * STEPS, budget)
    assert peaks[0] > budget
    assert max(peaks[1:]) <= budget
    assert ["with copies in memory of the batch" in each.getMessage() for each in caplog.records] == [True]


@pytest.mark.long
@pytest.mark.parametrize("share", [1.05, 1.4])
@pytest.mark.parametrize("keeps_loss", [False, True])
def test_a_micro_batch_that_exceeds_the_budget_is_named(
    keeps_loss: bool, share: float, caplog: pytest.LogCaptureFixture
):
    """The second micro-batch is tried too. Then gradients are copied, and the loss may hold the perturbation before."""
    torch.manual_seed(0)
    with LiveStorages() as live:
        model = Stack(5, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        batch = torch.randn(1024, WIDTH)
        free = plimsoll.plan(model, batch, loss=mean_square_of, strategy="none", optimizer=optimizer)
        budget = int(share * (free.floor_bytes + MIB // 2))
        with plimsoll.attach(model, budget, optimizer=optimizer):
            noise = torch.zeros_like(batch).requires_grad_()
            for _ in range(3):
                loss = mean_square_of(model(batch + noise))
                loss.backward()
                noise = (noise + noise.grad.sign()).detach().requires_grad_()
                if not keeps_loss:
                    del loss
                if not live.peaks:
                    live.begin()
    inputs = batch.nbytes + noise.nbytes  # they exist before the first step
    taken = live.peaks[0] - inputs
    assert [each for each in caplog.records if "with copies in memory" in each.getMessage()] or taken <= budget


def in_capture(model: nn.Module, batch: Batch, around: Any) -> int:
    """What reading the graphs of compiled blocks takes."""
    args, kwargs = batch
    step = TrainingStep(model, args, kwargs, loss=mean_square_of)
    units = find_units(model)
    with PeakMeter() as meter, around:
        capture(units, {unit.path: [] for unit in units}, step.run)
    return meter.peak_bytes


class Skipping(Stack):
    """Runs as many of its blocks as the batch says, on copies of a batch that is small enough for a trial to copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks, x = self.blocks[: int(x[0, 0])], x.repeat(ROWS // len(x), 1)
        for block in blocks:
            x = block(x)
        return x


def counting(blocks: int) -> torch.Tensor:
    x = torch.randn(8, WIDTH)
    x[0, 0] = blocks
    return x


@pytest.mark.long
def test_a_trial_that_runs_more_blocks_than_the_traced_call_is_named(caplog: pytest.LogCaptureFixture):
    model = Skipping(6, WIDTH)
    plan = plimsoll.plan(model, counting(3), strategy="none", loss=mean_square_of)
    budget = (2 * plan.floor_bytes + plan.baseline_peak_bytes) // 3
    with warnings.catch_warnings(), plimsoll.attach(model, budget):
        warnings.simplefilter("ignore")
        for blocks in (3, 6):
            mean_square_of(model(counting(blocks))).backward()
            model.zero_grad()
    assert any("a plan for the budget was run once" in each.getMessage() for each in caplog.records)


@pytest.mark.long
def test_reading_the_graphs_of_compiled_blocks_holds_no_activations():
    model = Stack(8, WIDTH)
    for block in model.blocks:
        block.compile()
    batch = rows()
    in_capture(model, batch, contextlib.nullcontext())
    held = in_capture(model, batch, contextlib.nullcontext())
    assert in_capture(model, batch, saved_as_zeros(model)) < 0.5 * held


@pytest.mark.long
def test_the_call_in_which_a_compiled_model_is_planned_says_what_it_took(caplog: pytest.LogCaptureFixture):
    model = Stack(4, WIDTH)
    batch = rows()
    floor = plimsoll.plan(model, batch[0], loss=mean_square_of, strategy="none")
    model.compile()
    with plimsoll.attach(model, (floor.floor_bytes + floor.baseline_peak_bytes) // 2):
        for _ in range(2):
            mean_square_of(model(*batch[0])).backward()
    said = [each.getMessage() for each in caplog.records if each.name.startswith("plimsoll")]  # inductor logs too
    assert ["to read the compiled graphs and to measure the step" in each for each in said] == [True]


@pytest.mark.long
@pytest.mark.parametrize("forwards", [2, 4])
def test_several_forwards_before_the_first_backward_keep_to_the_budget_or_are_named(
    forwards: int, caplog: pytest.LogCaptureFixture
):
    """Only in the last of them Plimsoll knows how many there are."""
    torch.manual_seed(0)
    with LiveStorages() as live:
        model = Stack(3, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        budget_bytes = (8 + 2 * forwards) * MIB
        with plimsoll.attach(model, budget_bytes, optimizer=optimizer):
            for _ in range(3):
                live.begin()
                losses = [mean_square_of(model(torch.randn(ROWS, WIDTH))) for _ in range(forwards)]
                torch.stack(losses).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    first, *later = live.peaks
    assert max(later) <= budget_bytes
    named = [each for each in caplog.records if f"{forwards} forwards of the model waited" in each.getMessage()]
    assert bool(named) is (first > budget_bytes)
