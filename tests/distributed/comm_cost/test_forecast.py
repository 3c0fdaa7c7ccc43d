"""What pays follows from bytes, bandwidth, local work and what computing hides."""

from __future__ import annotations

import pytest

from plimsoll.artifacts.traffic import LinkPoint, Transfer
from plimsoll.distributed.comm_cost.figures import ReplicaFigures
from plimsoll.distributed.comm_cost.forecast import (
    Scene,
    break_even_bandwidth,
    break_even_hidden_share,
    fit_link,
    hidden_share,
    predict_saved,
    predict_step,
    sizes_to_time,
    transfer_seconds,
)
from traffic_samples import MIB, UNCOMPRESSED_PROGRAM, make_job, make_program


def test_a_fit_finds_the_latency_and_bandwidth_that_made_the_points():
    points = [
        LinkPoint(payload_bytes=size, measured_seconds=2e-3 + Transfer.ALL_GATHER.wire_bytes(size, 8) / 5e8)
        for size in (1024, 65536, 4 * MIB)
    ]
    fit = fit_link(Transfer.ALL_GATHER, points, 8)
    assert fit.latency_seconds == pytest.approx(2e-3)
    assert fit.bytes_per_second == pytest.approx(5e8)
    assert fit.relative_error < 1e-6
    assert transfer_seconds(fit, MIB, 8) == pytest.approx(2e-3 + 7 * MIB / 5e8)


def test_a_link_that_is_all_latency_has_no_end_of_bandwidth():
    fit = fit_link(
        Transfer.ALL_REDUCE, [LinkPoint(payload_bytes=size, measured_seconds=0.1) for size in (100, 1000)], 2
    )
    assert transfer_seconds(fit, 100 * MIB, 2) == pytest.approx(0.1)


def test_one_rank_sends_nothing_and_an_all_gather_grows_with_the_ranks_as_an_all_reduce_does_not():
    assert not any(kind.wire_bytes(1000, 1) for kind in Transfer if kind is not Transfer.BROADCAST)
    assert Transfer.ALL_GATHER.wire_bytes(100, 64) == 6300
    assert Transfer.ALL_REDUCE.wire_bytes(100, 64) == pytest.approx(196.9, abs=0.1)


def test_the_step_is_computing_what_is_not_hidden_and_the_optimizer():
    # 4 MiB at 10 MiB/s: 0.41 s per bucket; the first hides behind the second half of computing.
    predicted = predict_step(make_job(), UNCOMPRESSED_PROGRAM)
    assert predicted.value == pytest.approx(1.0 + 0.41 + 0.1)
    assert predicted.low < predicted.value < predicted.high
    assert hidden_share(make_job(), UNCOMPRESSED_PROGRAM) == pytest.approx(0.5)


def test_a_sixteenth_of_the_bytes_saves_most_of_what_is_exposed():
    saved = predict_saved(make_job(), make_program("x", MIB // 4), UNCOMPRESSED_PROGRAM)
    assert saved.value == pytest.approx((0.41 - 0.035) / 1.51)
    assert saved.low < saved.value < saved.high


def test_local_work_that_takes_longer_than_what_it_saves_costs():
    program = make_program("x", MIB // 4, local_seconds=0.8)
    assert predict_saved(make_job(), program, UNCOMPRESSED_PROGRAM).high < 0


def test_at_the_break_even_bandwidth_both_steps_take_equally_long():
    job, program = make_job(bytes_per_second=1000 * MIB), make_program("x", MIB // 4, local_seconds=0.1)
    rate = break_even_bandwidth(job, program, UNCOMPRESSED_PROGRAM)
    scene = Scene(bandwidth=rate / (1000 * MIB))
    assert job.step_seconds(program, scene) == pytest.approx(job.step_seconds(UNCOMPRESSED_PROGRAM, scene), rel=1e-4)
    slower = Scene(bandwidth=scene.bandwidth / 2)
    assert job.step_seconds(program, slower) < job.step_seconds(UNCOMPRESSED_PROGRAM, slower)


def test_a_method_that_sends_more_pays_on_no_link():
    program = make_program("x", 8 * MIB, local_seconds=0.1)
    assert break_even_bandwidth(make_job(), program, UNCOMPRESSED_PROGRAM) is None
    assert break_even_hidden_share(make_job(), program, UNCOMPRESSED_PROGRAM) is None


def test_the_break_even_overlap_is_where_what_is_saved_of_the_link_pays_for_the_local_work():
    # 0.82 s of transfers become 0.07; 0.2 s of local work in each bucket eat 0.4 of that.
    program = make_program("x", MIB // 4, local_seconds=0.2)
    found = break_even_hidden_share(make_job(), program, UNCOMPRESSED_PROGRAM)
    assert found == pytest.approx(1 - 0.4 / 0.75)


def test_sizes_to_time_span_what_is_sent():
    gathered = make_program("topk", 40_000, transfer=Transfer.ALL_GATHER)
    sizes = sizes_to_time([UNCOMPRESSED_PROGRAM, gathered, make_program("y", 8)])
    assert sizes[Transfer.ALL_REDUCE][-1] == 4 * MIB
    assert sizes[Transfer.ALL_REDUCE][0] == 4096
    assert sizes[Transfer.ALL_GATHER] == (2500, 5000, 10000, 20000, 40000)


def test_on_a_machine_at_half_speed_computing_and_local_work_take_twice_as_long_and_the_link_does_not():
    program = make_program("x", MIB, local_seconds=0.2)
    measured = ReplicaFigures(make_job(), (UNCOMPRESSED_PROGRAM, program), 8 * MIB, alone_seconds=0.9)
    slower = measured.when_alone_takes(1.8)
    assert slower.job.step.measured_compute_seconds == pytest.approx(2.0)
    assert [bucket.measured_ready_seconds for bucket in slower.job.step.buckets] == pytest.approx([1.0, 2.0])
    assert slower.job.timeline(slower.programs[1]).local_seconds == pytest.approx(0.8)
    before, after = measured.job.timeline(program), slower.job.timeline(slower.programs[1])
    assert after.transfer_seconds == before.transfer_seconds
    assert slower.when_alone_takes(0.9).job.step.measured_compute_seconds == pytest.approx(1.0)
