"""The file behind a disk link, which nobody else can see and which cannot outlive its users, and what is free in it.

The file has no name: it is made without one where the system can (``O_TMPFILE``), else unlinked as soon as it is made.
Whatever ends the process, ``kill -9`` included, gives its space back. A forked child shares it until the child ends.

Of its bytes the lowest hole that is large enough is used first, so that the file stays short and its front stays in the page
cache. Freed neighbours become one hole; a hole at the end is no hole, the file's used part just ends sooner.
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
"""Left free for everybody else, or a twentieth of the disk where that is less."""
ALIGNMENT_BYTES = 4096
"""A page, and a multiple of every disk's block."""
_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_WITHOUT_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


def is_in_memory(directory: str, mounts: Path = _MOUNTS) -> bool:
    """Whether the system says so (tmpfs, ramfs): offloading to such a directory would free nothing.

    Where it does not say (no such file but on Linux, a device not listed), no.


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
        OffloadFailed: no file can be made in ``directory``.
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
                f"No file can be made in {directory!r}.",
                why=f"the system says: {error.strerror}",
                next="set TMPDIR in the environment to a directory on a disk that you may write to",
            ) from error

    def reserve(self, end_bytes: int) -> None:
        """Make sure that the disk has room for the file to reach ``end_bytes``; the system is asked only when it grows.

        Raises:
            OffloadFailed: it has not.
        """
        if end_bytes <= self._promised_bytes:
            return
        disk = os.fstatvfs(self._fd)
        free_bytes = disk.f_bavail * disk.f_frsize
        margin_bytes = min(MARGIN_BYTES, disk.f_blocks * disk.f_frsize // 20)
        # What was promised but is not written yet is still free to the system, so count from what the file really has.
        missing_bytes = end_bytes - os.fstat(self._fd).st_blocks * 512
        if missing_bytes > free_bytes - margin_bytes:
            raise OffloadFailed(
                f"Offloading needs {format_bytes(missing_bytes)} more on the disk of {self.directory!r}.",
                why=f"{format_bytes(free_bytes)} are free there, of which {format_bytes(margin_bytes)} stay free",
                next="set TMPDIR in the environment to a directory on another disk, or offload less with a larger budget",
            )
        self._promised_bytes = end_bytes

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``; the system may take it in parts."""
        with self._in_use():
            done = 0
            while done < len(data):
                taken = os.pwrite(self._fd, data[done:], offset + done)
                if not taken:
                    raise OSError(errno.EIO, "the disk takes no more bytes")
                done += taken

    def read(self, data: memoryview, offset: int) -> None:
        """Fill all of ``data``; the system may give it in parts."""
        with self._in_use():
            done = 0
            while done < len(data):
                given = os.preadv(self._fd, [data[done:]], offset + done)
                if not given:
                    raise OSError(errno.EIO, f"the file ends after {done:,} of {len(data):,} bytes")
                done += given

    def close(self) -> None:
        """Give the space back, once nobody reads or writes."""
        with self._idle:
            self._is_closed = True
            self._idle.wait_for(lambda: not self._users)
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """The descriptor's number must not be closed, and used again by another file, under a copy."""
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
    nameless: int = getattr(os, "O_TMPFILE", 0)  # Linux alone has it
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
        """Where the last taken extent ends."""
        self.taken_bytes = 0
        self._holes: list[Extent] = []

    @property
    def holes(self) -> tuple[Extent, ...]:
        """Free extents below the end, in order; no two of them touch."""
        return tuple(self._holes)

    def fit(self, nbytes: int) -> Extent:
        """Where ``nbytes`` would go; nothing is taken yet, and it may reach past the end."""
        size_bytes = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets = (hole.offset for hole in self._holes if hole.size_bytes >= size_bytes)
        return Extent(next(offsets, self.end_bytes), size_bytes)

    def take(self, extent: Extent) -> None:
        """Take what `fit` found."""
        self.taken_bytes += extent.size_bytes
        if extent.offset == self.end_bytes:
            self.end_bytes = extent.end
        elif extent.size_bytes:
            index = self._index(extent)
            left_bytes = self._holes[index].size_bytes - extent.size_bytes
            self._holes[index : index + 1] = [Extent(extent.end, left_bytes)] if left_bytes else []

    def give_back(self, extent: Extent) -> None:
        """Free an extent, whole; it joins the holes that it touches."""
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
        """Of the first hole that does not begin before the extent."""
        return bisect_left(self._holes, extent.offset, key=attrgetter("offset"))
