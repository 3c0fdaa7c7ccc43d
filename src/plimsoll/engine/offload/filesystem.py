"""A directory in, whether its files lie in RAM out (tmpfs, ramfs): offloading to such a directory would free nothing."""

from __future__ import annotations

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


def is_in_memory(directory: str, mounts: Path = _MOUNTS) -> bool:
    """Whether the system says so; where it does not say (no such file but on Linux, a device not listed), no.

    Source: proc_pid_mountinfo(5). The third field is ``major:minor``; the type follows the field ``-``.
    """
    try:
        device = os.stat(directory).st_dev
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kinds = {fields[fields.index("-") + 1] for fields in map(str.split, lines) if fields[2] == wanted}
    return bool(kinds & _IN_MEMORY)
