"""Reads untrusted files within limits, and writes files in such a way that a failure does not lose their old content.

*Reading.* A file is read up to a limit of bytes, before and after unpacking; a pipe that stays silent is abandoned. JSON is
read up to a limit of depth and items. Anything over a limit raises ``FileRefused``, which each reader turns into its own error.

*Writing.* A regular file appears whole or not at all, and keeps its mode. A symbolic link is followed to its file.
Devices, pipes and everything below ``/dev`` and ``/proc`` are written through: they are never replaced.
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
"""How many seconds to wait for a process to open the other end of a pipe."""
_MOST_PATIENCE_SECONDS = 60.0
"""How many seconds a pipe may stay silent while a process has it open for writing."""
_PIECE = MIB
_MOST_DEVICE_BYTES = 64 * MIB
"""The most bytes to read from a character device, because a device such as ``/dev/zero`` never ends."""
_MOST_RATIO = 50
"""Largest accepted ratio of unpacked to packed bytes, to refuse gzip bombs. Traces and plans become 10 to 30 times smaller when
they are packed, a bomb of zeros 1000 times.
"""
_GZIP_MAGIC = b"\x1f\x8b"


class FileRefused(Exception):
    """Raised if a file cannot be read, or exceeds the limits for reading; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Data: the limits for reading a file.

    They are the number of bytes (after unpacking), of JSON items (commas and opening brackets), and of levels of nesting.
    """

    most_bytes: int
    most_items: int = 5_000_000
    most_levels: int = 64


def read_file(path: str | Path, limits: ReadLimits) -> bytes:
    """Return the content of a file or pipe, unpacked if it is gzipped.

    Raises:
        FileRefused: the file cannot be read, is larger than the limit, or is a pipe that stays silent for some seconds.
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
        raise FileRefused(f"it is a gzip file that is damaged or truncated: {error}") from error
    except OSError as error:
        raise FileRefused(error.strerror or type(error).__name__) from error
    except (ValueError, TypeError) as error:  # a path with a zero byte in it, or none at all
        raise FileRefused(str(error)) from error


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[io.FileIO]:
    """A context that opens a file for reading, and closes it at the end of the block.

    With O_NONBLOCK, opening a pipe returns at once; for regular files this flag changes nothing.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with io.FileIO(descriptor, "r") as file:
        yield file


def _pieces(file: io.FileIO, most_bytes: int) -> Iterator[bytes]:
    """Yield the content of an open file, pipe or device in pieces; raise FileRefused if it is larger than the limit."""
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size > most_bytes:
        raise _too_large(most_bytes)
    if stat.S_ISCHR(status.st_mode):
        most_bytes = min(most_bytes, _MOST_DEVICE_BYTES)
    is_pipe = not stat.S_ISREG(status.st_mode) and hasattr(select, "poll")
    return _limited((lambda: _wait_and_read(file)) if is_pipe else (lambda: file.read(_PIECE)), most_bytes)


def _limited(read: Callable[[], bytes], most_bytes: int) -> Iterator[bytes]:
    """Call ``read`` until it returns an empty piece, and yield the pieces. Raise FileRefused if they exceed ``most_bytes``."""
    left = most_bytes
    while piece := read():
        left -= len(piece)
        if left < 0:
            raise _too_large(most_bytes)
        yield piece


def _too_large(most_bytes: int) -> FileRefused:
    return FileRefused(f"it has more than {format_bytes(most_bytes)}, the limit for reading")


def _wait_and_read(file: io.FileIO) -> bytes:
    """Wait for the next bytes of a pipe and return them. Return ``b""`` after the writer has closed the pipe.

    ``file`` must be open in non-blocking mode.

    Raises:
        FileRefused: no process opens the pipe for writing within 1.5 s, or the writer sends nothing for 60 s.
    """
    waiting = select.poll()
    waiting.register(file.fileno(), select.POLLIN)
    is_told = waiting.poll(int(_PATIENCE_SECONDS * 1000))
    # b"" means that no process has the pipe open for writing, and None that the writer has not sent anything yet.
    piece: bytes | None = file.read(_PIECE)
    if piece is None:
        waiting.poll(int(_MOST_PATIENCE_SECONDS * 1000))
        piece = file.read(_PIECE)
        if piece is None:
            raise FileRefused(f"it is a pipe, and its writer sent nothing for {_MOST_PATIENCE_SECONDS:g} s")
    elif not piece and not is_told:
        raise FileRefused(f"it is a pipe, and no process opened it for writing within {_PATIENCE_SECONDS:g} s")
    return piece


def is_read_once(path: str | Path) -> bool:
    """Return True if the content of ``path`` can be read only once, because it is a pipe or a device."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def decode_json(content: str | bytes, limits: ReadLimits, type_: type[T] | Any = Any) -> Any:
    """Decode JSON as plain Python values, or as ``type_`` with msgspec.

    Raises:
        FileRefused: too many items, or nested too deeply.
        msgspec.DecodeError: not complete JSON; ``msgspec.ValidationError``: not of the type.
        UnicodeDecodeError: not UTF-8.
    """
    import msgspec

    comma, brackets = (",", "[{") if isinstance(content, str) else (b",", (b"[", b"{"))
    if content.count(comma) + sum(map(content.count, brackets)) > limits.most_items:  # type: ignore[arg-type]
        raise FileRefused(f"it has more than {limits.most_items:,} items, the limit for reading")
    try:
        found = msgspec.json.decode(content, type=type_)
        _check_levels(found, limits.most_levels)
    except RecursionError as error:
        raise FileRefused(f"it is nested more than {limits.most_levels} levels deep") from error
    return found


