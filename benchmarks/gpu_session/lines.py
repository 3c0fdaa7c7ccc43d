"""Append-only files of JSON lines: a line is on disk before the next measurement starts; a cut-off line is skipped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

RESULTS = "results.jsonl"
CONTRACTS = "contracts.jsonl"


class Lines:
    """Writes lines to one file; several processes may append to the same file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if not _ends_with_newline(path):  # a process was killed while it wrote
            os.write(self._file, b"\n")

    def write(self, **fields: Any) -> None:
        """Append one line and wait until the disk has it."""
        os.write(self._file, (json.dumps(fields, default=str) + "\n").encode())
        os.fsync(self._file)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; a missing file is empty."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            found.append(json.loads(line))
        except ValueError:  # empty, or cut off
            continue
    return found


def _ends_with_newline(path: Path) -> bool:
    content = path.read_bytes()
    return not content or content.endswith(b"\n")
