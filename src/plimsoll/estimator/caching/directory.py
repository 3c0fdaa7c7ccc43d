"""The environment in, the directory where Plimsoll keeps what it can make again out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

OVERRIDE = "PLIMSOLL_CACHE_DIR"
"""The environment variable that names another directory."""


def cache_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Where cached files go: ``$PLIMSOLL_CACHE_DIR``, else the place that the system has for them.

    Args:
        environment: variables by name; by default those of this process.

    Example:
        >>> cache_directory({"PLIMSOLL_CACHE_DIR": "/scratch/plimsoll"}).as_posix()
        '/scratch/plimsoll'

    Source: XDG Base Directory Specification 0.8; on macOS and Windows the directories that their guidelines name.
    """
    known = os.environ if environment is None else environment
    if known.get(OVERRIDE):
        return Path(known[OVERRIDE]).expanduser()
    if sys.platform == "win32":
        base = known.get("LOCALAPPDATA", "")
    else:
        base = known.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():
        return Path(base) / "plimsoll"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "plimsoll"
    return Path.home() / ".cache" / "plimsoll"
