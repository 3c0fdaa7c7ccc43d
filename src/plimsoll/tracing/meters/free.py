"""A device in, the bytes that are free on it out; and memory that the C library holds back given to the system."""

from __future__ import annotations

import ctypes
import os

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated on ``device`` now; 0 where that cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return 0


def release_free_memory() -> None:
    """Give freed memory back where the C library is glibc: its heap keeps what lies below anything that is still in use.

    A traced step leaves small records between large tensors that are gone: gigabytes, for a model of a few hundred MiB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
