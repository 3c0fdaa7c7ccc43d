"""Allocations and releases of simulated steps, against the simulator's bytes of every instant."""

from __future__ import annotations

import random
from itertools import accumulate, groupby, takewhile

import numpy as np
import pytest
from msgspec.structs import replace

from planning.builders import random_stage, transformer
from planning.form_builders import random_choice, random_forms
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.memory_use import COMMUNICATION_STREAM, AllocationEvent
from plimsoll.artifacts.trace import Category, Phase, Trace
from plimsoll.planning.choice import Choice
from plimsoll.planning.describe import allocation_events
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.step import StepIndex

STEPS = 60


def curve_of(events: tuple[AllocationEvent, ...], instants: int) -> list[int]:
    """The highest sum of every instant, once what is over has been let go."""
    level, at = 0, 0
    curve = [0] * instants
    for instant, group in groupby(events, key=lambda event: event.instant):
        curve[at:instant] = [level] * (min(instant, instants) - at)
        members = list(group)
        over = list(takewhile(lambda event: event.bytes < 0, members))
        level += sum(event.bytes for event in over)
        levels = list(accumulate((event.bytes for event in members[len(over) :]), initial=level))
        level = levels[-1]
        if instant < instants:
            curve[instant] = max(levels)
        at = min(instant + 1, instants)
    curve[at:] = [level] * (instants - at)
    return curve


def replays_alone(simulation: Simulation, events: tuple[AllocationEvent, ...]) -> bool:
    """Whether no two chains of regions rebuild something before the same op."""
    chains: dict[int, set[str]] = {}
    for event in events:
        if " rebuilt " in event.label or " brought back " in event.label:
            chains.setdefault(event.instant, set()).add(event.label.split()[0])
    has_links = any(choice.is_boundary_dropped for choice in simulation.choices)
    return has_links or all(len(regions) == 1 for regions in chains.values())


def check(simulation: Simulation, note: object) -> bool:
    """Whether the sums could be compared exactly; they were."""
    events = allocation_events(simulation)
    curve = curve_of(events, simulation.index.instants)
    is_exact = replays_alone(simulation, events)
    if is_exact:
        assert curve == simulation.curve.tolist(), note
        assert max(np.cumsum([event.bytes for event in events])) == simulation.peak_bytes, note
    assert (np.array(curve) <= simulation.curve).all(), note
    sizes = {event.block: event.bytes for event in events if event.bytes > 0}
    released = [event.block for event in events if event.bytes < 0]
    assert sorted(released) == sorted(sizes), note
    assert all(event.bytes == -sizes[event.block] for event in events if event.bytes < 0), note
    return is_exact


@pytest.mark.parametrize("in_flight", [1, 3])
def test_sums_of_events_are_the_bytes_of_every_instant(in_flight: int) -> None:
    exact = 0
    for seed in range(STEPS):
        trace, costs = random_stage(seed)
        index = StepIndex(trace, costs, random_forms(trace, costs, seed), in_flight=in_flight)
        draw = random.Random(seed)
        choices = [random_choice(draw, view, may_drop_boundary=seed % 2 == 1) for view in index.views]
        exact += check(run_choices(index, choices), seed)
    assert exact > 0.9 * STEPS


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_sums_hold_for_a_transformer_and_for_chains_of_dropped_boundaries(share: float) -> None:
    index = StepIndex(*transformer(6, detail=2).finish())
    draw = random.Random(0)
    for is_linked in (False, True):
        choices = [
            Choice(frozenset(v for v in view.droppable if draw.random() < share), is_boundary_dropped=is_linked)
            for view in index.views
        ]
        assert check(run_choices(index, choices), (share, is_linked))


def test_rebuilt_values_are_blocks_of_their_own() -> None:
    index = StepIndex(*transformer(2).finish())
    kept = allocation_events(run_choices(index, [Choice(view.everything) for view in index.views]))
    rebuilt = allocation_events(run_choices(index, [Choice(frozenset()) for _ in index.views]))
    labels = [event.label for event in rebuilt if event.bytes > 0]
    assert any(label.startswith("layers.1 rebuilt ") for label in labels)
    assert any("workspace of sdpa" in label for label in labels)
    assert len(rebuilt) > len(kept)


def kept_events(trace: Trace, costs: Costs) -> tuple[AllocationEvent, ...]:
    """Of a step that keeps everything."""
    index = StepIndex(trace, costs)
    return allocation_events(run_choices(index, [Choice(view.everything) for view in index.views]))


def test_parameters_last_and_come_first() -> None:
    events = kept_events(*transformer(2).finish())
    assert {event.category for event in events if event.lasts} == {Category.PARAMETER}
    parameters = [event for event in events if event.bytes > 0 and event.category is Category.PARAMETER]
    assert list(events[: len(parameters)]) == parameters


def test_buffers_of_collectives_are_on_their_own_stream() -> None:
    trace, costs = transformer(1).finish()
    first = next(storage for storage in trace.storages if storage.category is Category.ACTIVATION)
    gathered = replace(first, category=Category.COMMUNICATION)
    trace = replace(trace, storages=tuple(gathered if each is first else each for each in trace.storages))
    events = kept_events(trace, costs)
    assert {event.label for event in events if event.stream == COMMUNICATION_STREAM} == {first.label}


def test_the_optimizers_state_is_made_where_the_optimizer_runs() -> None:
    trace, costs = transformer(1).finish()
    state = replace(trace.storages[0], id=len(trace.storages), category=Category.OPTIMIZER_STATE, born=-1)
    state = replace(state, dies=len(trace.ops) + 1, label="state")
    step = replace(trace.ops[-1], name="step", phase=Phase.OPTIMIZER)
    trace = replace(trace, ops=(*trace.ops, step), storages=(*trace.storages, state))
    events = kept_events(trace, costs)
    made = {event.label: (event.instant, event.made) for event in events if event.lasts and event.bytes > 0}
    assert made["state"] == (0, 2 * (len(trace.ops) - 1))
    assert all(at == (0, 0) for label, at in made.items() if label != "state")
