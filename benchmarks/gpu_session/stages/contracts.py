"""The contract suite on the device, a file in each process. Every test is a line as it ends."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from benchmarks.gpu_session.lines import CONTRACTS, Lines
from benchmarks.gpu_session.session import Session

_ROOT = Path(__file__).resolve().parents[3]
_DRY = {"codecs": "::test_bool_masks_come_back"}
"""What a dry run asks: the suite asks all of it on a CPU anyway."""


def run(session: Session, part: str) -> None:
    if importlib.util.find_spec("pytest") is None:
        session.write(way=part, skipped="it needs pytest")
        return
    if session.is_dry and part not in _DRY:
        session.write(way=part, skipped="a dry run asks one test of the codecs")
        return
    import pytest

    os.environ["DEVICE"] = session.device.kind
    os.chdir(_ROOT)
    chosen = f"tests/contracts/test_{part}.py" + (_DRY[part] if session.is_dry else "")
    code = pytest.main(["-q", "-p", "no:cacheprovider", chosen], plugins=[_Reports(session)])
    session.write(way=part, exit_code=int(code))


class _Reports:
    """A plugin of pytest: one line for each test."""

    def __init__(self, session: Session) -> None:
        self._lines = Lines(session.folder / CONTRACTS)

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.when == "call" or not report.passed:  # type: ignore[attr-defined]
            self._lines.write(
                test=report.nodeid,  # type: ignore[attr-defined]
                outcome=report.outcome,  # type: ignore[attr-defined]
                seconds=round(report.duration, 2),  # type: ignore[attr-defined]
                why=str(report.longrepr)[-700:] if report.failed else "",  # type: ignore[attr-defined]
            )
