"""Which device, driver and versions, and how fast the device multiplies and copies."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.gpu_session.session import Session
from benchmarks.gpu_session.settings import SETTINGS
from benchmarks.machine import versions


def run(session: Session, part: str) -> None:
    del part
    session.write(way="versions", **versions(), commit=_commit())
    session.write(way="settings", **{name: os.environ.get(name, "") for name in SETTINGS})
    for way, read in (("device", session.device.facts), ("ceilings", session.device.ceilings)):
        with session.attempt(way=way):
            session.write(way=way, **read())


def _commit() -> str:
    """The commit that is checked out, with a mark where files differ from it; nothing without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""
