"""Reads files that somebody else may have written, within limits, and writes files without losing what is there.

*Reading.* A file is read up to a number of bytes, unpacked or not, and a pipe that stays silent is given up. JSON is read up
to a depth and a number of items. Whatever breaks a limit is a ``FileRefused``, which each reader turns into its own error.

*Writing.* A regular file appears whole or not at all, and keeps its mode; a link is followed to the file that it names.
Devices, pipes and what lies below ``/dev`` and ``/proc`` are written through: they are never replaced.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import select
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from plimsoll.errors import PlanFileError
from plimsoll.units import MIB, format_bytes

T = TypeVar("T")
_PATIENCE_SECONDS = 1.5
"""So long is waited for somebody at the other end of a pipe."""
_MOST_PATIENCE_SECONDS = 60.0
"""So long a pipe that somebody writes to may stay silent."""
_PIECE = MIB
_MOST_DEVICE_BYTES = 64 * MIB
"""A device such as ``/dev/zero`` may go on for ever."""
_MOST_RATIO = 50
"""Traces and plans are packed to a tenth or a thirtieth; a file of zeros to a thousandth."""
_GZIP_MAGIC = b"\x1f\x8b"


class FileRefused(Exception):
    """A file cannot be read, or not within its limits; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """How much of a file is read: bytes (after unpacking), JSON items (commas and brackets), and levels of nesting."""

    most_bytes: int
    most_items: int = 5_000_000
    most_levels: int = 64


def read_file(path: str | Path, limits: ReadLimits) -> bytes:
    """The content of a file, of a pipe as well, unpacked if it is packed with gzip.

    Raises:
        FileRefused: it cannot be read, is larger than the limit, or says nothing for some seconds.
    """
    try:
        with _opened(path) as file:
            content = b"".join(_pieces(file, limits.most_bytes))
        if content.startswith(_GZIP_MAGIC):
            most_bytes = min(limits.most_bytes, 64 * MIB + _MOST_RATIO * len(content))
            packed = gzip.GzipFile(fileobj=io.BytesIO(content))
            content = b"".join(_limited(lambda: packed.read(_PIECE), most_bytes))
        return content
    except (EOFError, zlib.error) as error:
        raise FileRefused(f"it is packed with gzip, and damaged or cut off: {error}") from error
    except OSError as error:
        raise FileRefused(error.strerror or type(error).__name__) from error
    except (ValueError, TypeError) as error:  # a path with a zero byte in it, or none at all
        raise FileRefused(str(error)) from error


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[io.FileIO]:
    """The file, open for reading. Not to block makes opening a pipe return at once, and changes nothing for regular files."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with io.FileIO(descriptor, "r") as file:
        yield file


def _pieces(file: io.FileIO, most_bytes: int) -> Iterator[bytes]:
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size > most_bytes:
        raise _too_large(most_bytes)
    if stat.S_ISCHR(status.st_mode):
        most_bytes = min(most_bytes, _MOST_DEVICE_BYTES)
    is_pipe = not stat.S_ISREG(status.st_mode) and hasattr(select, "poll")
    return _limited((lambda: _wait_and_read(file)) if is_pipe else (lambda: file.read(_PIECE)), most_bytes)


def _limited(read: Callable[[], bytes], most_bytes: int) -> Iterator[bytes]:
    """What is read until the end, piece by piece."""
    left = most_bytes
    while piece := read():
        left -= len(piece)
        if left < 0:
            raise _too_large(most_bytes)
        yield piece


def _too_large(most_bytes: int) -> FileRefused:
    return FileRefused(f"it has more than {format_bytes(most_bytes)}, which is as much as is read")


def _wait_and_read(file: io.FileIO) -> bytes:
    """The next piece of a pipe, nothing once the other side has hung up; not long is waited where there is no other side.

    Reading a pipe that is not waited for gives nothing at once where nobody has it open for writing, and ``None`` where
    somebody has and says nothing. What was read is never dropped, whenever the other side comes.
    """
    waiting = select.poll()
    waiting.register(file.fileno(), select.POLLIN)
    is_told = waiting.poll(int(_PATIENCE_SECONDS * 1000))
    piece: bytes | None = file.read(_PIECE)
    if piece is None:
        waiting.poll(int(_MOST_PATIENCE_SECONDS * 1000))
        piece = file.read(_PIECE)
        if piece is None:
            raise FileRefused(f"nothing came out of it for {_MOST_PATIENCE_SECONDS:g} s")
    elif not piece and not is_told:
        raise FileRefused(f"nobody wrote to it for {_PATIENCE_SECONDS:g} s")
    return piece


def is_read_once(path: str | Path) -> bool:
    """Whether reading it takes something away: it is a pipe or a device."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def decode_json(content: str | bytes, limits: ReadLimits, type_: type[T] | Any = Any) -> Any:
    """JSON as Python values, or as a type of msgspec.

    Raises:
        FileRefused: too many items, or nested too deeply.
        msgspec.DecodeError: no whole JSON; ``msgspec.ValidationError``: not of the type.
        UnicodeDecodeError: not UTF-8.
    """
    import msgspec

    comma, brackets = (",", "[{") if isinstance(content, str) else (b",", (b"[", b"{"))
    if content.count(comma) + sum(map(content.count, brackets)) > limits.most_items:  # type: ignore[arg-type]
        raise FileRefused(f"it has more than {limits.most_items:,} items, which is as many as are read")
    try:
        found = msgspec.json.decode(content, type=type_)
        _check_levels(found, limits.most_levels)
    except RecursionError as error:
        raise FileRefused(f"it is nested more than {limits.most_levels} levels deep") from error
    return found


