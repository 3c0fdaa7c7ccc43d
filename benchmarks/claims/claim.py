"""What was published and what we get in, a verdict out, by the same thresholds for every claim.

A figure is *reproduced* within 5% of what was published (or of its range), *off* within 30%, and beyond that *wrong*. A
claim is as good as its worst figure. The thresholds are the same everywhere, and no model of ours is tuned to a claim.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPRODUCED_WITHIN = 0.05
OFF_WITHIN = 0.30


class Verdict(enum.StrEnum):
    """How a claim compares with our figures."""

    REPRODUCED = "reproduced"
    OFF = "off"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Range:
    """A published range; a single figure is a range of one point."""

    low: float
    high: float

    def distance(self, value: float) -> float:
        """How far ``value`` lies outside, signed, as a share of the nearer end; 0 inside."""
        if value < self.low:
            return value / self.low - 1 if self.low else -1.0
        if value > self.high:
            return value / self.high - 1 if self.high else 1.0
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One published figure beside ours; ``unit`` is a format with one field.

    With ``is_other_reading`` it shows what another reading of the text would give, and takes no part in the verdict.
    """

    what: str
    published: float | Range
    ours: float
    unit: str = "{:.3g}"
    is_other_reading: bool = False

    @property
    def range(self) -> Range:
        """What was published, as a range."""
        return self.published if isinstance(self.published, Range) else Range(self.published, self.published)

    @property
    def error(self) -> float:
        """How far ours lies from what was published, as a share of it; 0 within a range."""
        return self.range.distance(self.ours)

    @property
    def verdict(self) -> Verdict:
        """By the thresholds of this module."""
        if abs(self.error) <= REPRODUCED_WITHIN:
            return Verdict.REPRODUCED
        return Verdict.OFF if abs(self.error) <= OFF_WITHIN else Verdict.WRONG


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One published statement; ``reading`` says what we compute for it, ``why`` where and why the two differ.

    With ``is_cheap`` its figures take about a second: those are also tests.
    """

    name: str
    statement: str
    source: str
    reading: str
    figures: Callable[[], Sequence[Figure]]
    why: str = ""
    is_cheap: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A claim with its figures."""

    claim: Claim
    figures: tuple[Figure, ...]

    @property
    def counted(self) -> tuple[Figure, ...]:
        """The figures that the verdict is about."""
        return tuple(figure for figure in self.figures if not figure.is_other_reading)

    @property
    def verdict(self) -> Verdict:
        """That of the worst figure."""
        return max((figure.verdict for figure in self.counted), key=list(Verdict).index)

    @property
    def summary(self) -> str:
        """The verdict with the range of errors, as the table prints it."""
        errors = [figure.error for figure in self.counted]
        worst = max(errors, key=abs)
        if self.verdict is Verdict.REPRODUCED:
            return f"reproduced (within {abs(worst):.1%})" if worst else "reproduced"
        low, high = min(errors), max(errors)
        spread = f"{worst:+.0%}" if len(errors) == 1 or low == high else f"{low:+.0%} to {high:+.0%}"
        return f"off by {spread}" if self.verdict is Verdict.OFF else f"wrong ({spread})"


def judge(claim: Claim) -> Judged:
    """Compute a claim's figures."""
    return Judged(claim=claim, figures=tuple(claim.figures()))
