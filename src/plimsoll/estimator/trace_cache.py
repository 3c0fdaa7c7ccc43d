"""Stores traces and estimates in the user's cache directory, so that a repeated question does not need torch or planning.

The key of an answer is a digest of the whole question and of everything that could change the answer: the versions of the
libraries, and the sources of Plimsoll itself. A trace's key only says whether the device runs GPU kernels; an estimate's key
contains all figures of the device.

A file appears whole or not at all (written under a temporary name, then renamed), so any number of processes may read and
write. A damaged file is removed. When a new file takes the directory over its limit, the least recently used files are removed.
A cache that cannot be read or written only costs time: it never raises.

File: 16 bytes of magic, 32 bytes SHA-256 of the rest, then the payload compressed by zlib.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

import plimsoll
from plimsoll.artifacts.estimate import Estimate
from plimsoll.artifacts.files import PART, FileRefused, ReadLimits, read_file, whole_file
from plimsoll.artifacts.job import ModelFacts
from plimsoll.artifacts.trace import SCHEMA_VERSION, Trace
from plimsoll.units import GIB, MIB

OVERRIDE = "PLIMSOLL_CACHE_DIR"
"""The environment variable that overrides the cache directory."""
MOST_BYTES = 512 * MIB
"""The default limit for the size of the cache directory in bytes."""
_LOG = logging.getLogger(__name__)
_LIBRARIES = ("torch", "transformers", "diffusers", "timm", "numpy", "scipy", "msgspec")
_PACKAGE = Path(__file__).parents[1]
_SOURCES = (
    "artifacts",
    "estimator/catalogue",
    "estimator/local_rank",
    "estimator/targets",
    "tracing",
    "engine/tiles.py",
    "session/tiling.py",
)
"""The folders and files of Plimsoll whose sources can change a trace."""
_LIMITS = ReadLimits(most_bytes=1 * GIB)
_MAGIC = b"plimsoll cache 1"
_DIGEST_BYTES = 32
_SUFFIX = ".trace"
_KEY = re.compile(r"[0-9a-f]{16,}")
_FAST = 1
_ABANDONED_SECONDS = 3600.0
"""A temporary file older than this many seconds belongs to a process that died while it wrote the file."""


class TracedTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What one cache file of a trace contains: the trace of one rank's step, and the facts (sizes) of the whole model."""

    trace: Trace
    facts: ModelFacts


Answer = TypeVar("Answer", TracedTarget, Estimate)


