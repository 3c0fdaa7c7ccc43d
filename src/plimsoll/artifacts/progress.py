"""Progress of a long call: the type of the callback that functions such as ``plimsoll.plan`` accept, and two helpers."""

from __future__ import annotations

from typing import Protocol


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
