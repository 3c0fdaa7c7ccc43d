"""A tensor's memory and an extent of a file in, one copy between them out, on whichever thread comes to it first.

A copy that is waited for before a thread took it up runs in the waiting thread: nobody waits behind other copies. An I/O
error is kept, not raised: the ticket raises it where its user looks.
"""

from __future__ import annotations

import abc
import ctypes
import errno
import time
from collections import deque
from concurrent.futures import Future

import torch

from plimsoll.engine.offload.checksum import checksum
from plimsoll.engine.offload.extents import Extent
from plimsoll.engine.offload.transport import Transport


class Lease:
    """An extent for as long as something holds this: a ticket, or a copy that is under way.

    It may die at any moment, in any thread, in the middle of a collection: so it takes no lock, it leaves a note.
    """

    __slots__ = ("extent", "returned")

    def __init__(self, extent: Extent, returned: deque[Extent]) -> None:
        self.extent = extent
        self.returned = returned

    def __del__(self) -> None:
        self.returned.append(self.extent)


class DiskCopy(abc.ABC):
    """One transfer; it holds the tensor and the lease until it has run, and not a moment longer."""

    def __init__(self, tensor: torch.Tensor, lease: Lease, transport: Transport) -> None:
        self.checksum = 0
        self.error: OSError | None = OSError(errno.ECANCELED, "the copy was interrupted")
        self._cargo: tuple[torch.Tensor, Lease] | None = (tensor, lease)
        self._transport = transport
        self._future: Future[None] | None = None

    def start(self) -> None:
        """Let a thread take it up; where none will come any more, run it here."""
        self._future = self._transport.submit(self._run)
        if self._future is None:
            self._run()

    def finish(self) -> None:
        """Return when it has run; where nobody has begun, run it here."""
        if self._future is None or self._future.cancel():
            self._run()  # does nothing the second time
        else:
            self._future.result()

    def _run(self) -> None:
        cargo, self._cargo = self._cargo, None
        if cargo is None:
            return
        tensor, lease = cargo
        begun_seconds = time.thread_time()
        try:
            self._move(_memory_of(tensor), lease.extent.offset)
            self.error = None
        except OSError as error:
            self.error = error.with_traceback(None)
        finally:
            self._account(tensor.nbytes, time.thread_time() - begun_seconds)

    @abc.abstractmethod
    def _move(self, data: memoryview, offset: int) -> None: ...

    @abc.abstractmethod
    def _account(self, nbytes: int, cpu_seconds: float) -> None: ...


class CopyOut(DiskCopy):
    """From the tensor to the file; its bytes were admitted before."""

    def _move(self, data: memoryview, offset: int) -> None:
        self.checksum = checksum(data)
        self._transport.file.write(data, offset)

    def _account(self, nbytes: int, cpu_seconds: float) -> None:
        self._transport.account_out(nbytes, cpu_seconds)


class CopyIn(DiskCopy):
    """From the file to the tensor."""

    def _move(self, data: memoryview, offset: int) -> None:
        self._transport.file.read(data, offset)
        self.checksum = checksum(data)

    def _account(self, nbytes: int, cpu_seconds: float) -> None:
        self._transport.account_in(cpu_seconds)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The very bytes of a contiguous CPU tensor; whoever holds the view must hold the tensor."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
