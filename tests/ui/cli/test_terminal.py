"""Progress goes to stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io

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


def test_a_terminal_gets_a_bar():
    stream = io.StringIO()
    with show_progress(Console(file=stream, force_terminal=True, width=80)) as report:
        report("solving", 1.0)
    assert "solving" in stream.getvalue()
