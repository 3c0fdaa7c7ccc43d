"""Progress of a long call: the callback type that every verb accepts, and how parts of a call share it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A callback that receives the current stage, in words, and the completed share of the call, from 0 to 1.

    Any function of two arguments works.
    """

    def __call__(self, stage: str, share: float, /) -> None:
        """Receive one report."""
        ...


def silent(stage: str, share: float) -> None:
    """Ignore progress; the default callback."""


def part_of(report: Progress, start: float, end: float) -> Progress:
    """Return the callback for one part of a call: its 0 to 1 become ``start`` to ``end`` of the whole.

    Example:
        >>> part_of(lambda stage, share: print(stage, share), 0.5, 1.0)("solving", 0.5)
        solving 0.75
    """
    return lambda stage, share: report(stage, start + (end - start) * share)
