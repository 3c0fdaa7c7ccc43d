"""What other budgets cost: a short table of budgets, with the time of a step and the largest change under each, and bars.

Plans show the table, and so do errors about a budget that is too small. The lines of text are made here and not by a renderer,
because errors may not import renderers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.artifacts.plan import FrontierPoint
from plimsoll.units import format_bytes_up, format_seconds, format_share

TITLE = "What other budgets cost"
HEADER = ("budget", "step", "extra time", "largest change")
_MOST_ROWS = 10
_BAR_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class OtherBudgets:
    """A table of budgets between the peak without a plan and the lowest peak, the largest first, with the time of a step under
    each.

    Example:
        >>> points = [FrontierPoint(peak_bytes=2**20, step_seconds=1.5), FrontierPoint(peak_bytes=2**21, step_seconds=1.0)]
        >>> OtherBudgets.of(points, 1.0).rows
        [('2.0 MiB', '1.00 s', '+0.0%', 'none'), ('1.0 MiB', '1.50 s', '+50.0%', 'none')]
    """

    points: tuple[FrontierPoint, ...]
    baseline_seconds: float

    @classmethod
    def of(
        cls,
        frontier: Sequence[FrontierPoint],
        baseline_seconds: float,
        *,
        excess_bytes: int = 0,
        least_bytes: int = 0,
    ) -> OtherBudgets:
        """Choose up to 10 points of a frontier (the least step time for each peak) with about equal distances in bytes.

        Args:
            frontier: the points, in any order.
            baseline_seconds: the time of the step without a plan.
            excess_bytes: bytes that the training step needs in addition to each point's peak.
            least_bytes: no budget below this works, because the peak after backward does not depend on a plan.
        """
        budgets: dict[int, FrontierPoint] = {}
        for point in sorted(frontier, key=lambda point: -point.step_seconds):
            peak_bytes = max(
                point.peak_bytes + excess_bytes, least_bytes
            )  # of points that need the same, keep the fastest
            budgets[peak_bytes] = FrontierPoint(
                peak_bytes=peak_bytes, step_seconds=point.step_seconds, change=point.change
            )
        return cls(_spread([budgets[size] for size in sorted(budgets, reverse=True)]), baseline_seconds)

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """The cells of each row, in the order of `HEADER`. Budgets are rounded up, so that each can be used as it stands."""
        return [
            (
                format_bytes_up(point.peak_bytes),
                format_seconds(point.step_seconds),
                format_share(point.step_seconds / self.baseline_seconds - 1) if self.baseline_seconds else "–",
                point.change or "none",
            )
            for point in self.points
        ]

    @property
    def shares(self) -> list[float]:
        """The extra time of each row as a share of the largest extra time, for bars."""
        extra = [max(0.0, point.step_seconds - self.baseline_seconds) for point in self.points]
        most = max(extra, default=0.0)
        return [seconds / most if most else 0.0 for seconds in extra]

    def lines(self) -> list[str]:
        """Return the table as lines of text: the title, and for each row a bar of its extra time."""
        bars = ["", *("█" * round(share * _BAR_COLUMNS) for share in self.shares)]
        widths = [max(len(row[place]) for row in (HEADER, *self.rows)) for place in range(3)]
        lines = [TITLE] if self.points else []
        for row, bar in zip((HEADER, *self.rows) if self.points else (), bars, strict=False):
            numbers = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False))
            lines.append(f"  {numbers}  {bar.ljust(_BAR_COLUMNS)}  {row[3]}")
        return lines


def _spread(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Return at most `_MOST_ROWS` points: the first, the last, and those nearest to equal distances in bytes between them."""
    if len(points) <= _MOST_ROWS:
        return tuple(points)
    most_bytes, least_bytes = points[0].peak_bytes, points[-1].peak_bytes
    left, chosen = list(points[1:-1]), [points[0], points[-1]]
    for place in range(1, _MOST_ROWS - 1):
        wanted_bytes = most_bytes - place * (most_bytes - least_bytes) / (_MOST_ROWS - 1)
        nearest = min(left, key=lambda point: abs(point.peak_bytes - wanted_bytes))
        left.remove(nearest)
        chosen.append(nearest)
    return tuple(sorted(chosen, key=lambda point: -point.peak_bytes))
