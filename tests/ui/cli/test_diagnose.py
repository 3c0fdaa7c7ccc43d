"""``plimsoll diagnose``: targets, two traces, JSON and exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from analysis.diagnose.builders import ChromeBuilder
from plimsoll.artifacts.finding import Finding
from plimsoll.artifacts.store import load_any
from plimsoll.ui.cli.app import app

Run = Callable[..., Result]


@pytest.fixture
def run(runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str) -> Result:
        result = runner.invoke(app, ["diagnose", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result

    return invoke


@pytest.fixture
def traces(tmp_path: Path) -> tuple[str, str]:
    def trace(recomputed: int) -> ChromeBuilder:
        built = ChromeBuilder()
        built.op("aten::mm", 10, 14, sequence=5)
        built.launch(12, 20, 40, "gemm")
        built.node("MmBackward0", 15, 90, sequence=5)
        for index in range(recomputed):
            built.op("aten::mm", 20 + 5 * index, 24 + 5 * index, thread=101, sequence=7 + index)
            built.launch(21 + 5 * index, 40 + 20 * index, 60 + 20 * index, "gemm", thread=101)
        built.step(0, 0, 40 + 20 * recomputed)
        return built

    return str(trace(0).write(tmp_path / "baseline.json")), str(trace(2).write(tmp_path / "with-plan.json"))


def test_two_traces_become_a_page(run: Run, traces: tuple[str, str]):
    result = run(*traces)
    assert result.exit_code == 0, result.output
    assert "recompute arithmetic" in result.stdout
    assert "the measured overhead is 40.0 µs" in " ".join(result.stdout.split())
    assert "RAISED" in result.stdout
    assert "Advice: recompute arithmetic" in result.stdout
    assert "Note:" in result.stdout


def test_json_is_a_finding_that_show_understands(run: Run, runner: CliRunner, traces: tuple[str, str]):
    result = run(*traces, "--json", "-o", "finding.json")
    fields = json.loads(result.stdout)
    assert fields["plimsoll"] == "finding"
    saved = load_any("finding.json")
    assert isinstance(saved, Finding)
    assert saved.overhead_seconds == pytest.approx(40e-6)
    shown = runner.invoke(app, ["show", "finding.json"])
    assert "Where the overhead goes" in shown.stdout
    assert str(saved).splitlines()[0] in " ".join(shown.stdout.split())


def test_a_target_is_profiled_with_and_without_its_plan(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "steps", raising=False)
    result = run("steps:stack", "--strategy", "full", "--steps", "1", "--keep-traces", "kept", "--json")
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert fields["origin"] == "profiled here"
    assert fields["strategy"] == "full"
    assert sorted(path.name for path in Path("kept").iterdir()) == ["baseline.trace.json.gz", "plan.trace.json.gz"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("baseline.json", "absent.json"), "cannot be read"),
        (("absent.json.gz",), "alone cannot be diagnosed"),
        (("report.nsys-rep",), "alone cannot be diagnosed"),
        (("baseline.json", "with-plan.json", "--budget", "1GiB"), "--budget would have no effect"),
        (
            ("baseline.json", "with-plan.json", "--steps", "5", "--batch", "2"),
            "--batch and --steps would have no effect",
        ),
        (("steps:stack", "--plan", "plan.json", "-s", "full"), "--strategy would have no effect beside --plan"),
        (("nothing",), "is no target"),
    ],
)
def test_bad_input_ends_with_2_and_says_what_was_found(
    run: Run, traces: tuple[str, str], arguments: tuple[str, ...], words: str
):
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    as_json = run(*arguments, "--json")
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout)["exit_code"] == 2
