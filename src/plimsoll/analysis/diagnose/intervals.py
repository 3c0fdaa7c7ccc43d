"""Arithmetic on intervals of nanoseconds, and the trees of spans that enclose each other on a thread."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from plimsoll.analysis.diagnose.profile import HostKind, HostSpan, Interval


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Everything that is covered, as disjoint intervals in order.

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
    """The parts of disjoint, ordered windows that disjoint, ordered intervals leave free.

    Example:
        >>> gaps([(2, 3), (5, 9)], [(0, 10)])
        [(0, 2), (3, 5), (9, 10)]
    """
    found = []
    for low, high in windows:
        free_from = low
        for start, end in clip((low, high), covered):
            if start > free_from:
                found.append((free_from, start))
            free_from = end
        if free_from < high:
            found.append((free_from, high))
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

    Work that runs beside other work counts once that way, and the sum is the length of the union. Pieces are (start, end,
    rank); the result is nanoseconds per piece, in the order given.

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


class Nesting:
    """The trees of spans, one per thread.

    ``spans`` are ordered by start, an enclosing span before those inside it; ``parents`` holds the index of the innermost
    enclosing span, -1 for none. Where clocks are coarse a span may end after the one that encloses it: it is cut there.
    """

    def __init__(self, host: Sequence[HostSpan]) -> None:
        self.spans = sorted(host, key=lambda span: (span.start_ns, -span.end_ns, span.kind is HostKind.CALL))
        self.parents: list[int] = []
        self.ends: list[int] = []
        self._on_thread: dict[str, list[int]] = {}
        open_by_thread: dict[str, list[int]] = {}
        for index, span in enumerate(self.spans):
            opened = open_by_thread.setdefault(span.thread, [])
            while opened and self.ends[opened[-1]] <= span.start_ns:
                opened.pop()
            parent = opened[-1] if opened else -1
            self.parents.append(parent)
            self.ends.append(min(span.end_ns, self.ends[parent]) if opened else span.end_ns)
            opened.append(index)
            self._on_thread.setdefault(span.thread, []).append(index)

    def innermost(self, thread: str, at_ns: int) -> int:
        """The index of the innermost span that is open on a thread at a moment, -1 for none."""
        indices = self._on_thread.get(thread, [])
        position = bisect_right(indices, at_ns, key=lambda index: self.spans[index].start_ns) - 1
        index = indices[position] if position >= 0 else -1
        while index >= 0 and self.ends[index] <= at_ns:
            index = self.parents[index]
        return index

    def own_segments(self) -> list[list[Interval]]:
        """For each span the intervals in which none of its children runs; calls of the runtime count as their parent's."""
        segments: list[list[Interval]] = [[] for _ in self.spans]
        reached = [span.start_ns for span in self.spans]
        for index, span in enumerate(self.spans):
            parent = self.parents[index]
            if span.kind is HostKind.CALL or parent < 0:
                continue
            if span.start_ns > reached[parent]:
                segments[parent].append((reached[parent], span.start_ns))
            reached[parent] = max(reached[parent], self.ends[index])
        for index, span in enumerate(self.spans):
            if span.kind is not HostKind.CALL and self.ends[index] > reached[index]:
                segments[index].append((reached[index], self.ends[index]))
        return segments
