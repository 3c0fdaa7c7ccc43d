"""The file behind a disk link, and the list of its free space.

The file has no name, so that other processes cannot see it: it is created with ``O_TMPFILE`` if the system supports that, else
unlinked right after its creation. However the process ends (``kill -9`` included), the system frees the space. A forked child
shares the file until the child ends.

The lowest hole that is large enough is used first, so that the file stays short and its front stays in the page cache.
Neighbouring holes are merged. A hole at the end is not stored; the used part of the file just ends earlier.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from plimsoll.errors import OffloadFailed
from plimsoll.units import MIB, format_bytes

MARGIN_BYTES = 256 * MIB
"""Left free on the disk; a twentieth of the disk if that is less."""
ALIGNMENT_BYTES = 4096
"""A page, and a multiple of every disk's block."""
_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_WITHOUT_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


def is_in_memory(directory: str, mounts: Path = _MOUNTS) -> bool:
    """Whether the directory is in RAM (tmpfs, ramfs): offloading to it would not free memory.

    False if the system does not say (mountinfo exists only on Linux, or the device is not listed).

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


class BackingFile:
    """An unlinked file; reads and writes may come from any thread.

    Raises:
        OffloadFailed: a file cannot be made in ``directory``.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._fd = -1
        self._idle = threading.Condition()
        self._users = 0
        self._is_closed = False
        self._promised_bytes = 0
        try:
            self._fd = _open_unlinked(directory)
        except OSError as error:
            raise OffloadFailed(
                f"Offloading cannot create a file in {directory!r}.",
                why=f"the system reports: {error.strerror}",
                next="set TMPDIR in the environment to a directory on a disk that you may write to",
            ) from error

    def reserve(self, end_bytes: int) -> None:
        """Check that the disk has room for the file to reach ``end_bytes``. The system is asked only if the file grows.

        Raises:
            OffloadFailed: the disk does not have enough room.
        """
        if end_bytes <= self._promised_bytes:
            return
        disk = os.fstatvfs(self._fd)
        free_bytes = disk.f_bavail * disk.f_frsize
        margin_bytes = min(MARGIN_BYTES, disk.f_blocks * disk.f_frsize // 20)
        # The system still counts promised but unwritten bytes as free, so compare with the blocks that the file has.
        missing_bytes = end_bytes - os.fstat(self._fd).st_blocks * 512
        if missing_bytes > free_bytes - margin_bytes:
            raise OffloadFailed(
                f"Offloading needs {format_bytes(missing_bytes)} more on the disk of {self.directory!r}.",
                why=f"{format_bytes(free_bytes)} are free there, and offloading must leave {format_bytes(margin_bytes)} free",
                next="set TMPDIR in the environment to a directory on another disk, or offload less with a larger budget",
            )
        self._promised_bytes = end_bytes

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``; the system may accept it in parts."""
        with self._in_use():
            done = 0
            while done < len(data):
                taken = os.pwrite(self._fd, data[done:], offset + done)
                if not taken:
                    raise OSError(errno.EIO, "the disk does not accept more bytes")
                done += taken

    def read(self, data: memoryview, offset: int) -> None:
        """Fill all of ``data``; the system may return it in parts."""
        with self._in_use():
            done = 0
            while done < len(data):
                given = os.preadv(self._fd, [data[done:]], offset + done)
                if not given:
                    raise OSError(errno.EIO, f"the file ends after {done:,} of {len(data):,} bytes")
                done += given

    def close(self) -> None:
        """Wait for running reads and writes, then close the file, which frees its space."""
        with self._idle:
            self._is_closed = True
            self._idle.wait_for(lambda: not self._users)
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the descriptor open during a copy: another file could get its number after a close."""
        with self._idle:
            if self._is_closed:
                raise OSError(errno.EBADF, "the link is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _open_unlinked(directory: str) -> int:
    nameless: int = getattr(os, "O_TMPFILE", 0)  # only Linux has it
    if nameless:
        try:
            return os.open(directory, nameless | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _WITHOUT_TMPFILE:
                raise
    fd, path = tempfile.mkstemp(prefix="plimsoll-", dir=directory)
    os.unlink(path)
    return fd


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes ``[offset, offset + size_bytes)``, both multiples of the alignment."""

    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


class Extents:
    """A first-fit free list. Not thread-safe."""

    def __init__(self) -> None:
        self.end_bytes = 0
        """Where the last used extent ends."""
        self.taken_bytes = 0
        self._holes: list[Extent] = []

    @property
    def holes(self) -> tuple[Extent, ...]:
        """Free extents below the end, in order. Neighbours are merged."""
        return tuple(self._holes)

    def fit(self, nbytes: int) -> Extent:
        """Find a place for ``nbytes``, possibly past the end. It is not taken yet."""
        size_bytes = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets = (hole.offset for hole in self._holes if hole.size_bytes >= size_bytes)
        return Extent(next(offsets, self.end_bytes), size_bytes)

    def take(self, extent: Extent) -> None:
        """Take an extent that `fit` returned."""
        self.taken_bytes += extent.size_bytes
        if extent.offset == self.end_bytes:
            self.end_bytes = extent.end
        elif extent.size_bytes:
            index = self._index(extent)
            left_bytes = self._holes[index].size_bytes - extent.size_bytes
            self._holes[index : index + 1] = [Extent(extent.end, left_bytes)] if left_bytes else []

    def give_back(self, extent: Extent) -> None:
        """Free a whole extent and merge it with neighbouring holes."""
        if not extent.size_bytes:
            return
        self.taken_bytes -= extent.size_bytes
        first = last = self._index(extent)
        start, end = extent.offset, extent.end
        if last < len(self._holes) and self._holes[last].offset == end:
            end = self._holes[last].end
            last += 1
        if first and self._holes[first - 1].end == start:
            first -= 1
            start = self._holes[first].offset
        is_at_end = end == self.end_bytes
        self._holes[first:last] = [] if is_at_end else [Extent(start, end - start)]
        if is_at_end:
            self.end_bytes = start

    def _index(self, extent: Extent) -> int:
        """Index of the first hole that does not begin before the extent."""
        return bisect_left(self._holes, extent.offset, key=attrgetter("offset"))
