"""Bytes under a key in, the same bytes out of a later process, or nothing: a directory of checksummed files.

A file appears whole or not at all (written beside its place, then renamed), so that any number of processes may read and
write. What does not check out is removed. When a new file takes the directory past its limit, those that were used least
recently go. A cache that cannot be read or written only costs time: it never raises.

File: 16 bytes of magic, 32 bytes SHA-256 of what follows, then the payload compressed by zlib.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from plimsoll.units import MIB

_LOG = logging.getLogger(__name__)
_MAGIC = b"plimsoll cache 1"
_DIGEST_BYTES = 32
_SUFFIX = ".trace"
_PART = ".part"
_KEY = re.compile(r"[0-9a-f]{16,}")
_FAST = 1
_ABANDONED_SECONDS = 3600.0
"""A file that is still being written after this long belongs to a process that died."""
MOST_BYTES = 512 * MIB
"""The most that a cache directory holds unless another limit is given."""


class FileCache:
    """A directory of answers by key.

    Args:
        directory: made when the first answer is kept.
        most_bytes: of all files together; the least recently used are removed beyond it.

    Example:
        >>> import tempfile
        >>> cache = FileCache(Path(tempfile.mkdtemp()))
        >>> cache.put("0123456789abcdef", b"answer")
        >>> cache.get("0123456789abcdef"), cache.get("fedcba9876543210")
        (b'answer', None)
    """

    def __init__(self, directory: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self._directory = directory
        self._most_bytes = most_bytes

    def get(self, key: str) -> bytes | None:
        """What was put under ``key``, if it is still there and whole. Reading marks it as used."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.debug("cannot read %s: %s", path, error)
            return None
        payload = _checked(content)
        if payload is None:
            _LOG.debug("%s is damaged or not of this cache: removed", path)
            self.drop(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Keep ``payload`` under ``key``; what was there before is replaced."""
        body = zlib.compress(payload, _FAST)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write(self._path(key), _MAGIC + hashlib.sha256(body).digest() + body)
            self._shrink(keep=self._path(key))
        except OSError as error:
            _LOG.debug("cannot keep a trace in %s: %s", self._directory, error)

    def drop(self, key: str) -> None:
        """Forget what is under ``key``."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        assert _KEY.fullmatch(key), f"{key!r} is no key"
        return self._directory / f"{key}{_SUFFIX}"

    def _write(self, path: Path, content: bytes) -> None:
        handle, name = tempfile.mkstemp(prefix=path.stem, suffix=_PART, dir=self._directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise

    def _shrink(self, keep: Path) -> None:
        """Remove the least recently used until the rest fits; what was just written stays."""
        files = sorted(self._files(), reverse=True)
        total_bytes = 0
        for _, size_bytes, path in files:
            total_bytes += size_bytes
            if total_bytes > self._most_bytes and path != keep:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Time of last use, size and path of every file of this cache; remains of dead writers are removed."""
        for entry in os.scandir(self._directory):
            try:
                status = entry.stat()
                if entry.name.endswith(_SUFFIX):
                    yield status.st_mtime, status.st_size, Path(entry.path)
                elif entry.name.endswith(_PART) and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                    Path(entry.path).unlink()
            except OSError:  # another process removed it
                continue


def _checked(content: bytes) -> bytes | None:
    """The payload of a file, ``None`` unless it is whole and ours."""
    start = len(_MAGIC) + _DIGEST_BYTES
    if len(content) < start or not content.startswith(_MAGIC):
        return None
    body = content[start:]
    if hashlib.sha256(body).digest() != content[len(_MAGIC) : start]:
        return None
    try:
        return zlib.decompress(body)
    except zlib.error:
        return None
