"""The link from RAM to a disk, for tensors in ordinary memory.

Bytes go straight between the tensor's memory and the file (``pwrite``, ``preadv``), on a few threads that release the
interpreter lock meanwhile. They pass through the system's page cache. The system drops its clean pages when memory is needed,
so they do not count as used memory, but tools that watch a container may show them.

Known weaknesses: the copying threads take CPU time, which slows training if no core is idle (``measure_link`` measures how
much). The file keeps its greatest length until `close`, because overwriting is an order of magnitude faster than extending.
Checksums are samples: they detect ranges of the file that were mixed up, truncated or lost, but not every flipped bit. The link
needs a POSIX system.
"""

from __future__ import annotations

import tempfile
import threading
from collections import deque

import torch

from plimsoll.engine.offload.copying import DiskCopy, Lease, Transport
from plimsoll.engine.offload.disk_file import BackingFile, Extent, Extents, is_in_memory
from plimsoll.engine.offload.protocol import CopyCpuSeconds, Link, flat_bytes_of
from plimsoll.errors import OffloadFailed
from plimsoll.units import MIB, format_bytes


class DiskLink(Link):
    """A link that keeps tensors in an unnamed file, which disappears with the process.

    Args:
        directory: the directory of the file. The default is the system's directory for temporary files. If that is in RAM, it
            is refused.
        most_bytes: the largest length of the file in bytes. The default is the disk's free space minus a margin.
        workers: the number of copying threads.
        most_in_flight_bytes: `store` waits while more bytes than this are on the way to the file.

    Raises:
        OffloadFailed: a file cannot be made in the directory.

    Example:
        >>> with DiskLink("/var/tmp") as link:
        ...     ticket = link.store(torch.arange(3))
        ...     ticket.settle()
        ...     ticket.read()
        tensor([0, 1, 2])
    """

    def __init__(
        self,
        directory: str | None = None,
        most_bytes: int | None = None,
        workers: int = 2,
        *,
        most_in_flight_bytes: int = 256 * MIB,
    ) -> None:
        self.name = "disk"
        self.directory = _default_directory() if directory is None else directory
        self._most_bytes = most_bytes
        self._transport = Transport(BackingFile(self.directory), workers, most_in_flight_bytes)
        self._space = threading.Lock()
        self._extents = Extents()
        self._returned: deque[Extent] = deque()

    @property
    def extents(self) -> Extents:
        """The used and free extents (ranges of the file) at this moment. The next `store` changes the object."""
        with self._space:
            self._take_returned()
            return self._extents

    @property
    def copy_cpu_seconds(self) -> CopyCpuSeconds:
        return CopyCpuSeconds(self._transport.out_cpu_seconds, self._transport.in_cpu_seconds)

    def store(self, tensor: torch.Tensor) -> DiskTicket:
        self._transport.check_open()
        assert tensor.device.type == "cpu", "a bounce link brings the tensors of other devices"
        source = flat_bytes_of(tensor)
        lease = self._lease(source.nbytes)
        self._transport.admit(source.nbytes)
        return DiskTicket(source, lease, self._transport)

    def close(self) -> None:
        self._transport.close()

    def _lease(self, nbytes: int) -> Lease:
        with self._space:
            self._take_returned()
            extent = self._extents.fit(nbytes)
            if self._most_bytes is not None and extent.end > self._most_bytes:
                raise OffloadFailed(
                    f"A tensor of {format_bytes(nbytes)} does not fit on the disk link; its limit is "
                    f"{format_bytes(self._most_bytes)}.",
                    why=f"the link now holds {format_bytes(self._extents.taken_bytes)}, and no free gap is large enough",
                    next="raise the limit of the link, or offload less by planning with a larger memory budget",
                )
            self._transport.file.reserve(extent.end)
            self._extents.take(extent)
        return Lease(extent, self._returned)

    def _take_returned(self) -> None:
        while self._returned:
            self._extents.give_back(self._returned.popleft())


class DiskTicket:
    """A ticket for one tensor on a disk link. The tensor is in the link's file, or is being copied there or back."""

    def __init__(self, source: torch.Tensor, lease: Lease, transport: Transport) -> None:
        self._lease = lease
        self._transport = transport
        self._dtype = source.dtype
        self._length = source.numel()
        self._checksum = 0
        self._leaving: tuple[torch.Tensor, DiskCopy] | None = (source, DiskCopy(source, lease, transport, is_out=True))
        self._leaving[1].start()
        self._arriving: tuple[torch.Tensor, DiskCopy] | None = None

    def settle(self) -> None:
        if not self._has_left():
            assert self._leaving is not None, "what has not left is held"
            raise self._failed("could not be written to", self._leaving[1].error)

    def prefetch(self) -> None:
        if self._arriving is None and self._has_left():
            self._expect()[1].start()

    def read(self) -> torch.Tensor:
        if not self._has_left():
            assert self._leaving is not None, "what has not left is held"
            return self._leaving[0]
        tensor, copy = self._arriving or self._expect()
        copy.finish()
        self._arriving = None
        if copy.error is not None:
            raise self._failed("could not be read from", copy.error)
        if copy.checksum != self._checksum:
            raise self._failed("was changed by", None)
        return tensor

    def _has_left(self) -> bool:
        """Wait for the copy to the file, and return whether it succeeded.

        If it succeeded, release the original tensor. If it failed, keep the original tensor.
        """
        self._transport.check_owner()
        if self._leaving is not None:
            self._leaving[1].finish()
            if self._leaving[1].error is not None:
                return False
            self._checksum = self._leaving[1].checksum
            self._leaving = None
        return True

    def _expect(self) -> tuple[torch.Tensor, DiskCopy]:
        """Allocate memory for the tensor, and prepare the copy from the file that will fill the memory. Return both. The copy
        is not started.
        """
        tensor = torch.empty(self._length, dtype=self._dtype, device="cpu")
        self._arriving = (tensor, DiskCopy(tensor, self._lease, self._transport, is_out=False))
        return self._arriving

    def _failed(self, how: str, error: OSError | None) -> OffloadFailed:
        size = format_bytes(self._length * self._dtype.itemsize)
        said = (
            "the checksum differs: the disk or the link lost bytes" if error is None else f"the system reports: {error}"
        )
        failure = OffloadFailed(
            f"A tensor of {size} {how} the disk of {self._transport.file.directory!r}.",
            why=said,
            next="set TMPDIR in the environment to a directory on another disk, or plan with a larger budget to offload less",
        )
        failure.__cause__ = error
        return failure


def _default_directory() -> str:
    directory = tempfile.gettempdir()
    if is_in_memory(directory):
        raise OffloadFailed(
            f"The directory for temporary files, {directory!r}, is in RAM.",
            why="tensors offloaded to it would still use the memory that offloading is meant to free",
            next="set TMPDIR in the environment to a directory on a disk, such as '/var/tmp', before Python starts",
        )
    return directory
