"""Batches that change size under `attach`: each within the budget, with the unmanaged gradients, and few of them traced."""

from __future__ import annotations

import gc
import logging
import random
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import plimsoll
import zoo
from long_cases import some
from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.step_planner import StepPlanner
from steps import Stack

Step = list[dict[str, Any]]
"""The micro-batches of one step."""


def _lengths(draw: random.Random) -> Step:
    return [zoo.words(tokens=draw.randrange(16, 97))]


def _two_lengths(draw: random.Random) -> Step:
    source, target = draw.randrange(16, 65), draw.randrange(16, 65)
    return [{"input_ids": zoo.words(tokens=source)["input_ids"], "labels": zoo.words(tokens=target)["labels"]}]


def _pictures(draw: random.Random) -> Step:
    size = zoo.IMAGE * draw.choice((1, 2, 3))
    return [{**zoo.pictures(rows=4, size=size), "interpolate_pos_encoding": True}]


def _micro_batches(draw: random.Random) -> Step:
    return [zoo.words(rows=draw.randrange(2, 7), tokens=draw.randrange(16, 65)) for _ in range(3)]


STREAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[random.Random], Step], int]] = {
    "lengths": (lambda: zoo.build("llama"), _lengths, 3),
    "two lengths": (lambda: zoo.build("t5", decoder_start_token_id=0, num_layers=1), _two_lengths, 5),
    "images, one at its native size": (lambda: zoo.build("vit"), _pictures, 3),
    "unequal micro-batches": (lambda: zoo.build("gpt2"), _micro_batches, 5),
}


