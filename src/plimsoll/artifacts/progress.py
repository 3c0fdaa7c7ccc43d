"""Progress of a long call: the type of the callback that functions such as ``plimsoll.plan`` accept, and a bar."""

from __future__ import annotations

import os
import sys
from typing import Literal, Protocol

from plimsoll.errors import InvalidOption

_BAR_COLUMNS = 30
_CLEAR_LINE = "\r\x1b[2K"


class Progress(Protocol):
    """A callback that receives the current stage, in words, and the completed share of the call, from 0 to 1.

    Any function of two arguments works.
    """

    def __call__(self, stage: str, share: float, /) -> None:
        """Receive one report: ``stage`` describes the present work, ``share`` is the completed share, from 0 to 1."""
        ...


def silent(stage: str, share: float) -> None:
    """Do nothing. It is the progress callback that is used by default: it ignores all reports."""


def part_of(report: Progress, start: float, end: float) -> Progress:
    """Return a callback for one part of a call. The part reports shares from 0 to 1; ``report`` gets ``start`` to ``end``.

    Example:
        >>> part_of(lambda stage, share: print(stage, share), 0.5, 1.0)("solving", 0.5)
        solving 0.75
    """
    return lambda stage, share: report(stage, start + (end - start) * share)


def is_bar_shown() -> bool:
    """Return True if `bar` writes: stderr is a terminal, and this is the first rank."""
    # pythonw and some daemons have no stderr
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


def bar(stage: str, share: float) -> None:
    """Show a report as one line on stderr that the next report replaces. At share 1 the line disappears.

    Nothing is written if stderr is not a terminal, and on other ranks than the first.
    """
    if not is_bar_shown():
        return
    done = round(_BAR_COLUMNS * share)
    line = "" if share >= 1 else f"plimsoll {'━' * done}{'─' * (_BAR_COLUMNS - done)} {share:4.0%} {stage}"
    sys.stderr.write(_CLEAR_LINE + line)
    sys.stderr.flush()


def read_progress(progress: Progress | Literal["bar"] | None) -> Progress:
    """Return the callback for the argument ``progress`` of a public function.

    Raises:
        InvalidOption: it is neither a function, nor ``"bar"``, nor ``None``.
    """
    if progress is None:
        return silent
    if progress == "bar":
        return bar
    if callable(progress):
        return progress
    raise InvalidOption(
        f"progress={progress!r} is not a function.",
        why="a progress callback receives the stage as text and the share done from 0 to 1",
        next='pass a function of these two arguments, or progress="bar" for a bar on the terminal',
    )
