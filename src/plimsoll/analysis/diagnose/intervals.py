"""Intervals of nanoseconds in; unions, gaps and owners of every instant out."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What is covered at all, as disjoint intervals in order.

    Example:
        >>> union([(5, 9), (0, 3), (2, 4)])
        [(0, 4), (5, 9)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(interval: Interval, windows: Sequence[Interval]) -> list[Interval]:
    """The parts of an interval that lie in disjoint, ordered windows.

    Example:
        >>> clip((1, 8), [(0, 2), (5, 6), (7, 20)])
        [(1, 2), (5, 6), (7, 8)]
    """
    start, end = interval
    parts = []
    position = max(0, bisect_right(windows, (start, 0)) - 1)
    while position < len(windows) and windows[position][0] < end:
        low, high = max(start, windows[position][0]), min(end, windows[position][1])
        if low < high:
            parts.append((low, high))
        position += 1
    return parts


def gaps(covered: Sequence[Interval], windows: Sequence[Interval]) -> list[Interval]:
    """What disjoint, ordered windows hold beside disjoint, ordered intervals.

    Example:
        >>> gaps([(2, 3), (5, 9)], [(0, 10)])
        [(0, 2), (3, 5), (9, 10)]
    """
    found = []
    position = 0
    for low, high in windows:
        at = low
        while position < len(covered) and covered[position][1] <= low:
            position += 1
        index = position
        while index < len(covered) and covered[index][0] < high:
            if covered[index][0] > at:
                found.append((at, covered[index][0]))
            at = max(at, covered[index][1])
            index += 1
        if at < high:
            found.append((at, high))
    return found


def covered_ns(interval: Interval, merged: Sequence[Interval]) -> int:
    """How much of an interval disjoint, ordered intervals cover.

    Example:
        >>> covered_ns((0, 10), [(2, 3), (8, 20)])
        3
    """
    return sum(end - start for start, end in clip(interval, merged))


def owned_ns(pieces: Sequence[tuple[int, int, int]]) -> list[int]:
    """Give every covered instant to one piece: that of the lowest rank, among equals the one that started first.

    So what runs beside something else counts once, and the sum is the length of the union.

    Args:
        pieces: start, end and rank of each.

    Returns:
        Nanoseconds per piece, in the order given.

    Example:
        >>> owned_ns([(0, 10, 1), (4, 6, 0), (8, 12, 1)])
        [8, 2, 2]
    """
    order = sorted(range(len(pieces)), key=lambda index: pieces[index][0])
    owned = [0] * len(pieces)
    active: list[tuple[int, int, int]] = []
    position, now = 0, 0
    while position < len(order) or active:
        if not active:
            now = max(now, pieces[order[position]][0])
        while position < len(order) and pieces[order[position]][0] <= now:
            start, _, rank = pieces[order[position]]
            heapq.heappush(active, (rank, start, order[position]))
            position += 1
        owner = active[0][2]
        end = pieces[owner][1]
        if end <= now:
            heapq.heappop(active)
            continue
        until = min(end, pieces[order[position]][0]) if position < len(order) else end
        owned[owner] += until - now
        now = until
    return owned
