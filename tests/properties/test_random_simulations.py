"""Random choices of random steps: the simulator against a slow one, and sums over regions against the whole."""

from __future__ import annotations

import random

import numpy as np
import pytest

from long_cases import some
from planning.builders import random_step, sweep_prices
from planning.form_builders import random_choice, random_forms
from planning.slow_simulator import SlowStep
from plimsoll.planning.choice import Choice
from plimsoll.planning.choices import ChoiceSet, prices_of
from plimsoll.planning.describe import classes_at_peak, describe_peak
from plimsoll.planning.measuring import Measuring
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.windows import build_windows

STEPS = 150
BATCH = 75
DRAWS = 5


def random_index(seed: int) -> StepIndex:
    trace, costs = random_step(seed).finish()
    return StepIndex(trace, costs, random_forms(trace, costs, seed))


@pytest.mark.parametrize("first", range(0, STEPS, BATCH))
def test_bytes_of_every_instant_and_seconds_are_those_of_a_slow_and_obvious_simulator(first: int) -> None:
    for seed in range(first, first + BATCH):
        index, draw = random_index(seed), random.Random(seed)
        choices = [random_choice(draw, view, may_drop_boundary=seed % 2 == 1) for view in index.views]
        simulation, slow = run_choices(index, choices), SlowStep(index, choices)
        assert simulation.curve.tolist() == slow.curve(), seed
        assert simulation.seconds == pytest.approx(slow.seconds()), seed
        assert sum(holder.bytes for holder in describe_peak(simulation).holders) == simulation.peak_bytes, seed
        assert sum(classes_at_peak(simulation).values()) == simulation.peak_bytes, seed


@pytest.mark.parametrize("first", some(range(0, STEPS, BATCH), 1))
def test_what_regions_add_to_windows_sums_to_the_peaks_of_the_simulator(first: int) -> None:
    additive = 0
    for seed in range(first, first + BATCH):
        index, draw = random_index(seed), random.Random(seed)
        sets = []
        for view in index.views:
            choices: dict[Choice, None] = dict.fromkeys(random_choice(draw, view) for _ in range(DRAWS))
            effects = tuple(Measuring(index, view).measure(list(choices)))
            sets.append(ChoiceSet(effects, sweep_prices(view, prices_of(index, view)), is_complete=False))
        windows = build_windows(index, sets)
        for _ in range(DRAWS):
            picks = [draw.randrange(len(effects)) for effects in windows.effects]
            taken = [effects[pick] for effects, pick in zip(windows.effects, picks, strict=True)]
            simulation = run_choices(index, [effect.choice for effect in taken])
            summed = windows.fixed_bytes + sum(
                added[:, pick] for added, pick in zip(windows.added_bytes, picks, strict=True)
            )
            peaks = np.array([int(simulation.curve[start:stop].max()) for start, stop in windows.spans])
            if all(effect.is_additive for effect in taken):
                additive += 1
                assert summed.tolist() == peaks.tolist(), seed
            assert (summed >= peaks).all(), seed
            assert simulation.seconds == pytest.approx(index.base_seconds + sum(effect.seconds for effect in taken))
            assert simulation.squared_error == pytest.approx(sum(effect.squared_error for effect in taken))
            assert simulation.link_bytes == sum(effect.link_bytes for effect in taken)
    assert additive > BATCH
