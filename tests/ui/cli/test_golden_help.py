"""The help of every command, letter by letter. ``make golden`` writes it anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plimsoll.ui.cli.app import app

GOLDEN = Path(__file__).parents[2] / "golden"
COMMANDS = ["", *sorted(path.stem.removeprefix("help-") for path in GOLDEN.glob("help-*.txt"))]


def test_every_command_has_a_golden_help():
    found = {
        command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        for command in app.registered_commands
    }
    assert found == set(COMMANDS) - {""}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_reads_as_agreed(command: str, run):
    shown = run(*command.split(), "--help").out
    path = GOLDEN / f"help{'-' if command else ''}{command}.txt"
    if os.environ.get("PLIMSOLL_WRITE_GOLDEN"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")
