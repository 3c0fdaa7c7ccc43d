"""Counters of a training with compressed gradients: steps, and steps with gradients that are not finite."""

from __future__ import annotations

import pytest
import torch

from plimsoll.distributed.gradient_compression.averaging import Counters, Tally
from plimsoll.distributed.gradient_compression.method import CompressionSettings, parse_method
from plimsoll.distributed.gradient_compression.slots import GradientPart, GradientSlot, make_slots

SETTINGS = CompressionSettings(method=parse_method("topk:1%"))


def two_parameters() -> list[GradientSlot]:
    parts = [GradientPart(name, (64, 64), torch.float32) for name in ("up.weight", "down.weight")]
    return make_slots(parts, SETTINGS, ranks=2, form="mean")


def reduce(tally: Tally, slots: list[GradientSlot], *, is_nonfinite: bool = False) -> None:
    tally.begin(slots)
    tally.add(slots, SETTINGS, torch.tensor(is_nonfinite))


@pytest.mark.parametrize("buckets", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_a_step_is_counted_once_however_its_parameters_are_split_into_reductions(buckets: list[list[int]]):
    slots, tally = two_parameters(), Tally()
    for _ in range(3):
        for bucket in buckets:
            reduce(tally, [slots[i] for i in bucket], is_nonfinite=True)
    assert tally.read().steps == 3
    assert tally.read().nonfinite_steps == 3


def test_a_reduction_that_is_not_compressed_belongs_to_its_step_and_adds_no_bytes():
    (first, second), tally = two_parameters(), Tally()
    reduce(tally, [first])
    reduce(tally, [second])
    sent_bytes = tally.read().sent_bytes
    tally.begin([first])  # under FSDP2, a parameter of this unit had no gradient in the second step
    assert tally.read().sent_bytes == sent_bytes
    reduce(tally, [second], is_nonfinite=True)
    reduce(tally, [first])
    assert tally.read().steps == 3
    assert tally.read().nonfinite_steps == 1


def test_counting_continues_from_the_counters_of_a_saved_state():
    slots, tally = two_parameters(), Tally(Counters(steps=5, nonfinite_steps=2))
    reduce(tally, slots, is_nonfinite=True)
    assert tally.read().steps == 6
    assert tally.read().nonfinite_steps == 3
