"""Collects what Plimsoll says while a loop trains: Python warnings, and log records at the level of warnings."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextlib.contextmanager
def everything_said() -> Iterator[list[str]]:
    """Return a context whose list gets the texts, in their order."""
    said: list[str] = []
    lines, library = _Lines(said), logging.getLogger("plimsoll")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: said.append(str(message))
        library.addHandler(lines)
        try:
            yield said
        finally:
            library.removeHandler(lines)
