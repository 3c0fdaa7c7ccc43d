"""Read how many bytes are allocated now. A reading takes microseconds, so that several readings in every training step are
possible.

On CUDA the caching allocator counts its bytes. On a CPU torch's allocator does not count: it takes memory from the C library.
The GNU C library counts the bytes that are in use (``mallinfo2``, since 2.33). Its count includes the rest of the process
(large Python objects, buffers of BLAS), so only differences within a step mean something. These differences vary by a few
kilobytes between equal steps. A test allocation shows whether the C library counts torch's memory. With musl, on macOS, or
under jemalloc it does not, and then nothing is read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

_PROBE_BYTES = 2**18


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
    """Return the bytes that are allocated on the device now, or ``None`` if they are not counted. On a CPU, the whole process
    counts.

    With several ranks on CPUs the function returns ``None``, because gloo's threads hold buffers of collectives for a while.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type != "cpu" or (dist.is_available() and dist.is_initialized()):
        return None
    read = _heap_reader()
    return None if read is None else read()


@functools.cache
def _heap_reader() -> Callable[[], int] | None:
    """Return a function that reads the C library's count, or ``None`` if the library does not count torch's memory."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
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
