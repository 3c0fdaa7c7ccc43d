"""Every example runs on a CPU as it stands, and stays short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
MOST_LINES = 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_as_it_stands(path: Path):
    finished = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert finished.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_stays_short(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < MOST_LINES
