"""This machine and these versions, as a result page names them, and the head of such a page."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import plimsoll

_PACKAGES = ("torch", "transformers", "numpy", "scipy")
_CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search(r"model name\s*:\s*(.+)", _CPU_INFO.read_text()) if _CPU_INFO.exists() else None
    return f"{found.group(1).strip() if found else platform.machine()} CPU, {os.cpu_count()} cores"


def device_slug(device: torch.device) -> str:
    """The device's name as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).partition(",")[0].lower()).strip("-")


def page_stem(device: torch.device, kind: str = "") -> str:
    """Name of today's result page on a device, without its ending."""
    return "-".join([str(datetime.datetime.now(datetime.UTC).date()), device_slug(device), *([kind] if kind else [])])


def versions() -> dict[str, str]:
    """Python's and every package's version; a package that is only a source tree has none."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "source tree"
    return found | {"plimsoll": plimsoll.__version__}


def page_head(title: str, command: str, *, device: str, versions: Mapping[str, str]) -> list[str]:
    """What a result page begins with: what it is about, when and where it was measured, how, and with which versions."""
    return [
        f"# {title}, {datetime.datetime.now(datetime.UTC).date()}, {device}",
        "",
        f"Command: `{command}`",
        "",
        "Versions: " + ", ".join(f"{name} {each}" for name, each in versions.items()),
        "",
    ]
