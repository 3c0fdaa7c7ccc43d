"""What all tests of the command line share: a way to run commands, and verbs that answer at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import plimsoll
from fakes import FakeVerbs
from plimsoll.ui.cli.app import app


class Ran(NamedTuple):
    """What a command wrote."""

    out: str
    err: str

    @property
    def words(self) -> str:
        """Its output, whatever the width of the terminal."""
        return " ".join(self.out.split())

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs a command in a directory of its own: it ends with ``code``, and never with a traceback."""
    for name, value in {"NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str, code: int = 0) -> Ran:
        result = CliRunner().invoke(app, list(arguments), prog_name="plimsoll")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return Ran(result.stdout, result.stderr)

    return invoke


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> FakeVerbs:
    fake = FakeVerbs()
    for name in ("plan", "verify", "compare", "apply"):
        monkeypatch.setattr(plimsoll, name, getattr(fake, name), raising=False)
    return fake