def _train(model: nn.Module, steps: Iterable[Step]) -> list[list[np.ndarray]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    made = []
    for number, step in enumerate(steps):
        for batch in step:
            torch.manual_seed(number)
            model(**batch)["loss"].backward()
        made.append(
            [p.grad.numpy().copy() for p in model.parameters() if p.grad is not None]
        )  # numpy's are not counted
        optimizer.step()
        optimizer.zero_grad()
    return made


def _numbers(batch: dict[str, Any]) -> int:
    return sum(value.numel() for value in batch.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("name", some(STREAMS, 1))
def test_every_step_of_random_sizes_keeps_to_the_budget_with_the_unmanaged_gradients(name: str):
    build, make, most_traces = STREAMS[name]
    draw = random.Random(3)
    steps = [make(draw) for _ in range(8)]
    expected = _train(build(), steps)
    largest = max((batch for step in steps for batch in step), key=_numbers)
    known = plimsoll.plan(build(), largest, budget="1GiB")
    state = sum(p.nbytes for p in build().parameters()) if len(steps[0]) > 1 else 0
    budget = state + known.floor_bytes + int(0.4 * (known.baseline_peak_bytes - known.floor_bytes))
    with (
        LiveStorages() as live,
        mock.patch.object(StepPlanner, "traced", autospec=True, side_effect=StepPlanner.traced) as traced,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", message="plimsoll")
        model = build()
        with plimsoll.attach(model, budget) as attachment:
            live.watch(model)
            found = _train(model, steps)
            assert not attachment.is_calibrating
    assert max(live.peaks) <= budget
    assert sum(not call.kwargs["is_timed"] for call in traced.call_args_list) < most_traces
    for one, other in zip(expected, found, strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True))


def test_a_shape_below_every_floor_names_it_before_it_runs_and_training_goes_on(caplog):
    torch.manual_seed(0)
    model = Stack(3, 32)

    def step(rows: int) -> None:
        model(torch.randn(rows, 32)).square().mean().backward()
        model.zero_grad()

    with plimsoll.attach(model, 600_000) as attachment, caplog.at_level(logging.INFO, "plimsoll"):
        for rows in (64, 64, 96, 128):
            step(rows)
        plan = attachment.plan
        with pytest.raises(BudgetBelowFloor, match="below the smallest reachable peak"):
            model(torch.randn(8000, 32))
        assert attachment.plan.regions is plan.regions
        step(128)
        assert attachment.plan.regions is plan.regions
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("plimsoll")]
    assert "budget 585.9 KiB" in said


def test_a_trace_within_a_step_leaves_room_for_what_earlier_forwards_hold():
    torch.manual_seed(0)
    model = Stack(3, 32)
    with plimsoll.attach(model, "4MiB") as attachment:
        for _ in range(3):
            model(torch.randn(640, 32)).square().mean().backward()
            model.zero_grad()
        waiting = model(torch.randn(640, 32))
        held_bytes = attachment._steps.waiting_bytes
        assert held_bytes > 3 * waiting.nbytes
        with mock.patch.object(StepPlanner, "traced", autospec=True, side_effect=StepPlanner.traced) as traced:
            later = model(torch.randn(960, 32))
        (waiting.square().mean() + later.square().mean()).backward()
        limits = [call.kwargs["limit_bytes"] for call in traced.call_args_list]
        assert limits
        assert max(limits) <= attachment._known.room.bytes() - held_bytes
        assert attachment._steps.waiting_bytes == 0


def test_a_training_goes_on_after_a_step_that_its_shape_did_not_foretell():
    """Pictures that are resized within the model take what no size of theirs tells."""
    torch.manual_seed(0)
    model = Stack(3, 32)
    with plimsoll.attach(model, 600_000) as attachment:
        for rows in (64, 64, 96):
            model(torch.randn(rows, 32)).square().mean().backward()
            model.zero_grad()
        shaped = attachment._known.shaped
        assert shaped is not None
        shaped.note_peak(900_000)
        for expected in ("no plan is predicted to need less", "below the smallest reachable peak"):
            model(torch.randn(8000, 32)).square().mean().backward()
            with pytest.warns(UserWarning, match=expected):  # the step was measured, and ends here
                model(torch.randn(64, 32)).square().mean().backward()
        batches = weakref.WeakSet()
        with mock.patch.object(StepPlanner, "solve", side_effect=AssertionError("it is known that nothing fits")):
            for _ in range(3):
                batches.add(batch := torch.randn(8000, 32))
                model(batch).square().mean().backward()
                del batch
        gc.collect()
        assert not batches


def test_a_batch_of_one_is_planned_for_although_its_step_is_like_that_of_two():
    model = zoo.build("resnet")
    free = plimsoll.plan(zoo.build("resnet"), zoo.pictures(4, 32), budget="1GiB")
    with plimsoll.attach(model, (free.floor_bytes + free.baseline_peak_bytes) // 2) as attachment:
        for rows in (4, 4, 3, 1, 1):
            model(**zoo.pictures(rows, 32)).loss.backward()
            model.zero_grad()
        assert attachment.plan is not None
        assert "pixel_values=f32[1x3x32x32]" in attachment.plan.signature


class _Detector(nn.Module):
    """Pictures and boxes come in lists; which of the rows its loss takes depends on what the boxes say."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(4, 32)

    def forward(self, pictures: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        rows = torch.stack([nn.functional.interpolate(each, size=(64, 32))[0, 0] for each in pictures])
        found = self.body(rows.flatten(0, 1)).view_as(rows)
        taken = (each[target["boxes"].sum(dim=1) > 0] for each, target in zip(found, targets, strict=True))
        return {"loss": torch.stack([each.square().sum() for each in taken]).sum()}


def _scenes(count: int) -> Iterator[Step]:
    draw = random.Random(3)
    for number in range(count):
        torch.manual_seed(number)
        sides = [(1, 1, draw.randrange(40, 90), draw.randrange(40, 90)) for _ in range(2)]
        targets = [{"boxes": torch.randn(64, draw.randrange(2, 9))} for _ in range(2)]
        yield [{"pictures": [torch.randn(side) for side in sides], "targets": targets}]


def _detector() -> _Detector:
    torch.manual_seed(0)
    return _Detector()


class _PaddingDetector(nn.Module):
    """Pictures of a batch are padded to the longest of every side."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Stack(1, 8) for _ in range(4)))

    def forward(self, pictures: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        height, width = (max(each.shape[side] for each in pictures) for side in (-2, -1))
        padded = [
            nn.functional.pad(each, (0, -width % 8 + width - each.shape[-1], 0, height - each.shape[-2]))
            for each in pictures
        ]
        return {"loss": self.body(torch.cat(padded).unflatten(-1, (-1, 8))).square().mean()}


def _pages(sizes: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Step]:
    for pages in sizes:
        yield [{"pictures": [torch.randn(1, 1, *size) for size in pages]}]


@pytest.mark.long
def test_a_list_whose_padding_is_larger_is_not_taken_for_a_known_one():
    """A broad picture beside a high one: fewer elements and no longer sides than before, but twice as much when padded."""
    alike = [[(32 + n % 3, 120 - n), (32, 110)] if n % 2 else [(120 - n, 32 + n % 3), (110, 32)] for n in range(8)]
    last = [(32, 104), (104, 32)]
    torch.manual_seed(0)
    with LiveStorages() as live:
        model = _PaddingDetector()
        known = plimsoll.plan(model, next(_pages([last]))[0], budget="1GiB")
        budget = known.floor_bytes + (known.baseline_peak_bytes - known.floor_bytes) // 4
        with plimsoll.attach(model, budget):
            live.watch(model)
            _train(model, _pages([*alike, last, last]))
    assert max(live.peaks) <= budget


@pytest.mark.long
def test_lists_of_ragged_pictures_and_boxes_are_traced_a_few_times_only():
    expected = _train(_detector(), _scenes(40))
    known = plimsoll.plan(_detector(), next(_scenes(1))[0], budget="1GiB")
    budget = known.floor_bytes + int(0.6 * (known.baseline_peak_bytes - known.floor_bytes))
    traces, traced = [], StepPlanner.traced

    def counted(*args: Any, **options: Any) -> Any:  # a mock would hold every batch
        traces.append(options)
        return traced(*args, **options)

    with LiveStorages() as live, mock.patch.object(StepPlanner, "traced", counted):
        model = _detector()
        with plimsoll.attach(model, budget) as attachment:
            live.watch(model)
            found = _train(model, _scenes(40))
            assert attachment.plan is not None
            assert attachment.plan.regions
    assert max(live.peaks) <= budget
    assert len(traces) < 20
    for one, other in zip(expected, found, strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True))


class _ResizingDetector(nn.Module):
    """Long pictures are made longer before the blocks see them; what the head takes depends on how many boxes are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(4, 32)
        self.head = nn.Linear(32, 256)

    def forward(self, pictures: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        lengths = [64 * round(max(each.shape[-2:]) / min(each.shape[-2:])) for each in pictures]
        rows = [nn.functional.interpolate(p, size=(n, 32))[0, 0] for p, n in zip(pictures, lengths, strict=True)]
        found = self.body(torch.cat(rows))
        marked = sum(int(target["boxes"][:, 0].sum()) for target in targets)
        scores = self.head(found[:1].expand(marked, -1)).tanh()
        return {"loss": found.square().mean() + scores.square().mean()}


def _resized(numbers: Iterable[int]) -> Iterator[Step]:
    """Long pictures with few marked boxes, or a larger and a smaller square one with many; from 6 on two square ones."""
    for number in numbers:
        sides = [(40, 40), (36, 36 - number // 2)] if number < 6 else [(38, 38), (44 - number, 38)]
        sides = sides if number % 2 or number > 5 else [(30, 90 + number)] * 2
        boxes = torch.full((4, 4), 45.0 if number % 2 or number > 5 else 10.0)
        yield [{"pictures": [torch.randn(1, 1, *side) for side in sides], "targets": [{"boxes": boxes}] * 2}]


@pytest.mark.long
def test_a_batch_that_several_stand_in_for_keeps_to_the_budget_whichever_it_is_like():
    """The largest without a plan takes least at its floor, so that its plan keeps more than others have room for."""
    torch.manual_seed(0)
    with LiveStorages() as live:
        model = _ResizingDetector()
        long, square = (plimsoll.plan(model, batch, budget="1GiB") for [batch] in _resized(range(2)))
        assert long.baseline_peak_bytes > square.baseline_peak_bytes > square.floor_bytes > 1.2 * long.floor_bytes
        budget = square.floor_bytes + (square.baseline_peak_bytes - square.floor_bytes) // 8
        with plimsoll.attach(model, budget):
            live.watch(model)
            _train(model, _resized(range(9)))
    assert max(live.peaks) <= budget
