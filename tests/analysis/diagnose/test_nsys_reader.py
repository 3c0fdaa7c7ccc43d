"""Exports of Nsight Systems built from the documented schema, with known answers."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from analysis.diagnose.builders import BACKWARD, NsysBuilder
from analysis.diagnose.conftest import Compare
from plimsoll.analysis.diagnose.nsys_reader import read_nsys
from plimsoll.analysis.diagnose.profile import DeviceKind
from plimsoll.artifacts.finding import OverheadCause, ProfileOrigin, WorkPhase

US = 1000
"""Nanoseconds."""


def eager(*, extra: int = 0, gap: int = 0) -> NsysBuilder:
    """A step of a forward kernel and a backward one, ``extra`` forward kernels before the latter, after a gap."""
    export = NsysBuilder()
    export.range("step 0", 0, (100 + gap + 20 * extra) * US)
    export.range("forward", 1 * US, 9 * US)
    export.range("backward", 10 * US, 99 * US)
    export.kernel(2 * US, 20 * US, 40 * US, "gemm")
    at = 40 + gap
    for index in range(extra):
        export.kernel((41 + index) * US, at * US, (at + 20) * US, "gemm", thread=BACKWARD)
        at += 20
    export.kernel((50 if not gap else at - 2) * US, at * US, (at + 40) * US, "gemm_backward", thread=BACKWARD)
    return export


def test_a_kernel_belongs_to_the_range_of_its_launch(tmp_path: Path, compare: Compare):
    export = NsysBuilder()
    export.range("step 0", 0, 200 * US)
    export.range("aten::mm, seq = 4, op_id = 9", 1 * US, 5 * US, by_id=True)
    export.kernel(2 * US, 50 * US, 60 * US, "gemm")
    export.range("autograd::engine::evaluate_function: MmBackward0, seq = 4", 10 * US, 40 * US, thread=BACKWARD)
    export.range("MmBackward0, seq = 4", 11 * US, 39 * US, thread=BACKWARD)
    export.range("plimsoll.recompute: h.0", 12 * US, 20 * US, thread=BACKWARD)
    export.kernel(13 * US, 60 * US, 75 * US, "gemm", thread=BACKWARD)
    export.kernel(30 * US, 75 * US, 95 * US, "gemm_backward", thread=BACKWARD)
    finding = compare(export, export)
    assert finding.origin is ProfileOrigin.NSYS
    busy = {use.phase: use.busy_seconds for use in finding.plan.phases}
    assert busy == pytest.approx({WorkPhase.FORWARD: 10e-6, WorkPhase.RECOMPUTE: 15e-6, WorkPhase.BACKWARD: 20e-6})
    assert finding.plan.attributed_share == 1.0
    assert [row.name for row in finding.layers if row.recompute_seconds] == ["h.0"]


def test_gaps_and_overlapping_streams_are_counted_once(compare: Compare):
    both = eager(gap=60)
    both.kernel(3 * US, 30 * US, 50 * US, "gemm", stream=9)
    finding = compare(eager(), both)
    assert finding.plan.busy_seconds == pytest.approx(70e-6)
    assert finding.plan.idle_seconds == pytest.approx((20 + 50 + 20) * 1e-6)
    assert finding.plan.long_gaps == 0
    assert compare(eager(), eager(gap=60)).plan.long_gaps == 1


def test_recomputation_that_nobody_marked_is_inferred_from_repetition(compare: Compare):
    finding = compare(eager(), eager(extra=2))
    assert finding.seconds_of(OverheadCause.RECOMPUTE) == pytest.approx(40e-6)
    assert any("do not mark recomputation" in note for note in finding.notes)


def test_whole_graphs_are_busy_time_whose_inside_is_not_known(compare: Compare):
    def export(length: int) -> NsysBuilder:
        built = NsysBuilder()
        built.range("step 0", 0, 200 * US)
        built.graph(5 * US, 20 * US, (20 + length) * US)
        return built

    finding = compare(export(100), export(130))
    assert finding.plan.busy_seconds == pytest.approx(130e-6)
    assert finding.plan.graph_launches == 1
    assert finding.seconds_of(OverheadCause.UNEXPLAINED) == pytest.approx(30e-6)
    assert any("--cuda-graph-trace=node" in note for note in finding.notes)


def test_copies_and_fills_have_their_bytes(tmp_path: Path, compare: Compare):
    moved = eager()
    moved.copy(4 * US, 41 * US, 45 * US, 1 << 20)
    moved.fill(5 * US, 85 * US, 90 * US, 1 << 10)
    finding = compare(eager(), moved)
    assert finding.plan.copied_bytes == (1 << 20) + (1 << 10)
    assert finding.seconds_of(OverheadCause.COPIES) == pytest.approx(5e-6)


def test_the_device_and_its_bandwidth_are_read(tmp_path: Path):
    export = eager()
    export.gpu("NVIDIA H100 80GB HBM3", 3_352_320_000_000)
    profile = read_nsys(export.write(tmp_path / "export.sqlite"))
    assert profile.device_names == {0: "NVIDIA H100 80GB HBM3"}
    assert profile.bandwidth_bytes_per_second == {0: 3_352_320_000_000.0}
    assert {span.kind for span in profile.device} == {DeviceKind.KERNEL}
    assert {span.name for span in profile.host} >= {"cudaLaunchKernel", "forward"}


def test_without_nvtx_kernels_are_compared_and_the_notes_say_what_is_missing(compare: Compare):
    def export(kernels: int) -> NsysBuilder:
        built = NsysBuilder()
        for index in range(kernels):
            built.kernel((index + 1) * 2 * US, (20 + 10 * index) * US, (30 + 10 * index) * US, "gemm")
        return built

    finding = compare(export(10), export(10))
    assert finding.plan.attributed_share == 0.0
    assert finding.plan.steps == 1
    assert any("does not mark steps" in note for note in finding.notes)
    assert any("do not contain modules" in note for note in finding.notes)


def test_ranges_that_never_ended_and_marks_are_left_out(tmp_path: Path):
    export = eager()
    export.range("still open", 5, None)
    export.rows["NVTX_EVENTS"].append((7, 7, 34, "a mark", 0, None))
    names = {span.name for span in read_nsys(export.write(tmp_path / "export.sqlite")).host}
    assert "forward" in names
    assert not names & {"still open", "a mark"}


def test_correlation_ids_count_per_process(tmp_path: Path, compare: Compare):
    export = eager()
    other_process = (1 << 56) | (8 << 24) | 100
    export.rows["CUPTI_ACTIVITY_KIND_RUNTIME"] += [
        (0, 1, other_process, correlation, 1, 0) for correlation in range(1, 4)
    ]
    finding = compare(eager(), export)
    assert finding.plan.attributed_share == 1.0
    assert finding.overhead_seconds == 0.0


def test_columns_that_an_older_export_lacks_are_done_without(tmp_path: Path):
    path = eager().write(tmp_path / "export.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("ALTER TABLE NVTX_EVENTS DROP COLUMN textId")
        database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN gridX")
    assert len(read_nsys(path).device) == 2
