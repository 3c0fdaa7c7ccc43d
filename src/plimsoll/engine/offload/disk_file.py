"""The file behind a disk link, and the list of its free space.

The file has no name, so that other processes cannot see it: it is created with ``O_TMPFILE`` if the system supports that, else
unlinked right after its creation. In whatever way the process ends (``kill -9`` included), the system frees the space. A forked
child shares the file until the child ends.

The lowest hole that is large enough is used first, so that the file stays short and its front stays in the page cache.
Neighbouring holes are merged. A hole at the end is not stored: the used part of the file ends earlier instead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from plimsoll.errors import OffloadFailed
from plimsoll.units import MIB, format_bytes

MARGIN_BYTES = 256 * MIB
"""The number of bytes of the disk that stay free. On a small disk, a twentieth of the disk stays free if that is less."""
ALIGNMENT_BYTES = 4096
"""The size in bytes that ranges of the file are aligned to. It is a page, and a multiple of the block size of any disk."""
_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_WITHOUT_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


def is_in_memory(directory: str, mounts: Path = _MOUNTS) -> bool:
    """Return whether the directory is in RAM (tmpfs, ramfs), so that offloading to it would not free memory.

    Return False if the system does not say (mountinfo exists only on Linux, or the device is not listed).

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
    """A file without a name on the disk. Reads and writes may come from any thread.

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
        """Check that the disk has room for a file with the length ``end_bytes``. The system is asked only if the file grows.

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
        """Write all of ``data`` to the file at ``offset``. If the system accepts only a part, continue until all is written."""
        with self._in_use():
            done = 0
            while done < len(data):
                taken = os.pwrite(self._fd, data[done:], offset + done)
                if not taken:
                    raise OSError(errno.EIO, "the disk does not accept more bytes")
                done += taken

    def read(self, data: memoryview, offset: int) -> None:
        """Fill all of ``data`` from the file at ``offset``. If the system returns only a part, continue until all is read."""
        with self._in_use():
            done = 0
            while done < len(data):
                given = os.preadv(self._fd, [data[done:]], offset + done)
                if not given:
                    raise OSError(errno.EIO, f"the file ends after {done:,} of {len(data):,} bytes")
                done += given

    def close(self) -> None:
        """Wait for running reads and writes, then close the file. This frees its space."""
        with self._idle:
            self._is_closed = True
            self._idle.wait_for(lambda: not self._users)
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Return a context manager that keeps the file descriptor open during a copy. After a close, the system could give the
        same descriptor number to another file.
        """
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

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound early: at the end of the process, ``os`` may be gone before this object.
        if self._fd >= 0:
            close(self._fd)


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
    """A range of the file: the bytes ``[offset, offset + size_bytes)``. Both numbers are multiples of the alignment."""

    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


class Extents:
    """The used and free ranges of the file. A new tensor gets the first free range that is large enough. The object is not
    thread-safe.
    """

    def __init__(self) -> None:
        self.end_bytes = 0
        """The offset in bytes where the last used range ends."""
        self.taken_bytes = 0
        self._holes: list[Extent] = []

    @property
    def holes(self) -> tuple[Extent, ...]:
        """The free ranges below the end, in order. Neighbouring ranges are merged."""
        return tuple(self._holes)

    def fit(self, nbytes: int) -> Extent:
        """Return a free range for ``nbytes`` bytes: the first hole that is large enough, or a range after the end.

        The range is not marked as used yet.
        """
        size_bytes = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets = (hole.offset for hole in self._holes if hole.size_bytes >= size_bytes)
        return Extent(next(offsets, self.end_bytes), size_bytes)

    def take(self, extent: Extent) -> None:
        """Mark a range that `fit` returned as used."""
        self.taken_bytes += extent.size_bytes
        if extent.offset == self.end_bytes:
            self.end_bytes = extent.end
        elif extent.size_bytes:
            index = self._index(extent)
            left_bytes = self._holes[index].size_bytes - extent.size_bytes
            self._holes[index : index + 1] = [Extent(extent.end, left_bytes)] if left_bytes else []

    def give_back(self, extent: Extent) -> None:
        """Mark a whole range as free, and merge it with neighbouring free ranges."""
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
        """Return the index of the first hole (free range) that begins at or after the start of the extent."""
        return bisect_left(self._holes, extent.offset, key=attrgetter("offset"))
