"""The question that a trace answers in, the trace and the facts of its model out, if they were kept before.

The key is a digest of the whole question and of everything that could change the answer: the versions of the libraries,
and the sources of Plimsoll itself. The device is not part of it, only whether it runs GPU kernels.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from plimsoll.artifacts.model_facts import ModelFacts
from plimsoll.artifacts.trace import SCHEMA_VERSION, Trace
from plimsoll.estimator.caching.directory import cache_directory
from plimsoll.estimator.caching.files import MOST_BYTES, FileCache

_LOG = logging.getLogger(__name__)
_LIBRARIES = ("plimsoll", "torch", "transformers", "diffusers")
_PACKAGE = Path(__file__).parents[2]
_SOURCES = ("artifacts", "estimator/catalogue", "estimator/local_rank", "estimator/targets", "tracing")
"""The parts of Plimsoll that a trace depends on."""


class KeptTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What one file of the cache holds."""

    trace: Trace
    facts: ModelFacts


class TraceCache:
    """Traces by the question they answer, in files.

    Args:
        directory: by default ``$PLIMSOLL_CACHE_DIR``, or the user's cache directory.
        most_bytes: of all files together; the least recently used are removed beyond it.
    """

    def __init__(self, directory: Path | None = None, *, most_bytes: int = MOST_BYTES) -> None:
        self._files = FileCache(directory or cache_directory(), most_bytes=most_bytes)

    def get(self, question: Mapping[str, Any]) -> KeptTrace | None:
        """The answer that was kept for an equal question; anything that cannot be read counts as none."""
        key = key_of(question)
        payload = self._files.get(key)
        if payload is None:
            return None
        try:
            return msgspec.msgpack.decode(payload, type=KeptTrace)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _LOG.debug("what is kept under %s is no trace: %s", key, error)
            self._files.drop(key)
            return None

    def put(self, question: Mapping[str, Any], answer: KeptTrace) -> None:
        """Keep the answer to a question."""
        self._files.put(key_of(question), msgspec.msgpack.encode(answer))


def key_of(question: Mapping[str, Any]) -> str:
    """A digest of the question, of library versions and of Plimsoll's sources; the order of keys does not matter.

    Example:
        >>> key_of({"tp": 1, "batch": 2}) == key_of({"batch": 2, "tp": 1})
        True
    """
    surroundings = {
        "schema": SCHEMA_VERSION,
        "versions": {name: _version(name) for name in _LIBRARIES},
        "sources": _sources_digest(_PACKAGE / part for part in _SOURCES),
    }
    text = msgspec.json.encode({"question": dict(question), **surroundings}, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:40]


def _version(library: str) -> str:
    """The installed version, read without importing the library."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _sources_digest(folders: Iterable[Path]) -> str:
    """Changes when a source file does: name, size and time of each, which takes a millisecond where contents take many.

    The models of the catalogue are sources too: they are the TOML files.
    """
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".toml")):
            status = path.stat()
            digest.update(f"{path.relative_to(_PACKAGE)}:{status.st_size}:{status.st_mtime_ns};".encode())
    return digest.hexdigest()
