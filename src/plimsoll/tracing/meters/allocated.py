"""Reads how many bytes are allocated right now, in microseconds: cheap enough for several readings in every training step.

On CUDA this is the caching allocator's own counter. On a CPU torch's allocator keeps no counter: it takes memory from the C
library, and the GNU C library counts what it has given out (``mallinfo2``, since 2.33). That count includes the rest of the
process (Python's larger objects, buffers of BLAS), so only differences within a step mean something; between two equal steps
they differ by a few kilobytes. A C library that does not count torch's memory (musl, macOS, a preloaded jemalloc) is found
out by a test allocation, and nothing is read there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

_PROBE_BYTES = 3 * 2**20


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes that are allocated on the device now; on a CPU those of the whole process. ``None`` where nobody counts them."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    read = _heap_reader() if device.type == "cpu" else None
    return None if read is None else read()


@functools.cache
def _heap_reader() -> Callable[[], int] | None:
    """What reads the C library's count; ``None`` where there is none, or where it does not see torch's memory."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # an older or another C library; Windows has no such handle
        return None
    mallinfo.restype, mallinfo.argtypes = _Mallinfo2, ()

    def read() -> int:
        found = mallinfo()
        return int(found.uordblks + found.hblkhd)

    before_bytes = read()
    probe = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
    with_probe_bytes = read()
    del probe
    grew = with_probe_bytes - before_bytes >= _PROBE_BYTES
    fell = with_probe_bytes - read() >= _PROBE_BYTES
    return read if grew and fell else None
