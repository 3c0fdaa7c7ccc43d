"""The peak of one rank, action by action, against sums by hand and against what one in-flight count gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.artifacts.job import Layout, PipelineSchedule
from plimsoll.estimator.pipeline_schedule.orders import Action, ActionKind, in_flight, most_in_flight, pipeline_orders
from plimsoll.estimator.pipeline_schedule.rank_memory import StageMemory, rank_peak

STAGE = StageMemory(
    lasting_bytes=1000, forward_bytes=30, held_bytes=10, backward_bytes=50, input_gradient_bytes=50, between_bytes=10
)


def layout(schedule: PipelineSchedule, ranks: int, micro_batches: int, virtual: int = 1) -> Layout:
    return Layout(pp=ranks, micro_batches=micro_batches, schedule=schedule, virtual_stages=virtual)


@pytest.mark.parametrize(("rank", "waiting"), [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_in_1f1b_a_backward_runs_beside_the_micro_batches_that_wait(rank: int, waiting: int):
    actions = pipeline_orders(layout(PipelineSchedule.ONE_F_ONE_B, 4, 8))[rank]
    peak = rank_peak(actions, {rank: STAGE})
    assert peak.peak_bytes == 1000 + 10 * waiting + 50
    assert peak.moment.startswith("backward of micro-batch")


@given(st.sampled_from(PipelineSchedule), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_micro_batches_in_flight_are_those_of_the_timeline(
    schedule: PipelineSchedule, ranks: int, rounds: int, virtual: int
):
    virtual = virtual if schedule is PipelineSchedule.INTERLEAVED else 1
    orders = pipeline_orders(layout(schedule, ranks, ranks * rounds, virtual))
    found = {stage: most for actions in orders for stage, most in most_in_flight(actions).items()}
    assert tuple(found[stage] for stage in sorted(found)) == in_flight(orders, ranks * virtual)


@given(st.sampled_from(PipelineSchedule), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_rank_of_one_stage_peaks_where_the_most_micro_batches_wait(
    schedule: PipelineSchedule, ranks: int, rounds: int
):
    for rank, actions in enumerate(pipeline_orders(layout(schedule, ranks, ranks * rounds))):
        most = most_in_flight(actions)[rank]
        stage = replace(STAGE, lasting_bytes=7, forward_bytes=10, backward_bytes=40, input_gradient_bytes=40)
        assert rank_peak(actions, {rank: stage}, beside_bytes=5).peak_bytes <= 12 + 10 * (most - 1) + 40
        assert rank_peak(actions, {rank: stage}, beside_bytes=5).peak_bytes >= 12 + 40


def test_what_is_held_between_the_halves_of_a_backward_counts_until_its_second():
    zero_bubble = pipeline_orders(layout(PipelineSchedule.ZERO_BUBBLE, 4, 8))[3]
    whole = rank_peak(zero_bubble, {3: STAGE}).peak_bytes
    split = replace(STAGE, input_gradient_bytes=65, between_bytes=25)
    # The last rank runs ahead with three input gradients before the first weight gradients.
    assert rank_peak(zero_bubble, {3: split}).peak_bytes == 1000 + 3 * 25 + 65
    assert whole == 1000 + 3 * 10 + 50


def test_outputs_stay_and_are_merged_when_the_step_ends():
    last = StageMemory(
        lasting_bytes=1000, forward_bytes=30, held_bytes=10, backward_bytes=20, left_bytes=8, merged_bytes=32
    )
    actions = pipeline_orders(layout(PipelineSchedule.ONE_F_ONE_B, 2, 4))[1]
    peak = rank_peak(actions, {1: last})
    assert peak.peak_bytes == 1000 + 4 * 8 + 32
    assert peak.moment == "merging the outputs"


def test_stages_of_one_rank_are_counted_together_as_their_actions_come():
    light = StageMemory(lasting_bytes=10, forward_bytes=1, held_bytes=1, backward_bytes=2)
    heavy = StageMemory(lasting_bytes=100, forward_bytes=50, held_bytes=40, backward_bytes=60)
    written = ("0F0", "0F1", "2F0", "2B0", "0B0", "2F1", "2B1", "0B1")
    actions = [Action(int(stage), ActionKind(work), int(batch)) for stage, work, batch in written]
    peak = rank_peak(actions, {0: light, 2: heavy})
    assert peak.peak_bytes == 110 + 2 * 1 + 60
    assert peak.action == Action(2, ActionKind.BACKWARD, 0)
