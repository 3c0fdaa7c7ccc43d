"""The timeline of a pipeline against what the literature derives, orders that cannot run, and recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.artifacts.job import Layout, PipelineSchedule
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.pipeline_schedule.orders import (
    Action,
    ActionKind,
    Orders,
    held_bytes,
    in_flight,
    pipeline_orders,
)
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds, bubble_growth, simulate_pipeline

SIZES = [(1, 4), (2, 4), (4, 8), (8, 8), (8, 32), (16, 32)]
EQUAL = ActionSeconds(forward_seconds=1.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.0)


def layout(ranks: int, micro_batches: int, schedule: str = "1f1b", virtual: int = 1) -> Layout:
    return Layout(pp=ranks, micro_batches=micro_batches, schedule=PipelineSchedule(schedule), virtual_stages=virtual)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b_is_the_textbooks(schedule: str, p: int, m: int):
    stage = ActionSeconds(forward_seconds=2.0, input_gradient_seconds=1.5, weight_gradient_seconds=2.5)
    timeline = simulate_pipeline(pipeline_orders(layout(p, m, schedule)), [stage] * p)
    assert timeline.step_seconds == pytest.approx((m + p - 1) * 6.0)
    assert timeline.bubble_shares == pytest.approx([(p - 1) / (m + p - 1)] * p)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 3, 64)])
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(p: int, v: int, m: int):
    timeline = simulate_pipeline(pipeline_orders(layout(p, m, "interleaved", v)), [EQUAL] * p * v)
    assert timeline.bubble_share == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zero_bubble_idles_as_qi_et_al_derive(p: int, m: int):
    stage = ActionSeconds(forward_seconds=1.0, input_gradient_seconds=1.0, weight_gradient_seconds=0.75)
    timeline = simulate_pipeline(pipeline_orders(layout(p, m, "zero-bubble")), [stage] * p)
    assert timeline.idle_seconds == pytest.approx([(p - 1) * (1.0 + 1.0 - 0.75)] * p)
    thirds = simulate_pipeline(pipeline_orders(layout(p, m, "zero-bubble")), [EQUAL] * p)
    plain = simulate_pipeline(pipeline_orders(layout(p, m)), [EQUAL] * p)
    assert thirds.idle_seconds[0] == pytest.approx(plain.idle_seconds[0] / 3)


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 2)])
def test_1f1b_holds_fewer_micro_batches_the_later_the_stage(p: int, m: int):
    assert in_flight(pipeline_orders(layout(p, m)), p) == tuple(min(m, p - s) for s in range(p))
    assert in_flight(pipeline_orders(layout(p, m, "gpipe")), p) == (m,) * p
    assert max(in_flight(pipeline_orders(layout(p, m, "zero-bubble")), p)) == min(m, p)


def test_interleaving_holds_more_on_the_first_rank_than_1f1b_does():
    # Narayanan et al. 2021: (v - 1) p + 2 (p - 1) + 1 chunks of one v-th of the layers, so 1 + (p - 1) / (p v) times as much.
    p, v = 4, 2
    chunks = held_bytes(pipeline_orders(layout(p, 16, "interleaved", v)), [1] * (p * v))
    assert chunks == tuple((v - 1) * p + 2 * (p - 1 - s) + 1 for s in range(p))
    assert chunks[0] / v / held_bytes(pipeline_orders(layout(p, 16)), [1] * p)[0] == 1 + (p - 1) / (p * v)


def test_transfers_delay_who_waits_for_them_and_nobody_else():
    far = replace(EQUAL, transfer_seconds=0.5)
    timeline = simulate_pipeline(pipeline_orders(layout(2, 1)), [EQUAL, far])
    starts = {str(event.action): event.start_seconds for event in timeline.events}
    assert starts == {"0F0": 0.0, "1F0": 1.5, "1B0": 2.5, "0B0": 5.0}


def test_a_slow_stage_sets_the_pace():
    slow = ActionSeconds(forward_seconds=2.0, input_gradient_seconds=2.0, weight_gradient_seconds=2.0)
    timeline = simulate_pipeline(pipeline_orders(layout(3, 12)), [EQUAL, slow, EQUAL])
    assert timeline.busy_seconds == (36.0, 72.0, 36.0)
    assert timeline.idle_seconds[1] < timeline.idle_seconds[0]
    assert timeline.step_seconds >= 72.0


def test_recomputation_lengthens_the_bubble_and_running_ahead_takes_some_back():
    p, m = 4, 8
    stage = replace(EQUAL, recompute_seconds=1.0)
    growth = bubble_growth(pipeline_orders(layout(p, m)), [stage] * p)
    assert growth.added_seconds == pytest.approx(m + p - 1)
    assert growth.regained_seconds == pytest.approx(p - 1)
    assert growth.inside.idle_seconds == pytest.approx([(p - 1) * 4.0] * p)
    assert growth.ahead.hidden_seconds[-1] == 0.0, "the last stage's backward follows its forward at once"
    assert min(growth.ahead.hidden_seconds[:-1]) > 0
    assert growth.ahead.rebuilt_ahead == (1, 1, 1, 0)


def test_running_further_ahead_hides_more_and_holds_more():
    stage = replace(EQUAL, recompute_seconds=1.0)
    orders = pipeline_orders(layout(6, 12))
    one, two = (simulate_pipeline(orders, [*[stage] * 5, EQUAL], ahead=ahead) for ahead in (1, 2))
    assert sum(two.hidden_seconds) > sum(one.hidden_seconds)
    assert max(two.rebuilt_ahead) > max(one.rebuilt_ahead) == 1
    assert two.step_seconds < one.step_seconds


def test_a_step_of_16384_ranks_is_one_of_its_pipelines():
    spread = Layout(dp=128, tp=8, pp=16, micro_batches=64)
    assert spread.ranks == 16_384
    timeline = simulate_pipeline(pipeline_orders(spread), [EQUAL] * 16)
    assert timeline.bubble_share == pytest.approx(15 / 79)


def orders_of(*ranks: str) -> Orders:
    """Orders written like ``0F0 0B0``."""
    return tuple(tuple(Action(int(t[0]), ActionKind(t[1]), int(t[2])) for t in text.split()) for text in ranks)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (orders_of("0F0 0B0", "1B0 1F0"), "rank 0 cannot run 0B0 before 1B0|rank 1 cannot run 1B0 before 1F0"),
        (orders_of("0F0", "1F0 1B0"), "Stage 0 does not run micro-batch 0"),
        (orders_of("0F0 0F0 0B0", "1F0 1B0"), "0F0 runs twice"),
        (orders_of("0F0 0B0 1F0", "1B0"), "Stage 1 runs on two ranks"),
        (orders_of("0F0 0B0 0W0", "1F0 1B0"), "Stage 0 does not run micro-batch 0"),
        (orders_of("0F0 0B0", "2F0 2B0"), "2F0 is not valid in a pipeline of 2 stages"),
    ],
    ids=["deadlock", "missing", "doubled", "moved", "one half", "unknown stage"],
)
def test_orders_that_cannot_run_are_refused(orders: Orders, message: str):
    with pytest.raises(InvalidLayout, match=message):
        simulate_pipeline(orders, [EQUAL] * 2)