def _check_levels(node: object, left: int) -> None:
    """Raise RecursionError if plain values (dicts and lists) are nested more than ``left`` levels deep, the number of levels
    that are still allowed.

    A value that msgspec decoded to a type is not checked, because it cannot be deeper than the type.
    """
    if isinstance(node, dict | list):
        if left <= 0:
            raise RecursionError
        for each in node.values() if isinstance(node, dict) else node:
            _check_levels(each, left - 1)


PART = ".part"
"""The suffix of the name of a file that is still being written."""


def write_whole(content: str | bytes, path: str | Path) -> None:
    """Write a file. A regular file appears whole or not at all, and keeps its mode.

    A symbolic link stays, and its file is replaced. A device or pipe is not replaced; the content is written to it.

    Raises:
        PlanFileError: the path cannot be written.
    """
    encoded = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    try:
        with whole_file(Path(path)) as file:
            file.write(encoded)
    except (OSError, ValueError, TypeError) as error:
        raise _unwritable(path, error) from error


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A context that opens a temporary file, which replaces ``target`` when the block ends.

    If the block fails, ``target`` stays unchanged. The temporary name is random, not a process id: on a shared disk, processes
    of two machines may have the same id.
    """
    import secrets

    if _is_written_through(target):
        with _opened_through(target) as through:
            yield through
        return
    target = Path(os.path.realpath(target))
    temporary = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}{PART}")
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "it already exists, and you do not have permission to write to it")
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
    """Return True if content must be written into the existing ``target``, instead of replacing it by a new file.

    This holds for a path that is not a regular file, and for paths under ``/dev`` or ``/proc`` that may name an open file.
    """
    if os.path.abspath(target).startswith(("/dev/", "/proc/")) and os.path.exists(target):
        return not os.path.abspath(target).startswith("/dev/shm/")
    return os.path.exists(target) and not os.path.isfile(target)


@contextlib.contextmanager
def _opened_through(target: Path) -> Iterator[BinaryIO]:
    """A context that opens a device or pipe for appending, and closes it at the end of the block.

    It waits up to 1.5 s for a process that reads the pipe.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0))
            break
        except OSError as error:
            if error.errno != errno.ENXIO or not os.path.exists(target):
                raise
            if time.monotonic() > until:
                raise OSError(
                    errno.ENXIO, f"no process opened it for reading within {_PATIENCE_SECONDS:g} s"
                ) from error
            time.sleep(0.02)
    if hasattr(os, "set_blocking"):
        os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        yield file


def check_place(path: str | Path) -> None:
    """Raise an error if a file cannot be written at this path. Callers check this before the work that makes its content.

    Raises:
        PlanFileError: the path is a directory, its directory does not exist, or the user may not write there.
    """
    try:
        target = Path(os.path.realpath(path)) if not _is_written_through(Path(path)) else Path(path)
        folder = target.parent
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"the directory {folder} does not exist")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "you do not have permission to write to it")
        if not _is_written_through(target):
            _check_new_file(folder)
    except (OSError, ValueError, TypeError) as error:
        raise _unwritable(path, error) from error


def check_folder(path: str | Path) -> None:
    """Raise an error if a directory cannot be created or written to. Callers check this before the work for its content.

    Raises:
        PlanFileError: a file has that name, or the user may not write there.
    """
    try:
        target = Path(os.path.realpath(path))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            target.stat()  # raises for a name that is too long; `lexists` below would only say that it is absent
        nearest = next(place for place in (target, *target.parents) if os.path.lexists(place))
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a directory")
        _check_new_file(nearest)
    except (OSError, ValueError, TypeError) as error:
        raise _unwritable(path, error) from error


def _check_new_file(folder: Path) -> None:
    """Raise OSError if a new file cannot be created in this directory. The function tries it with a file without a name.

    Permission bits are not enough, because they mislead for root and for ``/proc``.
    """
    import tempfile

    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(error.errno, f"a new file cannot be created in {folder}: {error.strerror}") from error


def make_folder(path: str | Path) -> None:
    """Create a directory and its missing parents.

    Raises:
        PlanFileError: the directory cannot be created.
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
        next="free some space, or give another path"
        if is_full
        else "give a path in an existing directory that you have permission to write to",
    )
