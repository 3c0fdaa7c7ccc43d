"""Searches of all objects of the process, for what a training loop holds, take little of the loop's time."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import torch

import plimsoll
from plimsoll.session.held_by_loop import HeldByLoop
from plimsoll.session.situations import MeteredSituations, Situation
from plimsoll.session.step_watch import StepWatch
from plimsoll.tracing.meters import memory
from plimsoll.units import MIB
from steps import Stack, mean_square

ROWS, WIDTH = 128, 32


def train(steps: int, held_rows: int) -> list[int]:
    """Return how many searches each step has made. From step 4 on, the loop replaces a tensor that it holds in every step."""
    torch.manual_seed(0)
    model = Stack(3, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: list[int] = []
    held: Any = None
    with mock.patch.object(memory.gc, "get_objects", wraps=gc.get_objects) as searching, plimsoll.attach(model, 2**30):
        for number in range(steps):
            before = searching.call_count
            if number >= 4:
                held = torch.randn(held_rows, WIDTH)
            mean_square(model(torch.randn(ROWS, WIDTH))).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(searching.call_count - before)
    del held
    return found


def test_a_measured_step_searches_once_at_most():
    found = train(14, held_rows=64 * ROWS)

    assert max(found[5:]) == 1


def test_a_loop_that_holds_next_to_nothing_is_not_searched_in_every_sample():
    found = train(14, held_rows=4)

    assert sum(found[6:]) == 0


def test_samples_are_left_out_while_searches_take_more_than_their_share():
    steps = StepWatch(Stack(2, WIDTH), lambda *_: None, lambda: None)
    steps.held.bytes, steps.held.carried.seconds = 2**30, 1e6
    situations = MeteredSituations()
    known = Situation((("f32", (ROWS, WIDTH)),))

    with mock.patch.object(steps, "meter") as meter:
        for _ in range(16):
            steps.meter_if_new((), {}, known, situations)
            situations.ended(0, 1)
        first = meter.call_count
        for _ in range(64):
            steps.meter_if_new((), {}, known, situations)
        slow = meter.call_count
        steps.held.carried.seconds = 0.0
        for _ in range(64):
            steps.meter_if_new((), {}, known, situations)
            situations.ended(0, 1)
    steps.remove()

    assert first == slow == 16
    assert meter.call_count - slow in (4, 5)


def held_by_loop() -> HeldByLoop:
    return HeldByLoop(Stack(2, WIDTH), torch.device("cpu"))


def test_a_copy_of_the_weights_and_then_a_number_are_no_record():
    held = held_by_loop()
    assert held._without_records(MIB, 0) == MIB
    assert held._without_records(MIB + 4, MIB) == MIB + 4


def test_tensors_that_grow_alike_in_two_steps_are_a_record():
    held = held_by_loop()
    assert held._without_records(MIB, 0) == MIB
    assert held._without_records(3 * MIB, MIB) == 0


def test_what_plans_leave_behind_does_not_make_the_next_search_wait():
    held, kept = held_by_loop(), []
    for step in range(3):  # the first steps of each kind find more memory than before, and no tensors
        held.begin((step + 1) * 8 * MIB, (), {}, accumulates=False, peak_bytes=8 * MIB)
    kept.append(torch.zeros(2**18))
    held.begin(33 * MIB, (), {}, accumulates=False, peak_bytes=8 * MIB)
    assert held.bytes == kept[0].nbytes