class AnswerCache(Generic[Answer]):
    """Stores answers of one kind (traces or estimates) in files. The key is the question: a mapping of everything that was
    asked for.

    The default directory is ``$PLIMSOLL_CACHE_DIR``, or the user's cache directory.

    Example:
        >>> import tempfile
        >>> cache = AnswerCache(TracedTarget, Path(tempfile.mkdtemp()))
        >>> cache.get({"name": "llama-tiny"}) is None
        True
    """

    def __init__(self, kind: type[Answer], directory: Path | None = None, *, most_bytes: int = MOST_BYTES) -> None:
        self._kind: type[Answer] = kind
        self._files = FileCache(directory or cache_directory(), most_bytes=most_bytes)

    def get(self, question: Mapping[str, Any]) -> Answer | None:
        """Return the stored answer to an equal question. Return ``None`` if the file is missing or cannot be decoded."""
        key = key_of(question, self._kind)
        payload = self._files.get(key)
        if payload is None:
            return None
        try:
            answer: Answer = msgspec.msgpack.decode(payload, type=self._kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _LOG.debug("the cache entry %s is not a valid %s: %s", key, self._kind.__name__, error)
            self._files.drop(key)
            return None
        return answer

    def put(self, question: Mapping[str, Any], answer: Answer) -> None:
        """Store the answer in a file that is named after the question."""
        self._files.put(key_of(question, self._kind), msgspec.msgpack.encode(answer))


def key_of(question: Mapping[str, Any], kind: type[TracedTarget | Estimate] = TracedTarget) -> str:
    """Return a digest of a question (a mapping of everything that was asked for), the library versions and Plimsoll's sources.
    It names the file of the answer.

    The order of the question's keys does not matter.

    Example:
        >>> key_of({"tp": 1, "batch": 2}) == key_of({"batch": 2, "tp": 1})
        True
    """
    sources = _SOURCES if kind is TracedTarget else ("",)  # an estimate depends on the whole package
    surroundings = {
        "kind": kind.__name__,
        "schema": SCHEMA_VERSION,
        "versions": {"plimsoll": plimsoll.__version__} | {name: _version(name) for name in _LIBRARIES},
        "sources": _sources_digest(_PACKAGE / part for part in sources),
    }
    text = msgspec.json.encode({"question": dict(question), **surroundings}, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:40]


@functools.cache  # a millisecond each, for every key
def _version(library: str) -> str:
    """Return the installed version of a library, read without importing it; ``""`` if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _sources_digest(sources: Iterable[Path]) -> str:
    """Return a digest of the name, size and time of every source file. This takes a millisecond; hashing contents takes many.

    The catalogue's TOML files count as sources.
    """
    digest = hashlib.sha256()
    for source in sources:
        files = [source] if source.is_file() else source.rglob("*")
        for path in sorted(path for path in files if path.suffix in (".py", ".toml")):
            status = path.stat()
            digest.update(f"{path.relative_to(_PACKAGE)}:{status.st_size}:{status.st_mtime_ns};".encode())
    return digest.hexdigest()


def cache_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Return the cache directory: ``$PLIMSOLL_CACHE_DIR``, else the system's place for cached files.

    Example:
        >>> cache_directory({"PLIMSOLL_CACHE_DIR": "/scratch/plimsoll"}).as_posix()
        '/scratch/plimsoll'

    Source: XDG Base Directory Specification 0.8; on macOS and Windows the directories that their guidelines name.
    """
    known = os.environ if environment is None else environment
    if known.get(OVERRIDE):
        return Path(known[OVERRIDE]).expanduser()
    base = known.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():
        return Path(base) / "plimsoll"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "plimsoll"


class FileCache:
    """A directory that stores byte strings by key. Each byte string is in a file of its own that is named after the key.

    The directory is created when the first byte string is stored. If all files together have more than ``most_bytes``, the
    least recently used are removed.

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
        """Return the bytes that were stored under ``key``, or ``None`` if they are missing or damaged.

        Reading marks them as used.
        """
        path = self._path(key)
        try:
            content = read_file(path, _LIMITS)
        except FileRefused as error:
            _LOG.debug("cannot read %s: %s", path, error)
            return None
        payload = _checked(content)
        if payload is None:
            _LOG.debug("%s is damaged or was not written by this cache: removed", path)
            self.drop(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Store ``payload`` under ``key``. It replaces what was stored there before."""
        body = zlib.compress(payload, _FAST)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with whole_file(self._path(key)) as file:
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
            self._shrink(keep=self._path(key))
        except OSError as error:
            _LOG.debug("cannot store a trace in %s: %s", self._directory, error)

    def drop(self, key: str) -> None:
        """Remove the file for ``key``, if it exists."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        assert _KEY.fullmatch(key), f"{key!r} is not a cache key"
        return self._directory / f"{key}{_SUFFIX}"

    def _shrink(self, keep: Path) -> None:
        """Remove the least recently used files until the directory is within its limit. The file ``keep``, which was just
        written, is never removed.
        """
        total_bytes = 0
        for _, size_bytes, path in sorted(self._files(), reverse=True):
            total_bytes += size_bytes
            if total_bytes > self._most_bytes and path != keep:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield for each file the time of its last use, its size in bytes and its path. Partial files of processes that died
        are removed.
        """
        for entry in os.scandir(self._directory):
            try:
                status = entry.stat()
                if entry.name.endswith(_SUFFIX):
                    yield status.st_mtime, status.st_size, Path(entry.path)
                elif entry.name.endswith(PART) and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                    Path(entry.path).unlink()
            except OSError:  # another process removed it
                continue


def _checked(content: bytes) -> bytes | None:
    """Return the payload of a cache file, or ``None`` if the file is damaged or was not written by this cache."""
    start = len(_MAGIC) + _DIGEST_BYTES
    if len(content) < start or not content.startswith(_MAGIC):
        return None
    body = content[start:]
    if hashlib.sha256(body).digest() != content[len(_MAGIC) : start]:
        return None
    unpacker = zlib.decompressobj()
    try:
        payload = unpacker.decompress(body, _LIMITS.most_bytes)
    except zlib.error:
        return None
    return payload if unpacker.eof else None
