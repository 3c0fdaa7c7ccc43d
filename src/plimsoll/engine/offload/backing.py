"""A directory in, a file that nobody else can see and that cannot outlive its users out.

The file has no name: it is made without one where the system can (``O_TMPFILE``), else unlinked as soon as it is made.
Whatever ends the process, ``kill -9`` included, gives its space back. A forked child shares it until the child ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Iterator

from plimsoll.errors import OffloadFailed
from plimsoll.units import MIB, format_bytes

MARGIN_BYTES = 256 * MIB
"""Left free for everybody else, or a twentieth of the disk where that is less."""
_WITHOUT_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}


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
                next="name a directory on a disk that you may write to",
            ) from error

    def reserve(self, end_bytes: int) -> None:
        """Make sure that the disk has room for the file to reach ``end_bytes``; asked once for every height.

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
                next="name a directory on another disk, or offload less with a larger memory budget",
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
