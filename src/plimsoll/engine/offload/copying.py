"""Copies between memory and the file of a disk link, run by a limited number of threads.

If a copy is waited for before a thread has begun it, it runs in the waiting thread, so that the waiting thread does not wait
for other copies. An I/O error is stored and not raised at once. The ticket raises the error when its user waits for the copy. A
forked child has neither the copying threads nor an up-to-date list of used extents, so every entry point checks that the caller
is the owner process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from zlib import crc32

import torch

from plimsoll.engine.offload.disk_file import BackingFile, Extent
from plimsoll.errors import OffloadFailed
from plimsoll.units import MIB

_END_BYTES = 512
_INNER_BYTES = 64


class Transport:
    """Runs copies between memory and ``file``.

    Args:
        file: the file. It is closed together with this object.
        workers: the largest number of threads. They start on demand.
        most_out_bytes: the most bytes that may be on the way from memory to the file.
    """

    def __init__(self, file: BackingFile, workers: int, most_out_bytes: int) -> None:
        self.file = file
        self.out_bytes = 0
        """The number of bytes that are on the way from memory to the file now."""
        self.out_cpu_seconds = 0.0
        self.in_cpu_seconds = 0.0
        self._most_out_bytes = most_out_bytes
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="plimsoll-disk")
        self._owner_pid = os.getpid()
        self._is_closed = False

    def submit(self, work: Callable[[], None]) -> Future[None] | None:
        """Run ``work`` on a copying thread, and return its future.

        Return None if the pool or the interpreter is closing, so that a thread will never run ``work``.
        """
        try:
            return self._pool.submit(work)
        except RuntimeError:
            return None

    def admit(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more bytes may be copied to the file. A copy larger than the limit waits until no other copy is
        running.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self.out_bytes or self.out_bytes + nbytes <= self._most_out_bytes)
            self.out_bytes += nbytes

    def account(self, nbytes: int, cpu_seconds: float, *, is_out: bool) -> None:
        """Note that a copy of ``nbytes`` bytes has ended, whether or not it succeeded, and add up its CPU time.

        ``is_out`` says whether the copy went from memory to the file. The end of such a copy wakes up copies that wait in
        `admit`.
        """
        with self._changed:
            if is_out:
                self.out_bytes -= nbytes
                self.out_cpu_seconds += cpu_seconds
                self._changed.notify_all()
            else:
                self.in_cpu_seconds += cpu_seconds

    def check_owner(self) -> None:
        """Check that the calling process opened the link (to host memory or disk).

        Raises:
            OffloadFailed: the calling process was forked from the process that opened the link.
        """
        if self._owner_pid != os.getpid():
            raise OffloadFailed(
                f"This disk link belongs to process {self._owner_pid}.",
                why=f"this process, {os.getpid()}, was forked from it, and a fork does not have the threads that copy",
                next="open a new link in the forked process, or run the step in the process that opened the link",
            )

    def check_open(self) -> None:
        """Check that the link is open, and that the calling process opened it.

        Raises:
            OffloadFailed: the link is closed, or belongs to another process.
        """
        self.check_owner()
        if self._is_closed:
            raise OffloadFailed(
                "This disk link is closed.",
                why="close() was called, which deletes its file",
                next="open another link, and close it only after the last backward",
            )

    def close(self) -> None:
        """Finish the copies in progress, stop the threads, and close the file.

        In a forked child, only mark the child's link as closed.
        """
        if self._owner_pid == os.getpid() and not self._is_closed:
            self._pool.shutdown(wait=True)
            self.file.close()
        self._is_closed = True


class Lease:
    """Reserves an extent (a range of the file). The extent becomes free when the last holder of this object, a ticket or a
    running copy, releases it.

    The object may be deleted at any moment, in any thread, also during garbage collection. So ``__del__`` does not take a lock.
    It only appends the extent to a queue.
    """

    __slots__ = ("extent", "returned")

    def __init__(self, extent: Extent, returned: deque[Extent]) -> None:
        self.extent = extent
        self.returned = returned

    def __del__(self) -> None:
        self.returned.append(self.extent)


class DiskCopy:
    """One copy between a tensor and the file. It holds the tensor and the lease until it has run.

    Args:
        tensor: the tensor that is copied to the file (after `Transport.admit` for its bytes), or filled from the file.
        lease: the place in the file.
        transport: the object that runs the copy.
        is_out: whether to copy from the tensor to the file.
    """

    def __init__(self, tensor: torch.Tensor, lease: Lease, transport: Transport, *, is_out: bool) -> None:
        self.checksum = 0
        self.error: OSError | None = OSError(errno.ECANCELED, "the copy was interrupted")
        self._cargo: tuple[torch.Tensor, Lease] | None = (tensor, lease)
        self._transport = transport
        self._is_out = is_out
        self._future: Future[None] | None = None

    def start(self) -> None:
        """Queue the copy for a thread. If the pool is closed, run the copy in this thread."""
        self._future = self._transport.submit(self._run)
        if self._future is None:
            self._run()

    def finish(self) -> None:
        """Wait until the copy has run. If a thread has not begun it, run the copy in this thread."""
        if self._future is None or self._future.cancel():
            self._run()  # does nothing if it has run already
        else:
            self._future.result()

    def _run(self) -> None:
        cargo, self._cargo = self._cargo, None
        if cargo is None:
            return
        tensor, lease = cargo
        begun_seconds = time.thread_time()
        try:
            data = _memory_of(tensor)
            if self._is_out:
                self.checksum = checksum(data)
                self._transport.file.write(data, lease.extent.offset)
            else:
                self._transport.file.read(data, lease.extent.offset)
                self.checksum = checksum(data)
            self.error = None
        except OSError as error:
            self.error = error.with_traceback(None)
        finally:
            self._transport.account(tensor.nbytes, time.thread_time() - begun_seconds, is_out=self._is_out)


def checksum(data: memoryview) -> int:
    """Return a checksum of samples of ``data``. It is cheap enough to be computed for each copy in both directions.

    It is the CRC-32 of 512 bytes at the start and at the end, and of 64 bytes in each MiB between. It detects bytes of another
    tensor, a truncated file and lost blocks, but not a single flipped bit in a large tensor. A checksum of everything would
    cost several times the copy itself.
    """
    if len(data) <= 2 * _END_BYTES:
        return crc32(data)
    code = crc32(data[-_END_BYTES:], crc32(data[:_END_BYTES]))
    for start in range(MIB, len(data) - _END_BYTES, MIB):
        code = crc32(data[start : start + _INNER_BYTES], code)
    return code


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the memory of a contiguous CPU tensor. The caller must hold the tensor as long as the view."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
