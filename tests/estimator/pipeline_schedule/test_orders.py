"""Orders of actions against the tables of torch.distributed.pipelining, and what every order has to be."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from plimsoll.artifacts.job import Layout, PipelineSchedule
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.pipeline_schedule.orders import Action, ActionKind, check_orders, in_flight, pipeline_orders
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds, simulate_pipeline

SIZES = [(1, 3), (2, 2), (2, 7), (4, 4), (4, 9), (8, 16), (16, 64)]
GPIPE, ONE_F_ONE_B = PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B
INTERLEAVED, ZERO_BUBBLE = PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE


def written(actions: Iterable[Any]) -> list[str]:
    """Torch's actions and ours in torch's notation; bubbles and the reduction of gradients are left out."""
    return [text for text in map(str, actions) if text != "None" and text[-1].isdigit() and "REDUCE" not in text]


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize(
    ("schedule", "theirs"), [(GPIPE, schedules.ScheduleGPipe), (ONE_F_ONE_B, schedules.Schedule1F1B)]
)
def test_gpipe_and_1f1b_are_torchs(schedule: PipelineSchedule, theirs: Any, ranks: int, micro_batches: int):
    table = theirs._get_pipeline_order(SimpleNamespace(_num_stages=ranks, _n_microbatches=micro_batches))
    expected = [written(table[rank]) for rank in range(ranks)]
    if schedule is ONE_F_ONE_B:  # torch 2.13 prints the last rank's forwards counted from one; it runs them from zero
        expected[-1] = [re.sub(r"F(\d+)", lambda found: f"F{int(found[1]) - 1}", text) for text in expected[-1]]
    ours = pipeline_orders(Layout(pp=ranks, micro_batches=micro_batches, schedule=schedule))
    assert [written(actions) for actions in ours] == expected


@pytest.mark.parametrize(
    ("theirs", "ranks", "virtual", "micro_batches"),
    [
        *((INTERLEAVED, *sizes) for sizes in ((2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 32), (4, 1, 8))),
        *((ZERO_BUBBLE, ranks, 1, micro_batches) for ranks, micro_batches in SIZES),
    ],
)
def test_interleaved_1f1b_and_zero_bubble_with_one_stage_per_rank_are_torchs(
    theirs: PipelineSchedule, ranks: int, virtual: int, micro_batches: int
):
    is_interleaved = theirs is INTERLEAVED
    kind: Any = schedules.ScheduleInterleaved1F1B if is_interleaved else schedules.ScheduleInterleavedZeroBubble
    own = SimpleNamespace(
        n_local_stages=virtual,
        microbatches_per_round=ranks if is_interleaved else micro_batches,
        pp_group_size=ranks,
        _n_microbatches=micro_batches,
    )
    ours = pipeline_orders(Layout(pp=ranks, micro_batches=micro_batches, schedule=theirs, virtual_stages=virtual))
    expected = [written(kind._calculate_single_rank_operations(own, rank)) for rank in range(ranks)]
    assert [written(actions) for actions in ours] == expected


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts whose pipeline is valid, those with fewer micro-batches than ranks included."""
    ranks, schedule = draw(st.integers(1, 7)), draw(st.sampled_from(PipelineSchedule))
    if schedule is INTERLEAVED:
        virtual, micro_batches = draw(st.integers(1, 4)), ranks * draw(st.integers(1, 3))
    else:
        virtual, micro_batches = 1, draw(st.integers(1, 12))
    return Layout(pp=ranks, virtual_stages=virtual, micro_batches=micro_batches, schedule=schedule)


seconds = st.floats(0.0, 10.0)
stage_seconds = st.builds(
    ActionSeconds,
    forward_seconds=seconds,
    input_gradient_seconds=seconds,
    weight_gradient_seconds=seconds,
    recompute_seconds=seconds,
    transfer_seconds=seconds,
)


@settings(max_examples=40, deadline=None)
@given(layouts(), st.data(), st.integers(0, 3))
def test_every_pipeline_ends_and_no_rank_does_two_things_at_once(layout: Layout, data: st.DataObject, ahead: int):
    orders = pipeline_orders(layout)
    check_orders(orders, layout.stages)
    stages = data.draw(st.lists(stage_seconds, min_size=layout.stages, max_size=layout.stages))
    timeline = simulate_pipeline(orders, stages, ahead=ahead)
    assert len(timeline.events) == sum(map(len, orders))
    work = [0.0] * layout.pp
    free = [0.0] * layout.pp
    for event in timeline.events:
        assert event.start_seconds - event.rebuild_seconds >= free[event.rank] - 1e-9
        free[event.rank] = event.end_seconds
        work[event.rank] += stages[event.action.stage].of(event.action.work)
        if event.action.work in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
            work[event.rank] += stages[event.action.stage].recompute_seconds
    assert timeline.busy_seconds == pytest.approx(work)
    assert all(most <= ahead for most in timeline.rebuilt_ahead)
    assert timeline.step_seconds >= max(work) - 1e-6
    ends = {event.action: event.end_seconds for event in timeline.events}
    for event in timeline.events:
        if event.action.work is ActionKind.FORWARD and event.action.stage:
            before = Action(event.action.stage - 1, ActionKind.FORWARD, event.action.micro_batch)
            assert event.start_seconds >= ends[before] + stages[event.action.stage].transfer_seconds - 1e-9


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_what_is_in_flight_never_exceeds_the_micro_batches(layout: Layout):
    most = in_flight(pipeline_orders(layout), layout.stages)
    assert all(1 <= each <= layout.micro_batches for each in most)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            Layout(pp=4, virtual_stages=2, micro_batches=10, schedule=INTERLEAVED),
            "micro-batches=10 is not a multiple of pp=4",
        ),
        (Layout(pp=4, virtual_stages=2, micro_batches=8), "virtual=2 cannot be combined with schedule=1f1b"),
    ],
)
def test_interleaving_wants_whole_rounds_and_stages_per_rank_want_interleaving(layout: Layout, message: str):
    with pytest.raises(InvalidLayout, match=message):
        pipeline_orders(layout)
