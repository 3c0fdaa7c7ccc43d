"""A session on a GPU, run dry on a CPU: every stage measures, a killed session keeps its lines, any lines make a page."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.gpu_session import driver, page
from benchmarks.gpu_session.devices import CudaDevice
from benchmarks.gpu_session.lines import CONTRACTS, RESULTS, Lines, read_lines
from benchmarks.gpu_session.report import Results, write
from benchmarks.gpu_session.stages import STAGES, Stage
from benchmarks.gpu_session.stages.longest import search

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lines of a whole session at tiny sizes."""
    folder = tmp_path_factory.mktemp("dry")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--device", "cpu"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OUT": str(folder)}, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.1f} processor seconds")
    return folder


def test_a_dry_run_measures_in_every_stage_and_nothing_fails(dry_run: Path):
    lines = read_lines(dry_run / RESULTS)
    assert [line for line in lines if "error" in line or line.get("was_stopped") or line.get("ended")] == []
    only_one_codec = {"links"}  # the suite asks all contracts on a CPU anyway
    for stage in STAGES:
        measured = [
            line for line in lines if line.get("stage") == stage.name and "way" in line and "skipped" not in line
        ]
        assert bool(measured) != (stage.name in only_one_codec), stage.name
    [contract] = read_lines(dry_run / CONTRACTS)
    assert contract["outcome"] == "passed"


def test_in_a_dry_run_every_bit_is_equal_and_every_budget_is_kept(dry_run: Path):
    results = Results.read(dry_run)
    stages = [(stage.name, ways) for stage in STAGES for ways in results.tables(stage.name).values()]
    ways = {(stage, name): way for stage, ways in stages for name, way in ways.items() if "peak_bytes" in way}
    eager = ("compiled", "eager")  # other kernels than the compiled baseline's
    differing = [way for way, found in ways.items() if found.get("bits", {}).get("differing_tensors") and way != eager]
    assert differing == []
    budgets = {way: found["budget_bytes"] for way, found in ways.items() if found.get("budget_bytes")}
    assert len(budgets) >= 8
    assert [way for way, budget in budgets.items() if ways[way]["peak_bytes"]["allocated"] > budget] == []


def test_a_plan_trains_under_a_cap_where_the_plain_model_runs_out_and_reaches_longer_sequences(dry_run: Path):
    tables = Results.read(dry_run).tables("binding")
    [capped] = [ways for name, ways in tables.items() if name]
    assert capped["plimsoll"]["steps_done"] == capped["plimsoll"]["steps_wanted"]
    assert capped["none"]["steps_done"] == 0
    assert "under a cap of" in capped["none"]["out_of_memory"]
    longest = Results.read(dry_run).tables("longest")[""]
    assert longest["plimsoll"]["longest_tokens"] >= longest["checkpoint every block"]["longest_tokens"]
    assert longest["checkpoint every block"]["longest_tokens"] > longest["none"]["longest_tokens"]


def test_the_page_of_a_dry_run_shows_every_section_and_says_that_it_is_dry(dry_run: Path, capsys):
    assert page.main(["--lines", str(dry_run)]) == 0
    text = capsys.readouterr().out
    assert "**A dry run on a CPU" in text
    assert text.count("\n## ") == 11
    assert "torch.use_deterministic_algorithms(True)" in text
    assert "- offload, TRL's activation offloading: it needs a GPU" in text
    assert "1 passed, 0 failed, 0 skipped." in text


