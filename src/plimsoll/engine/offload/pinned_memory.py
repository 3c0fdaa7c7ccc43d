"""Pinned host memory within a budget, and the few calls to a GPU that a pinned link makes.

The calls are the seam where tests put a device of their own. Torch's host allocator rounds every block up to a power of two,
so these are the sizes of buffers here too, and what the budget counts. A buffer is used again only after the last copy that
touched it. Buffers of other sizes are given back to the system when the budget leaves no room for a new one.

Not yet run on a GPU. Known weakness: a tensor a little larger than a power of two takes almost twice its bytes.

Sources: torch's notes on CUDA semantics (streams, ``record_stream``, pinned memory) and its caching host allocator, which
returns no block to the system before its cache is emptied.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

import torch

from plimsoll.errors import OffloadFailed
from plimsoll.tracing.torch_internals import free_pinned_memory
from plimsoll.units import format_bytes

SMALLEST_BYTES = 512


class DeviceEvent(Protocol):
    """A moment on a stream."""

    def query(self) -> bool:
        """Whether everything before it has been done."""

    def synchronize(self) -> None:
        """Wait in this thread until it has."""


class DeviceStream(Protocol):
    """Work in order."""

    def record_event(self) -> DeviceEvent: ...

    def wait_event(self, event: Any) -> None:
        """Whatever is queued here from now on starts after ``event`` (of the same device's kind)."""

    def synchronize(self) -> None: ...


class DeviceCalls(Protocol):
    """A device with two streams beside those of the program."""

    out_stream: DeviceStream
    in_stream: DeviceStream

    def current_stream(self) -> DeviceStream: ...

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Bytes in pinned host memory."""

    def release_pinned(self) -> None:
        """Return to the system whatever pinned memory nobody holds."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device, of the current stream."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: DeviceStream) -> None:
        """Queue a copy on ``stream``; returns at once."""

    def used_on(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        """Let the allocator know that ``stream`` uses a tensor of another stream."""


class CudaCalls:
    """The calls, on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out_stream: DeviceStream = torch.cuda.Stream(device)
        self.in_stream: DeviceStream = torch.cuda.Stream(device)

    def current_stream(self) -> DeviceStream:
        return torch.cuda.current_stream(self.device)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        with torch.cuda.device(self.device):
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def release_pinned(self) -> None:
        free_pinned_memory()

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(length, dtype=dtype, device=self.device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: DeviceStream) -> None:
        with torch.cuda.stream(stream):  # type: ignore[arg-type]  # our protocol, of which torch's class is one
            destination.copy_(source, non_blocking=True)

    def used_on(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        tensor.record_stream(stream)  # type: ignore[arg-type]  # as above


class Buffer:
    """Pinned memory that one ticket holds; ``memory`` is gone once the pool is closed."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.size_bytes = memory.nbytes
        self.memory: torch.Tensor | None = memory
        self.busy_until: DeviceEvent | None = None
        """The end of the last copy from or to it."""
        self.companions: tuple[torch.Tensor, ...] = ()
        """Device memory that this copy uses too, and that nobody else holds any more."""

    def is_idle(self) -> bool:
        """Whether the last copy has ended; lets go of its companions then."""
        if self.busy_until is not None and not self.busy_until.query():
            return False
        self.busy_until = None
        self.companions = ()
        return True

    def wait(self) -> None:
        if self.busy_until is not None:
            self.busy_until.synchronize()


class PinnedPool:
    """Buffers by size.

    Args:
        calls: the device's.
        most_bytes: of host memory in all, in use or kept for later; no bound where it is not given.
    """

    def __init__(self, calls: DeviceCalls, most_bytes: int | None) -> None:
        self.taken_bytes = 0
        """Pinned now, in use or not."""
        self.most_bytes = most_bytes
        self.returned: deque[Buffer] = deque()
        """Buffers whose tickets are gone: a ticket may die in the middle of a collection, where no lock can be taken."""
        self._calls = calls
        self._lock = threading.Lock()
        self._lent: set[Buffer] = set()
        self._kept: list[Buffer] = []

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes``.

        Raises:
            OffloadFailed: the budget has no room for it.
        """
        size_bytes = rounded_up(nbytes)
        with self._lock:
            self._collect()
            buffer = self._idle(size_bytes) or self._new(size_bytes) or self._awaited(size_bytes)
            if buffer is None:
                raise self._spent(nbytes, size_bytes)
            self._lent.add(buffer)
            return buffer

    def collect(self) -> None:
        """Let go of device memory whose copies have ended."""
        with self._lock:
            self._collect()

    def close(self) -> None:
        """Give everything back to the system; no copy may be under way."""
        with self._lock:
            self._collect()
            for buffer in (*self._lent, *self._kept):
                buffer.memory = None
                buffer.companions = ()
            self._lent.clear()
            self._kept.clear()
            self.taken_bytes = 0
            self._calls.release_pinned()

    def _collect(self) -> None:
        while self.returned:
            buffer = self.returned.popleft()
            if buffer in self._lent:  # not after close
                self._lent.remove(buffer)
                self._kept.append(buffer)
        for buffer in self._kept:
            if buffer.companions:
                buffer.is_idle()

    def _idle(self, size_bytes: int) -> Buffer | None:
        for index, buffer in enumerate(self._kept):
            if buffer.size_bytes == size_bytes and buffer.is_idle():
                return self._kept.pop(index)
        return None

    def _new(self, size_bytes: int) -> Buffer | None:
        """A new buffer if there is room, or if there is after all idle ones of other sizes are given back."""
        if not self._has_room(size_bytes):
            idle = [buffer for buffer in self._kept if buffer.size_bytes != size_bytes and buffer.is_idle()]
            idle_bytes = sum(buffer.size_bytes for buffer in idle)
            if not idle or not self._has_room(size_bytes - idle_bytes):
                return None
            self._kept = [buffer for buffer in self._kept if buffer not in idle]
            self.taken_bytes -= idle_bytes
            idle.clear()
            self._calls.release_pinned()
        self.taken_bytes += size_bytes
        return Buffer(self._calls.pinned(size_bytes))

    def _awaited(self, size_bytes: int) -> Buffer | None:
        """Wait for copies of tickets that are gone, then look again."""
        for buffer in self._kept:
            buffer.wait()
        return self._idle(size_bytes) or self._new(size_bytes)

    def _has_room(self, size_bytes: int) -> bool:
        return self.most_bytes is None or self.taken_bytes + size_bytes <= self.most_bytes

    def _spent(self, nbytes: int, size_bytes: int) -> OffloadFailed:
        lent_bytes = sum(buffer.size_bytes for buffer in self._lent)
        return OffloadFailed(
            f"Offloading {format_bytes(nbytes)} needs {format_bytes(size_bytes)} of pinned host memory; "
            f"the host budget is {format_bytes(self.most_bytes or 0)}.",
            why=f"{format_bytes(lent_bytes)} of it hold tensors now; pinned memory comes in powers of two",
            next="raise host_budget, offload to disk, or offload less with a larger memory budget",
        )


def rounded_up(nbytes: int) -> int:
    """What torch's host allocator takes for ``nbytes``."""
    return max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else 0
