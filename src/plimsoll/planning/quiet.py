"""Keeps HiGHS quiet: its branch and bound prints a line to the process's output now and then, whatever it is told.

Seen in the HiGHS of scipy 1.15 to 1.17, where a solution that left presolve slightly infeasible is repaired. The line comes
from C, so the file descriptor itself has to look elsewhere meanwhile. What others write in that time is passed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import tempfile
import threading
from collections.abc import Iterator

_STDOUT = 1
_PREFIX = b"Highs"


@functools.cache
def _turn() -> threading.Lock:
    """Two planners at once would put back each other's output."""
    return threading.Lock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside the block nothing that begins with the solver's name reaches the process's output."""
    if sys.platform == "win32":  # its C library has no common buffer to flush
        yield
        return
    flush = ctypes.CDLL(None).fflush
    with _turn(), tempfile.TemporaryFile() as heard:
        flush(None)
        try:
            real = os.dup(_STDOUT)
        except OSError:  # closed: nobody hears anything
            yield
            return
        os.dup2(heard.fileno(), _STDOUT)
        try:
            yield
        finally:
            flush(None)
            os.dup2(real, _STDOUT)
            os.close(real)
            heard.seek(0)
            for line in heard:
                if not line.startswith(_PREFIX):
                    os.write(_STDOUT, line)
