"""Spans of the host in; who encloses whom, and the time that each spends outside what it encloses, out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from plimsoll.analysis.diagnose.intervals import Interval
from plimsoll.analysis.diagnose.profile import HostKind, HostSpan


class Nesting:
    """The trees of spans, one per thread.

    ``spans`` are ordered by start, an enclosing span before what it encloses; ``parents`` holds the index of the innermost
    enclosing span, -1 for none. Where clocks are coarse a span may end after the one that encloses it: it is cut there.
    """

    def __init__(self, host: Sequence[HostSpan]) -> None:
        self.spans = sorted(host, key=lambda span: (span.start_ns, -span.end_ns, span.kind is HostKind.CALL))
        self.parents: list[int] = []
        self.ends: list[int] = []
        self._starts_by_thread: dict[str, tuple[list[int], list[int]]] = {}
        open_by_thread: dict[str, list[int]] = {}
        for index, span in enumerate(self.spans):
            opened = open_by_thread.setdefault(span.thread, [])
            while opened and self.ends[opened[-1]] <= span.start_ns:
                opened.pop()
            parent = opened[-1] if opened else -1
            self.parents.append(parent)
            self.ends.append(min(span.end_ns, self.ends[parent]) if opened else span.end_ns)
            opened.append(index)
            starts, indices = self._starts_by_thread.setdefault(span.thread, ([], []))
            starts.append(span.start_ns)
            indices.append(index)

    def innermost(self, thread: str, at_ns: int) -> int:
        """The index of the innermost span that is open on a thread at a moment, -1 for none."""
        starts, indices = self._starts_by_thread.get(thread, ([], []))
        position = bisect_right(starts, at_ns) - 1
        index = indices[position] if position >= 0 else -1
        while index >= 0 and self.ends[index] <= at_ns:
            index = self.parents[index]
        return index

    def own_segments(self) -> list[list[Interval]]:
        """Of each span the intervals in which none of its children runs; calls of the runtime count as their parent's."""
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