def _check_levels(node: object, left: int) -> None:
    """Plain values alone: whatever msgspec was given a type for is as deep as the type."""
    if isinstance(node, dict | list):
        if left <= 0:
            raise RecursionError
        for each in node.values() if isinstance(node, dict) else node:
            _check_levels(each, left - 1)


PART = ".part"
"""How the name of a file ends that is still being written."""


def write_whole(content: str | bytes, path: str | Path) -> None:
    """Write a file: a regular one appears whole or not at all and keeps its mode; links, devices and pipes are written through.

    Raises:
        PlanFileError: the place cannot be written.
    """
    encoded = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    try:
        with whole_file(Path(path)) as file:
            file.write(encoded)
    except (OSError, ValueError, TypeError) as error:
        raise _unwritable(path, error) from error


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file to write to, which is in its place once the block has ended, and nowhere if that fails.

    Its name until then is random: on a disk that machines share, two processes may have the same id.
    """
    import secrets

    if _is_written_through(target):
        with _opened_through(target) as through:
            yield through
        return
    target = Path(os.path.realpath(target))
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}{PART}")
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "it is there already, and you may not write to it")
    try:
        with temporary.open("xb") as file:
            if mode is not None:
                temporary.chmod(mode)
            yield file
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _is_written_through(target: Path) -> bool:
    """Whether what is there must stay what it is: no regular file, or another name for what a process has open."""
    if os.path.abspath(target).startswith(("/dev/", "/proc/")) and os.path.exists(target):
        return not os.path.abspath(target).startswith("/dev/shm/")
    return os.path.exists(target) and not os.path.isfile(target)


@contextlib.contextmanager
def _opened_through(target: Path) -> Iterator[BinaryIO]:
    """Open for appending what is no file of its own; for a pipe that nobody reads, wait some seconds."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0))
            break
        except OSError as error:
            if error.errno != errno.ENXIO or not os.path.exists(target):
                raise
            if time.monotonic() > until:
                raise OSError(errno.ENXIO, f"nobody read from it for {_PATIENCE_SECONDS:g} s") from error
            time.sleep(0.02)
    if hasattr(os, "set_blocking"):
        os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        yield file


def check_place(path: str | Path) -> None:
    """Refuse a place that cannot be written, before the work whose result goes there.

    Raises:
        PlanFileError: a directory, a directory that is not there, or a place that may not be written to.
    """
    try:
        target = Path(os.path.realpath(path)) if not _is_written_through(Path(path)) else Path(path)
        folder = target.parent
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no directory {folder}")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "you may not write there")
        if not _is_written_through(target):
            _check_new_file(folder)
    except (OSError, ValueError, TypeError) as error:
        raise _unwritable(path, error) from error


def check_folder(path: str | Path) -> None:
    """Refuse a directory that cannot be written to, or made, before the work whose results go there.

    Raises:
        PlanFileError: a file is in the way, or the place may not be written to.
    """
    try:
        target = Path(os.path.realpath(path))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            target.stat()  # a name that is too long is no name
        nearest = next(place for place in (target, *target.parents) if os.path.lexists(place))
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is no directory")
        _check_new_file(nearest)
    except (OSError, ValueError, TypeError) as error:
        raise _unwritable(path, error) from error


def _check_new_file(folder: Path) -> None:
    """Make a file without a name and let go of it: what permissions say is not all, and not true of root and of ``/proc``."""
    import tempfile

    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(error.errno, f"a new file cannot be made in {folder}: {error.strerror}") from error


def make_folder(path: str | Path) -> None:
    """Make a directory, and those that it lies in, unless it is there.

    Raises:
        PlanFileError: it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, TypeError) as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str | Path, error: Exception) -> PlanFileError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return PlanFileError(
        f"{path} cannot be written.",
        why=why or type(error).__name__,
        next="free some space, or give another place"
        if is_full
        else "give a place in a directory that exists and that you may write to",
    )
