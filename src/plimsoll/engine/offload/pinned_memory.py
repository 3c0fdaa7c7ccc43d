"""Pinned host memory within a budget, and the few GPU calls that a pinned link makes.

The GPU calls are a protocol, so that tests can replace the device. Torch's host allocator rounds the size of each block up to a
power of two. So buffers have these sizes here too, and the budget counts these sizes. A buffer is reused only after the last
copy that touched it. If the budget leaves no room for a new buffer, idle buffers of other sizes are returned to the system.

Not yet run on a GPU. Known weakness: a tensor a little larger than a power of two takes almost twice its bytes.

Sources: torch's notes on CUDA semantics (streams, ``record_stream``, pinned memory) and its caching host allocator, which does
not return blocks to the system before its cache is emptied.
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
    """A protocol for events: an event is a point in the work of a stream."""

    def query(self) -> bool:
        """Return whether all work before the event is done."""

    def synchronize(self) -> None:
        """Block this thread until all work before the event is done."""


class DeviceStream(Protocol):
    """A protocol for streams: a stream is a queue of device work."""

    def record_event(self) -> DeviceEvent: ...

    def wait_event(self, event: Any) -> None:
        """Make work that is queued from now on wait for ``event``, which must belong to the same kind of device."""

    def synchronize(self) -> None: ...


class DeviceCalls(Protocol):
    """A protocol for the calls to a device that offloading to pinned memory makes. Tests replace the device with it.

    The device has two streams for copies, in addition to the streams of the program.
    """

    out_stream: DeviceStream
    in_stream: DeviceStream

    def current_stream(self) -> DeviceStream: ...

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Allocate ``size_bytes`` bytes in pinned host memory, and return them as a tensor."""

    def release_pinned(self) -> None:
        """Return the pinned memory that is not in use to the system."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate device memory on the current stream, and return it as a tensor."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: DeviceStream) -> None:
        """Queue a copy on ``stream``. The method returns at once."""

    def used_on(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        """Tell the allocator that ``stream`` uses a tensor which was allocated on another stream."""


class CudaCalls:
    """The calls of `DeviceCalls` on a CUDA device."""

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
        with torch.cuda.stream(stream):  # type: ignore[arg-type]  # our protocol, which torch's class implements
            destination.copy_(source, non_blocking=True)

    def used_on(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        tensor.record_stream(stream)  # type: ignore[arg-type]  # as above


class Buffer:
    """A piece of pinned host memory that holds one offloaded tensor. ``memory`` is ``None`` after the pool was closed."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.size_bytes = memory.nbytes
        self.memory: torch.Tensor | None = memory
        self.busy_until: DeviceEvent | None = None
        """The event at the end of the last copy from or to this buffer, or ``None`` if the buffer is known to be idle."""
        self.companions: tuple[torch.Tensor, ...] = ()
        """Tensors in device memory that the running copy uses and that no other object holds."""

    def is_idle(self) -> bool:
        """Return whether the last copy from or to this buffer has ended. If it has, release the device memory that the copy
        used.
        """
        if self.busy_until is not None and not self.busy_until.query():
            return False
        self.busy_until = None
        self.companions = ()
        return True

    def wait(self) -> None:
        if self.busy_until is not None:
            self.busy_until.synchronize()


class PinnedPool:
    """A pool of pinned buffers. A buffer is reused for tensors that need the same size.

    Args:
        calls: the calls to the device.
        most_bytes: the most bytes of pinned host memory, in use or kept for later, or ``None`` for no limit.
    """

    def __init__(self, calls: DeviceCalls, most_bytes: int | None) -> None:
        self.taken_bytes = 0
        """The number of bytes that are pinned now. The buffers are in use or kept for later."""
        self.most_bytes = most_bytes
        self.returned: deque[Buffer] = deque()
        """Buffers whose tickets were deleted.

        This is a queue without a lock, because a ticket may be deleted during garbage collection, which must not lock.
        """
        self._calls = calls
        self._lock = threading.Lock()
        self._lent: set[Buffer] = set()
        self._kept: list[Buffer] = []

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of at least ``nbytes``. If necessary, wait for copies to end.

        Raises:
            OffloadFailed: the budget is exhausted.
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
        """Release the device memory that copies used, for all copies that have ended."""
        with self._lock:
            self._collect()

    def close(self) -> None:
        """Return all buffers to the system. All copies must have ended."""
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
            if buffer in self._lent:  # after close nothing is lent
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
        """Return a new buffer if the budget allows it, else ``None``.

        If necessary, idle buffers of other sizes are returned to the system first.
        """
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
        """Wait for the copies of all returned buffers, and return a buffer of ``size_bytes`` bytes. Return ``None`` if there is
        still no room.
        """
        for buffer in self._kept:
            buffer.wait()
        return self._idle(size_bytes) or self._new(size_bytes)

    def _has_room(self, size_bytes: int) -> bool:
        return self.most_bytes is None or self.taken_bytes + size_bytes <= self.most_bytes

    def _spent(self, nbytes: int, size_bytes: int) -> OffloadFailed:
        lent_bytes = sum(buffer.size_bytes for buffer in self._lent)
        return OffloadFailed(
            f"Offloading {format_bytes(nbytes)} needs {format_bytes(size_bytes)} of pinned host memory, "
            f"which exceeds what is left of the host budget, {format_bytes(self.most_bytes or 0)}.",
            why=f"offloaded tensors now use {format_bytes(lent_bytes)} of it; pinned memory is allocated in powers of two",
            next="raise host_budget, offload to disk, or plan with a larger memory budget to offload less",
        )


def rounded_up(nbytes: int) -> int:
    """Return the number of bytes that torch's host allocator takes for a request of ``nbytes``."""
    return max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else 0
