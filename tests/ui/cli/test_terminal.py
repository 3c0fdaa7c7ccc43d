"""Progress goes to stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from plimsoll.ui.cli import terminal
from plimsoll.ui.cli.terminal import show_progress


def test_what_is_over_soon_leaves_no_line_in_a_log():
    stream = io.StringIO()
    with show_progress(Console(file=stream)) as report:
        report("tracing", 0.5)
    assert stream.getvalue() == ""


def test_what_takes_longer_writes_lines(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 2.5, 3.0, 5.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    with show_progress(Console(file=stream)) as report:
        for share in (0.1, 0.2, 0.3):
            report("tracing", share)
    assert stream.getvalue().splitlines() == ["tracing: 10%", "tracing: 30%"]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_json_is_a_readable_file_whatever_the_encoding_of_stdout(encoding: str, monkeypatch: pytest.MonkeyPatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    terminal.write_json(json.dumps({"µs": "𝛿 \x1b"}, ensure_ascii=False))
    assert json.loads(written.getvalue().decode("utf-8")) == {"µs": "𝛿 \x1b"}


@pytest.mark.long
def test_a_closed_stdout_and_a_rank_of_another_launcher_change_nothing_but_the_output():
    """Kubeflow sets RANK for each machine, and each has a log of its own."""
    plimsoll = f"{sys.executable} -m plimsoll"
    shown = subprocess.run(["sh", "-c", f"{plimsoll} show missing.json >&-"], capture_output=True, text=True)
    ranked = subprocess.run(
        ["sh", "-c", f"RANK=1 WORLD_SIZE=2 {plimsoll} show missing.json"], capture_output=True, text=True
    )
    for found in (shown, ranked):
        assert found.returncode == 2
        assert found.stderr.startswith("PlanFileError")
        assert "Traceback" not in found.stderr


@pytest.mark.parametrize("stage", ["solving", "loading a[/b]/v[bold]x.json"])
def test_a_terminal_gets_a_bar(stage: str):
    stream = io.StringIO()
    with show_progress(Console(file=stream, force_terminal=True, width=80)) as report:
        report(stage, 1.0)
    assert stage in stream.getvalue()
