"""A run's own figures beside an estimate: numbers, snapshots and traces are read, what differs is named, a device corrected."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import plimsoll
from plimsoll.analysis.diagnose.measured_run import RunFigures, correct_device, read_run, save_correction, set_beside
from plimsoll.artifacts.estimate import Estimate, MeasuredFigure
from plimsoll.artifacts.store import load_any
from plimsoll.errors import InvalidOption, UnknownDevice
from plimsoll.planning.costing.devices import find_device
from plimsoll.units import MIB


@pytest.fixture(scope="module")
def estimated() -> Estimate:
    return plimsoll.estimate("llama-tiny", 4, sequence=256, device="H100")


def beside(estimated: Estimate, **figures: Any) -> dict[str, MeasuredFigure]:
    found = set_beside(estimated, RunFigures(**figures), Path("run.json"))
    return {figure.name: figure for figure in found.measured}


def item(estimated: Estimate, name: str) -> int:
    return next(each.bytes or 0 for each in estimated.tightest.items if each.name == name)


@pytest.mark.long
def test_a_run_that_is_as_estimated_lies_inside_every_bar(estimated: Estimate):
    stage = estimated.tightest
    workspaces = item(estimated, "cuBLAS workspaces")
    found = beside(
        estimated,
        allocated=stage.allocated_bytes + item(estimated, "allocator rounding") + workspaces,
        reserved=(stage.reserved_bytes or 0) + workspaces,
        device=stage.total_bytes,
        step_seconds=estimated.throughput.step_seconds,
        tokens_per_second=estimated.throughput.tokens_per_second,
        items={"parameters": item(estimated, "parameters")},
    )
    assert len(found) == 8
    for name, figure in found.items():
        assert figure.is_inside, name
        assert figure.estimated == pytest.approx(figure.measured), name
        assert figure.note == ""


def test_what_differs_is_named_by_the_part_that_differs(estimated: Estimate):
    stage, workspaces = estimated.tightest, item(estimated, "cuBLAS workspaces")
    allocated = stage.allocated_bytes + item(estimated, "allocator rounding") + workspaces
    found = beside(estimated, allocated=allocated, reserved=allocated + 900 * MIB, device=allocated + 4000 * MIB)
    assert found["peak allocated"].is_inside
    assert not found["reserved, not allocated"].is_inside
    assert "fragmentation" in found["reserved, not allocated"].note
    assert "NCCL" in found["outside the allocator"].note
    shown = str(set_beside(estimated, RunFigures(reserved="3GiB"), Path("run.json")))
    assert "Compared with run.json" in shown
    assert "0 of 1 measured figures lie inside" in shown


def test_a_comparison_is_saved_with_its_estimate(estimated: Estimate, tmp_path: Path):
    found = set_beside(estimated, RunFigures(step_seconds=1.0), Path("run.json"))
    found.save(tmp_path / "estimate.json")
    assert load_any(tmp_path / "estimate.json") == found


def snapshot() -> dict[str, Any]:
    """Two devices; the second one had 96 MiB allocated and 160 MiB reserved at most, and less at the end."""
    history = [
        {"action": "segment_alloc", "size": 64 * MIB},
        {"action": "alloc", "size": 64 * MIB},
        {"action": "free_requested", "size": 64 * MIB},
        {"action": "free_completed", "size": 64 * MIB},
        {"action": "segment_free", "size": 64 * MIB},
        {"action": "alloc", "size": 16 * MIB},
    ]
    segments = [
        {"device": 0, "allocated_size": 2 * MIB, "total_size": 20 * MIB},
        {"device": 1, "allocated_size": 48 * MIB, "total_size": 96 * MIB},
    ]
    return {"segments": segments, "device_traces": [[], history], "allocator_settings": {}}


@pytest.mark.parametrize("write", [pickle.dumps, lambda node: json.dumps(node).encode()], ids=["pickle", "json"])
def test_a_snapshot_gives_the_peaks_of_the_device_that_reserves_most(write: Any, tmp_path: Path):
    path = tmp_path / "snapshot"
    path.write_bytes(write(snapshot()))
    found = read_run(path)
    assert (found.allocated, found.reserved) == (96 * MIB, 160 * MIB)


def test_a_snapshot_without_history_is_as_it_was_when_it_was_taken(tmp_path: Path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot() | {"device_traces": []}))
    assert (read_run(path).allocated, read_run(path).reserved) == (48 * MIB, 96 * MIB)


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("was-here"),)


def test_a_pickle_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [_Harmful()]}))
    with pytest.raises(InvalidOption, match="a snapshot of the allocator never contains such an object"):
        read_run(path)
    assert not (tmp_path / "was-here").exists()


def chrome_trace() -> dict[str, Any]:
    """Two steps of 10 ms, each with 6 ms of a product, 1 ms of another kernel and a collective."""
    events: list[dict[str, Any]] = []
    for step in range(2):
        at = 1000.0 + step * 10_000
        events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{step}",
                "pid": 1,
                "tid": 1,
                "ts": at,
                "dur": 10_000,
            }
        )
        for name, begin, length in (
            ("sm90_gemm_bf16", 0, 6000),
            ("elementwise", 6000, 1000),
            ("ncclDevKernel", 7000, 2000),
        ):
            where = {"device": 0, "stream": 7, "correlation": 1}
            events.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": name,
                    "pid": 0,
                    "tid": 7,
                    "ts": at + begin,
                    "dur": length,
                    "args": where,
                }
            )
    return {"traceEvents": events}


def test_a_trace_gives_seconds_of_steps_and_of_kernels_by_kind(tmp_path: Path, estimated: Estimate):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace()))
    found = read_run(path)
    assert found.step_seconds == pytest.approx(0.010)
    assert found.product_seconds == pytest.approx(0.006)
    assert found.other_seconds == pytest.approx(0.001)
    figures = {figure.name: figure for figure in set_beside(estimated, found, path).measured}
    seconds = estimated.tightest.seconds
    assert figures["products and attention"].estimated == pytest.approx(seconds.product_seconds)
    kernels = seconds.forward_seconds + seconds.backward_seconds + seconds.optimizer_seconds
    assert figures["other kernels"].estimated == pytest.approx(kernels - seconds.product_seconds)


def test_a_file_of_numbers_may_name_a_snapshot_and_a_trace(tmp_path: Path):
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(snapshot()))
    (tmp_path / "b.json").write_text(json.dumps(chrome_trace()))
    (tmp_path / "run.json").write_text('{"snapshot": "a.pickle", "trace": "b.json", "step_seconds": 0.5}')
    found = read_run(tmp_path / "run.json")
    assert (found.allocated, found.step_seconds) == (96 * MIB, 0.5)
    assert found.product_seconds == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be compared with the estimate"),
        ('{"speed": 3}', "speed"),
        ('{"step_seconds": 0}', "step_seconds is 0, but a measured figure must be above 0"),
        ('{"tokens_per_second": -3.5}', "tokens_per_second is -3.5"),
        ('{"allocated": "5 bananas"}', "allocated is '5 bananas'"),
        ('{"items": {"parameters": "-5GiB"}}', "parameters is '-5GiB'"),
        ("[]", "cannot be compared with the estimate"),
        ('{"segments": [{}]}', "the snapshot is incomplete: 'allocated_size'"),
        ('{"segments": []}', "does not contain segments"),
        ('{"trace": "run.json"}', "refers to run.json, which refers to further files"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}',
            "does not mark steps",
        ),
    ],
)
def test_what_is_no_run_is_refused(content: str, words: str, tmp_path: Path):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InvalidOption, match=words):
        read_run(tmp_path / "run.json")


def test_figures_that_the_estimate_does_not_have_are_refused(estimated: Estimate):
    with pytest.raises(InvalidOption, match=r"does not have an item 'gradient'.*\n.*try gradients"):
        beside(estimated, items={"gradient": 1})
    with pytest.raises(InvalidOption, match="give a stage from 0 to 0"):
        beside(estimated, stage=1, step_seconds=1.0)
    with pytest.raises(InvalidOption, match="does not contain a figure"):
        beside(estimated)


def test_a_corrected_device_estimates_what_was_measured(estimated: Estimate, tmp_path: Path):
    run = RunFigures(step_seconds=1.25 * estimated.throughput.step_seconds)
    correction = correct_device(set_beside(estimated, run, Path("run.json")))
    save_correction(correction, tmp_path / "mine.json")
    device = find_device(str(tmp_path / "mine.json"))
    base = find_device("H100")
    assert device.name == base.name
    assert device.achieved_arithmetic == pytest.approx(base.achieved_arithmetic / 1.25)
    again = plimsoll.estimate("llama-tiny", 4, sequence=256, device=str(tmp_path / "mine.json"))
    assert again.throughput.step_seconds == pytest.approx(run.step_seconds, rel=0.001)
    assert any("run.json" in note for note in again.notes)
    assert again.tightest.total_bytes == estimated.tightest.total_bytes


def test_products_and_other_kernels_are_corrected_apart(estimated: Estimate):
    seconds = estimated.tightest.seconds
    others = seconds.forward_seconds + seconds.backward_seconds + seconds.optimizer_seconds - seconds.product_seconds
    run = RunFigures(product_seconds=2 * seconds.product_seconds, other_seconds=0.8 * others)
    correction = correct_device(set_beside(estimated, run, Path("run.json")))
    assert correction.arithmetic == pytest.approx(0.5)
    assert correction.bandwidth == pytest.approx(1.25)
    assert correction.links == 1.0


def test_a_correction_that_no_device_explains_is_refused(estimated: Estimate, tmp_path: Path):
    for figures, words in (
        ({"allocated": MIB}, "does not contain a measured time"),
        ({"step_seconds": 100.0}, "a different job"),
    ):
        with pytest.raises(InvalidOption, match=words):
            correct_device(set_beside(estimated, RunFigures(**figures), Path("run.json")))
    (tmp_path / "bad.json").write_text('{"device": "H100-SXM", "arithmetic": -1}')
    with pytest.raises(UnknownDevice, match="factors"):
        find_device(str(tmp_path / "bad.json"))
    with pytest.raises(UnknownDevice, match="does not describe a device"):
        find_device(str(tmp_path / "missing.json"))
