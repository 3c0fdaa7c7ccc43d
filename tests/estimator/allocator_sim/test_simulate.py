"""Steps of allocations, repeated: hand-made ones, random ones, and those of simulated plans."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from planning.builders import transformer
from plimsoll.artifacts.memory_use import AllocationEvent, AllocatorUse
from plimsoll.artifacts.trace import Category
from plimsoll.estimator.allocator_sim.allocator import (
    AllocatorSettings,
    CachingAllocator,
    DeviceFull,
    simulate_allocator,
)
from plimsoll.estimator.allocator_sim.blocks import SMALLEST_BYTES, Block, round_up
from plimsoll.planning.choice import Choice
from plimsoll.planning.describe import allocation_events
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.units import MIB

EXPANDABLE = AllocatorSettings(is_expandable=True)
SIZES = st.sampled_from([1, 700, 100_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 21 * MIB + 5, 60 * MIB])
REQUESTS = st.lists(st.tuples(SIZES, st.integers(0, 1), st.floats(0, 1)), min_size=1, max_size=80)


def event(block: int, mib: float, **more: Any) -> AllocationEvent:
    """An allocation of an activation, or with fewer than 0 MiB its end."""
    usual = {"instant": 0, "category": Category.ACTIVATION, "lasts": False, "stream": 0} | more
    return AllocationEvent(block=block, bytes=int(mib * MIB), label=f"block {block}", **usual)


def events_of(requests: Iterable[tuple[int, int, float]]) -> list[AllocationEvent]:
    """Allocations in order; a share of what is alive is let go after each, and the rest at the end."""
    found: list[AllocationEvent] = []
    alive: list[AllocationEvent] = []
    for number, (size, stream, share) in enumerate(requests):
        made = event(number, size / MIB, instant=number, stream=stream)
        found.append(made)
        alive.append(made)
        if share > 0.5:
            over = alive.pop(int((share - 0.5) * 2 * (len(alive) - 1)))
            found.append(event(over.block, -over.bytes / MIB, instant=number, stream=over.stream))
    found += [event(each.block, -each.bytes / MIB, instant=len(found), stream=each.stream) for each in alive]
    return found


class Overlaps:
    """Every live block of an allocator by address."""

    def __init__(self) -> None:
        self.alive: dict[int, Block] = {}

    def check(self, block: Block) -> None:
        for other in self.alive.values():
            assert block.address + block.size <= other.address or other.address + other.size <= block.address


@settings(max_examples=30, deadline=None)
@given(requests=REQUESTS, is_expandable=st.booleans(), limit_mib=st.sampled_from([None, 90, 200]))
def test_live_blocks_never_overlap_and_what_is_reserved_covers_them(requests, is_expandable: bool, limit_mib):
    limit_bytes = None if limit_mib is None else limit_mib * MIB
    allocator = CachingAllocator(AllocatorSettings(limit_bytes=limit_bytes, is_expandable=is_expandable))
    overlaps = Overlaps()
    blocks: dict[int, Block] = {}
    for each in events_of(requests):
        if each.bytes < 0:
            if each.block in blocks:
                allocator.release(overlaps.alive.pop(blocks.pop(each.block).address))
            continue
        try:
            block = allocator.allocate(each.bytes, stream=each.stream)
        except DeviceFull:
            continue
        overlaps.check(block)
        overlaps.alive[block.address] = blocks[each.block] = block
        assert block.size >= round_up(each.bytes, SMALLEST_BYTES)
        assert allocator.allocated_bytes == sum(other.size for other in blocks.values())
        assert allocator.reserved_bytes >= allocator.allocated_bytes + allocator.inactive_split_bytes
        assert limit_bytes is None or allocator.reserved_bytes <= limit_bytes
    allocator.give_back()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@settings(max_examples=30, deadline=None)
@given(requests=REQUESTS)
def test_figures_of_a_repeated_step_hold_together(requests):
    events = events_of(requests)
    plain, expandable = simulate_allocator(events), simulate_allocator(events, EXPANDABLE)
    for use in (plain, expandable):
        assert use.requested_peak_bytes <= use.allocated_peak_bytes <= use.reserved_peak_bytes
        assert use.rounding_bytes >= 0
        assert use.reserved_peak_bytes >= use.inactive_split_bytes
        assert not use.refused_bytes
    # Expandable segments cut to the byte; they round what is reserved up to whole pages, once per stream and pool.
    assert expandable.allocated_peak_bytes <= plain.allocated_peak_bytes


def test_expandable_segments_reserve_no_more_but_for_their_pages_on_most_random_steps():
    draw = random.Random(0)
    sizes = [700, 100_000, 2 * MIB, 3 * MIB, 9 * MIB, 13 * MIB, 21 * MIB + 5, 60 * MIB]
    wins = 0
    for _ in range(60):
        events = events_of([(draw.choice(sizes), 0, draw.random()) for _ in range(60)])
        wins += (
            simulate_allocator(events, EXPANDABLE).reserved_peak_bytes
            <= simulate_allocator(events).reserved_peak_bytes + 20 * MIB
        )
    assert 50 <= wins < 60


def test_a_step_is_repeated_until_it_asks_nothing_of_the_device():
    use = simulate_allocator([event(0, 30), event(1, 5), event(0, -30), event(1, -5)])
    assert (use.device_allocations, use.steady_device_allocations, use.steps) == (2, 0, 2)
    assert use.reserved_peak_bytes == 50 * MIB
    assert (use.segments, use.retries) == (2, 0)


def test_what_lasts_is_allocated_once():
    step = [event(0, 30, lasts=True), event(1, 5), event(1, -5), event(0, -30, lasts=True)]
    use = simulate_allocator(step)
    assert (use.requested_peak_bytes, use.reserved_peak_bytes, use.steps) == (35 * MIB, 50 * MIB, 2)


def test_the_optimizers_state_lands_in_what_backward_leaves():
    state = replace(event(0, 20, category=Category.OPTIMIZER_STATE, lasts=True), made=8)
    gone = event(0, -20, instant=99, category=Category.OPTIMIZER_STATE, lasts=True)
    activation = [event(1, 40, instant=1), event(1, -40, instant=8)]
    gradient = [
        event(2, 8, instant=3, category=Category.GRADIENT),
        event(2, -8, instant=20, category=Category.GRADIENT),
    ]
    rest = [activation[0], gradient[0], activation[1], event(3, 1, instant=8), event(3, -1, instant=9), gradient[1]]
    use = simulate_allocator([state, *rest, gone])
    # The state takes 20 of the activation's 40 MiB in the first step, so the second step needs another 40.
    assert use.reserved_peak_bytes == (40 + 20 + 2 + 40) * MIB
    assert use.steady_device_allocations == 0
    assert use.steps == 3
    without = simulate_allocator(rest)
    assert without.reserved_peak_bytes == (40 + 20 + 2) * MIB
    at_once = simulate_allocator([replace(state, made=0), *rest, gone])
    assert at_once.reserved_peak_bytes == (20 + 40 + 20 + 2) * MIB


def test_a_request_that_the_device_refuses_is_named():
    use = simulate_allocator([event(0, 30), event(1, 40)], AllocatorSettings(limit_bytes=60 * MIB))
    assert (use.refused_bytes, use.refused_label) == (40 * MIB, "block 1")
    assert (use.retries, use.reserved_peak_bytes) == (1, 30 * MIB)


def test_a_step_that_always_retries_ends():
    step = [event(0, 40), event(0, -40), event(1, 40, stream=1), event(1, -40, stream=1)]
    use = simulate_allocator(step, AllocatorSettings(limit_bytes=60 * MIB), most_steps=4)
    assert (use.steps, use.steady_device_allocations) == (4, 2)
    assert use.retries == 7


@pytest.fixture(scope="module")
def plans() -> list[tuple[int, AllocatorUse, AllocatorUse]]:
    index = StepIndex(*transformer(12, width=3 * MIB + 4000).finish())
    found = []
    for keeps in (True, False):
        simulation = run_choices(index, [Choice(view.everything if keeps else frozenset()) for view in index.views])
        events = allocation_events(simulation)
        found.append((simulation.peak_bytes, simulate_allocator(events), simulate_allocator(events, EXPANDABLE)))
    return found


def test_simulated_plans_are_allocated_at_their_peak_and_settle(plans):
    for peak_bytes, plain, expandable in plans:
        assert plain.requested_peak_bytes == expandable.requested_peak_bytes == peak_bytes
        assert plain.steady_device_allocations == expandable.steady_device_allocations == 0
        assert expandable.reserved_peak_bytes <= plain.reserved_peak_bytes
        assert plain.reserved_peak_bytes - plain.allocated_peak_bytes < 0.25 * peak_bytes
        assert expandable.reserved_peak_bytes - expandable.allocated_peak_bytes < 0.06 * peak_bytes