@pytest.mark.parametrize("moment", [1, 4, 7, 11, 16])
def test_a_session_killed_at_any_moment_keeps_its_lines_and_leaves_no_process(moment: int, tmp_path: Path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([driver.__name__, *driver.PRELOADED])
    arguments = (["environment", "smoke", "headline"], "cpu", 540.0)
    named = {"folder": tmp_path, "command": "a session to kill", "started": time.monotonic()}
    session = context.Process(target=driver.drive, args=arguments, kwargs=named)
    session.start()
    while len(seen := read_lines(tmp_path / RESULTS)) < moment:
        assert session.is_alive()
        time.sleep(0.005)
    os.kill(session.pid, signal.SIGKILL)
    session.join()

    kept = read_lines(tmp_path / RESULTS)
    assert kept[: len(seen)] == seen
    started = [line["began"] for line in kept if "began" in line]
    deadline = time.monotonic() + 10
    while any(map(is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, started))
    final = (tmp_path / RESULTS).read_bytes()
    assert sum(not is_json(line) for line in final.split(b"\n")[:-1]) == 0
    text = "\n".join(write(Results.read(tmp_path)))
    assert "- losing: not asked for, or the session ended before it" in text
    unfinished = [line["stage"] for line in kept if "began" in line][len([line for line in kept if "ended" in line]) :]
    assert all(f"- {stage}: the session ended while it ran" in text for stage in unfinished)


def is_running(process: int) -> bool:
    """Whether the process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_a_line_that_was_cut_off_is_skipped_and_does_not_spoil_the_next(tmp_path: Path):
    path = tmp_path / RESULTS
    Lines(path).write(number=1)
    with path.open("ab") as file:
        file.write(b'{"number": 2, "cut of')
    Lines(path).write(number=3)
    assert read_lines(path) == [{"number": 1}, {"number": 3}]


def test_a_stage_that_hangs_or_crashes_is_named_and_the_next_one_runs(tmp_path: Path, monkeypatch):
    def run_stage(name: str, *rest: object) -> int:
        del rest
        if name == "hanging":
            time.sleep(60)
        if name == "crashing":
            os._exit(3)
        return 0

    monkeypatch.setattr(driver, "run_stage", run_stage)
    monkeypatch.setattr(driver, "_GRACE_SECONDS", 0.1)
    stages = [Stage("hanging", 0.5, 0.5), Stage("crashing", 0.5, 5), Stage("good", 0.5, 5), Stage("late", 60, 60)]
    # As on a GPU, where a stage has a limit of its own; nothing here touches the device.
    driver._Driver(Lines(tmp_path / RESULTS), "cuda", tmp_path, must_execute=False).run(stages, time.monotonic() + 20)
    ends = {line["stage"]: line for line in read_lines(tmp_path / RESULTS) if "began" not in line}
    assert ends["hanging"]["was_stopped"]
    assert ends["crashing"]["ended"] == 3
    assert ends["good"]["ended"] == 0
    assert "it needs 60" in ends["late"]["skipped"]


def test_where_a_forked_process_cannot_use_the_device_a_stage_starts_a_python_of_its_own(tmp_path: Path):
    stages = [stage for stage in STAGES if stage.name == "environment"]
    driver._Driver(Lines(tmp_path / RESULTS), "cpu", tmp_path, must_execute=True).run(stages, time.monotonic() + 300)
    lines = read_lines(tmp_path / RESULTS)
    assert lines[0]["began"]
    assert [line["way"] for line in lines if "way" in line] == ["versions", "settings", "device", "ceilings"]
    assert lines[-1]["ended"] == 0


@pytest.mark.parametrize(("seconds", "last"), [(180, "sweep"), (530, "published"), (20, "environment")])
def test_the_stages_that_fit_come_first(seconds: float, last: str):
    assert driver.fitting(STAGES, seconds)[-1].name == last


def test_a_default_session_gives_every_stage_its_least():
    assert sum(stage.least_seconds for stage in STAGES) < 540 - 15, "imports and the ends of stages take some seconds"


@pytest.mark.parametrize("most", [0, 64, 100, 128, 700, 5000])
def test_the_search_finds_the_longest_length_that_fits(most: int):
    assert search(lambda tokens: tokens <= most, 128, 64, has_time=lambda: True) == (most // 64 * 64, True)


def test_a_search_without_time_says_what_it_has_reached():
    left = iter([True, True, False])
    assert search(lambda tokens: tokens <= 700, 128, 64, has_time=lambda: next(left)) == (256, False)


def test_a_later_run_replaces_the_stages_that_it_reached(tmp_path: Path):
    lines = Lines(tmp_path / RESULTS)
    for way in ("old", "new"):
        lines.write(run="2026-01-01", command=way, device="cuda", seconds=1)
        lines.write(stage="sweep", part="", began=1)
        lines.write(stage="sweep", table="", way=way, peak_bytes={"allocated": 1})
        lines.write(stage="sweep", part="", ended=0, was_stopped=False)
        lines.write(stage="losing", **({"part": "", "began": 2} if way == "old" else {"skipped": "no time"}))
    results = Results.read(tmp_path)
    assert set(results.tables("sweep")[""]) == {"new"}
    assert "losing: the session ended while it ran" in results.gaps()


def test_a_failed_contract_is_named_and_fails_the_page(tmp_path: Path, capsys):
    Lines(tmp_path / RESULTS).write(run="2026-01-01", command="", device="cuda", seconds=1)
    contracts = Lines(tmp_path / CONTRACTS)
    contracts.write(test="tests/a.py::b", outcome="failed", seconds=1.0, why="")
    contracts.write(test="tests/a.py::c", outcome="passed", seconds=1.0, why="")
    assert page.main(["--lines", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 1
    assert "1 passed, 1 failed, 0 skipped." in (tmp_path / "page.md").read_text()
    assert "- failed: `tests/a.py::b`" in (tmp_path / "page.md").read_text()
    assert page.main(["--lines", str(tmp_path / "nothing")]) == 2


def test_without_a_package_or_a_stage_of_that_name_the_session_says_so(tmp_path: Path, capsys, monkeypatch):
    named = {"folder": tmp_path, "command": "", "started": 0.0}
    assert driver.drive(["smok"], "cpu", 1.0, **named) == 2
    assert "No stage smok. Stages: environment, smoke" in capsys.readouterr().out
    monkeypatch.setattr(driver, "_NEEDED", ("torch", "no_such_package"))
    assert driver.drive(None, "cpu", 1.0, **named) == 2
    assert f"{sys.executable} lacks no_such_package" in capsys.readouterr().out


class FakeCuda:
    """Stands for ``torch.cuda``: it notes the calls and answers with fixed numbers."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def reset_peak_memory_stats(self) -> None:
        self.calls.append("reset")

    def memory_stats(self) -> dict[str, int]:
        return {f"{name}_bytes.all.peak": size for name, size in (("allocated", 3), ("requested", 2), ("reserved", 4))}

    def empty_cache(self) -> None:
        self.calls.append("release")

    def mem_get_info(self) -> tuple[int, int]:
        return 60, 80

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.calls.append(fraction)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in vars(FakeCuda):
        if not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_on_a_gpu_peaks_are_read_after_the_step_has_ended(fake_cuda: FakeCuda):
    peaks = CudaDevice().peaks(lambda: fake_cuda.calls.append("step"), held_bytes=100)
    assert peaks == {"allocated": 3, "requested": 2, "reserved": 4}
    assert fake_cuda.calls == ["synchronize", "reset", "step", "synchronize"]


def test_on_a_gpu_the_cap_is_lifted_after_a_step_that_ran_out(fake_cuda: FakeCuda):
    def too_large() -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError), CudaDevice().capped(20, held_bytes=0) as run:
        run(too_large)
    assert fake_cuda.calls == ["release", 0.25, 1.0]


def test_deterministic_mode_ends_with_its_block():
    with CudaDevice().deterministic_kernels():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
