"""How far a long call is: the one type of callback that every verb takes, and its share in the parts of a call."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told the stage that a call is in, in words, and the share of the call that is done, from 0 to 1.

    Any function of two arguments will do.
    """

    def __call__(self, stage: str, share: float, /) -> None:
        """Take note."""
        ...


def silent(stage: str, share: float) -> None:
    """For who does not ask how far a call is."""


def part_of(report: Progress, start: float, end: float) -> Progress:
    """What a part of a call reports to, whose own 0 to 1 are ``start`` to ``end`` of the whole.

    Example:
        >>> part_of(lambda stage, share: print(stage, share), 0.5, 1.0)("solving", 0.5)
        solving 0.75
    """
    return lambda stage, share: report(stage, start + (end - start) * share)
