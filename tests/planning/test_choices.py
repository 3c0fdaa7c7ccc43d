"""Which choices are generated for regions that have too many values to try all combinations."""

from __future__ import annotations

import pytest

from planning.builders import OUT, StepBuilder, in_regions
from plimsoll.planning import choices
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex

TIMES = 130


def recurrent(step: StepBuilder, x: int) -> int:
    """A layer that runs once for each time of a sequence, and saves three values of equal size each time."""
    state = x
    for _ in range(TIMES):
        gates = step.op("gates", state, x, size=64, saves=(state,))
        bounded = step.op("tanh", gates, size=64, saves=(OUT,), seconds=0.1)
        state = step.op("mix", bounded, state, size=64, saves=(bounded, state), seconds=0.1)
    return state


def floor_and_choices() -> tuple[int, int]:
    index = StepIndex(*in_regions(recurrent, recurrent, source_bytes=64).finish())
    (first, _) = choices.generate_choices(index)
    return solve(Planner(index), budget_bytes=None).floor_bytes, len(first.effects)


def test_a_recurrent_region_gets_few_choices_and_no_higher_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    floor_bytes, count = floor_and_choices()
    monkeypatch.setattr(choices, "_FLIPPED_VALUES", 10 * TIMES)
    single_floor_bytes, single_count = floor_and_choices()
    assert floor_bytes <= single_floor_bytes
    assert count < single_count / 2
