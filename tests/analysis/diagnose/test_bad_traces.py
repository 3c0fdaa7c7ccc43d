"""Traces that cannot be read, and pairs that do not belong together: each error says what was found."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import plimsoll
from analysis.diagnose.builders import ChromeBuilder, NsysBuilder
from plimsoll.errors import InvalidTrace


def forward(ops: int = 20, *, steps: int = 1, name: str = "aten::mm", is_marked: bool = True) -> ChromeBuilder:
    trace = ChromeBuilder()
    for number in range(steps):
        start = 1000 * number
        if is_marked:
            trace.step(number, start, start + 1000)
        for index in range(ops):
            trace.op(name, start + 10 * index, start + 10 * index + 5, sequence=index)
    return trace


def refusal(baseline: Path, plan: Path) -> InvalidTrace:
    with pytest.raises(InvalidTrace) as caught:
        plimsoll.diagnose(baseline, plan)
    assert caught.value.why
    assert caught.value.next
    return caught.value


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return forward().write(tmp_path / "good.json")


BROKEN = {
    "empty": (b"", "is empty"),
    "blank": (b" \n", "is empty"),
    "foreign": (b'{"plimsoll": "plan"}', "not a trace of torch.profiler"),
    "a number": (b"3", "not a trace of torch.profiler"),
    "no events": (b'{"traceEvents": []}', "does not contain operations"),
    "only metadata": (b'[{"ph": "M", "name": "process_name"}]', "does not contain operations"),
    "binary": (b"\x00\xff\xfe", "is not complete JSON"),
    "cut gzip": (gzip.compress(b'{"traceEvents": []}' * 50)[:40], "cannot be read"),
    "damaged database": (b"SQLite format 3\x00" + b"\xff" * 200, "damaged database"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_trace_is_refused_by_what_is_wrong(kind: str, tmp_path: Path, good: Path):
    content, words = BROKEN[kind]
    path = tmp_path / "broken"
    path.write_bytes(content)
    other = path if kind == "damaged database" else good
    assert words in refusal(path, other).found
    assert "broken" in str(refusal(other, path))


def test_a_truncated_trace_and_a_missing_one_are_refused(tmp_path: Path, good: Path):
    path = tmp_path / "cut.json"
    path.write_bytes(good.read_bytes()[:500])
    assert "is not complete JSON" in refusal(path, good).found
    assert "cannot be read" in refusal(good, tmp_path / "absent.json").found


def test_a_database_of_another_program_is_refused(tmp_path: Path):
    path = tmp_path / "foreign.sqlite"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE customers (id INTEGER)")
    error = refusal(path, path)
    assert "not an export of Nsight Systems" in error.found
    assert "customers" in error.why


def test_an_export_without_a_timeline_is_refused_with_its_version(tmp_path: Path):
    path = NsysBuilder().write(tmp_path / "export.sqlite")
    error = refusal(path, path)
    assert "does not contain a timeline" in error.found
    assert "3.15.0" in error.why


def test_one_trace_of_each_kind_is_refused(tmp_path: Path, good: Path):
    export = NsysBuilder()
    export.kernel(0, 10, 20)
    assert "different profilers" in refusal(good, export.write(tmp_path / "export.sqlite")).found


def test_another_model_is_refused_with_numbers(tmp_path: Path, good: Path):
    other = forward(name="aten::bmm").write(tmp_path / "other.json")
    error = refusal(good, other)
    assert "0% of the forward operations" in error.found
    assert "of 20 operations per step, 20 are missing" in error.why
    assert "20 × aten::mm" in error.why


@pytest.mark.parametrize("is_marked", [False, True])
def test_another_number_of_steps_is_fine_where_they_are_marked_and_refused_elsewhere(tmp_path: Path, is_marked: bool):
    three, five = (forward(steps=steps, is_marked=is_marked).write(tmp_path / f"{steps}.json") for steps in (3, 5))
    if not is_marked:
        assert "1.67 times as often" in refusal(three, five).found
        return
    finding = plimsoll.diagnose(three, five)
    assert (finding.baseline.steps, finding.plan.steps) == (3, 5)
    assert finding.overhead_seconds == pytest.approx(0.0)


def test_another_batch_shows_in_the_shapes(tmp_path: Path):
    def trace(rows: int) -> ChromeBuilder:
        built = ChromeBuilder()
        for index in range(5):
            sizes = {"Input Dims": [[rows, 8]], "Input type": ["float"]}
            built.op("aten::relu", 10 * index, 10 * index + 5, sequence=index, **sizes)
        built.step(0, 0, 100)
        return built

    small = trace(2).write(tmp_path / "small.json")
    assert "0% of the forward operations" in refusal(small, trace(4).write(tmp_path / "large.json")).found


def test_traces_without_device_activity_are_compared_by_cpu_ops(good: Path):
    finding = plimsoll.diagnose(good, good)
    assert finding.unit == "CPU ops"
    assert any("not show device activity" in note for note in finding.notes)


def test_device_activity_on_one_side_alone_is_said(tmp_path: Path, good: Path):
    with_device = forward()
    with_device.launch(1, 6, 9)
    finding = plimsoll.diagnose(good, with_device.write(tmp_path / "device.json"))
    assert finding.unit == "CPU ops"
    assert any("good.json does not show device activity" in note for note in finding.notes)


def test_a_list_of_events_and_a_packed_trace_are_read(tmp_path: Path, good: Path):
    events = json.loads(good.read_bytes())["traceEvents"]
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(events).encode()))
    assert plimsoll.diagnose(good, packed).overhead_seconds == 0.0


def test_one_trace_alone_and_options_of_profiling_beside_two_are_refused(good: Path):
    for pair in ((good, None), (3, 4)):
        with pytest.raises(InvalidTrace):
            plimsoll.diagnose(*pair)
    with pytest.raises(plimsoll.PlimsollError, match="loss= has no effect on traces"):
        plimsoll.diagnose(good, good, loss=lambda output: output)
