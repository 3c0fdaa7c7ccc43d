"""What all tests of the command line share: a runner, verbs that answer at once, a target that loads at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import plimsoll
from fakes import FakeVerbs

TARGET_SOURCE = """
import torch


def step():
    return torch.nn.Linear(2, 2), torch.zeros(1, 2), lambda output: output.sum()


def wrong():
    return 3


def broken():
    raise OSError("the data set is gone")


def leaves():
    raise SystemExit(3)


number = 3
"""


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")
    return CliRunner()


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> FakeVerbs:
    fake = FakeVerbs()
    for name in ("plan", "verify", "compare", "apply"):
        monkeypatch.setattr(plimsoll, name, getattr(fake, name), raising=False)
    return fake


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A target in a module of the working directory."""
    (tmp_path / "sample_target.py").write_text(TARGET_SOURCE)
    (tmp_path / "no_import.py").write_text("raise ValueError('missing key')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "sample_target", raising=False)
    return "sample_target:step"
