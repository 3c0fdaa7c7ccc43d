"""A frontier of time against peak in, the point out after which memory gets dear."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.artifacts.plan import FrontierPoint

CHEAP = 0.01
"""An overhead that is not worth weighing: the smallest peak within it is taken before any knee."""


def find_knee(frontier: Sequence[FrontierPoint], baseline_seconds: float) -> FrontierPoint | None:
    """The point farthest below the line between the ends of the frontier, both axes taken from 0 to 1.

    Where a smaller peak costs no more than 1% of the step, that one.

    Args:
        frontier: points of which none beats another in both peak and time.
        baseline_seconds: of the unmanaged step.

    Returns:
        ``None`` where there is nothing between two ends to choose from.

    Example:
        >>> points = [FrontierPoint(peak_bytes=b, step_seconds=s) for b, s in ((10, 2.0), (20, 1.2), (40, 1.0))]
        >>> find_knee(points, 1.0).peak_bytes
        20

    Source: Satopää et al. 2011, Finding a "Kneedle" in a Haystack; without its smoothing, as the curve is exact.
    """
    if len(frontier) < 2:
        return None
    points = sorted(frontier, key=lambda point: point.peak_bytes)
    low, high = points[0], points[-1]
    bytes_range = high.peak_bytes - low.peak_bytes
    seconds = [point.step_seconds for point in points]
    seconds_range = max(seconds) - min(seconds)
    cheap = next((p for p in points if p.step_seconds <= baseline_seconds * (1 + CHEAP)), high)
    if not bytes_range or not seconds_range:
        return cheap

    def distance(point: FrontierPoint) -> float:
        return (
            1.0
            - (point.peak_bytes - low.peak_bytes) / bytes_range
            - (point.step_seconds - min(seconds)) / seconds_range
        )

    knee = max(points, key=distance)
    return min(knee, cheap, key=lambda point: point.peak_bytes)
