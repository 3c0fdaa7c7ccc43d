"""The help of every command, letter by letter. ``make golden`` writes it anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plimsoll.ui.cli.app import app

GOLDEN = Path(__file__).parents[2] / "golden"
COMMANDS = [
    "",
    "advise",
    "compare",
    "compress-gradients",
    "demo",
    "diagnose",
    "estimate",
    "explain",
    "fit",
    "plan",
    "probe",
    "report",
    "show",
    "verify",
]


def test_every_command_has_a_golden_help():
    found = {
        command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        for command in app.registered_commands
    }
    assert found == set(COMMANDS) - {""}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_reads_as_agreed(command: str, runner: CliRunner):
    result = runner.invoke(app, [*command.split(), "--help"], prog_name="plimsoll")
    assert result.exit_code == 0
    path = GOLDEN / f"help{'-' if command else ''}{command}.txt"
    if os.environ.get("PLIMSOLL_WRITE_GOLDEN"):
        path.write_text(result.stdout, encoding="utf-8")
    assert result.stdout == path.read_text(encoding="utf-8")
