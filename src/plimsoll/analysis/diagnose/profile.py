"""A profiler's trace in a common form: spans (named intervals) on the host and on the device, and the training steps.

Times are integer nanoseconds from each file's own origin, so that sums of parts are exact. The file also has the arithmetic on
intervals, and ``Nesting``, the trees of spans that enclose each other on a thread.
"""

from __future__ import annotations

import enum
import heapq
import re
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

Interval = tuple[int, int]
"""A pair of start and end, in nanoseconds."""


class HostKind(enum.Enum):
    """The kinds of spans (named intervals) on a host thread."""

    OP = "op"
    """An operation: ``aten::mm``, or a node of autograd's graph."""
    RANGE = "range"
    """A named range: an annotation, an NVTX range, a module."""
    CALL = "call"
    """A call of the device's runtime or driver: a launch, a copy, a wait."""


class DeviceKind(enum.Enum):
    """The kinds of spans (intervals of work) on a stream of a device."""

    KERNEL = "kernel"
    COPY = "copy"
    SET = "set"
    GRAPH = "graph"
    """A whole CUDA graph, where the profiler did not record its kernels one by one."""


class HostSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Data: one span (a named interval) on one host thread.

    ``sequence`` is autograd's sequence number, or -1. ``node_thread`` is positive for a node of backward. ``bytes`` is the size
    of the op's input tensors, or ``None`` if the trace does not record shapes.
    """

    name: str
    kind: HostKind
    thread: str
    start_ns: int
    end_ns: int
    sequence: int = -1
    node_thread: int = 0
    correlation: str = ""
    external: str = ""
    shape: str = ""
    bytes: int | None = None
    module: str = ""


class DeviceSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Data: one span (an interval of work) on one stream of a device.

    ``bytes`` is the size of a copy or a fill, and ``None`` for other spans.
    """

    name: str
    kind: DeviceKind
    device: int
    stream: int
    start_ns: int
    end_ns: int
    correlation: str = ""
    external: str = ""
    shape: str = ""
    bytes: int | None = None


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one profiler's trace, in a form that does not depend on the profiler.

    ``steps`` are the intervals of the steps on the host; the tuple is empty if the trace does not mark steps. ``forward_links``
    maps the start of a backward op (thread, nanosecond) to the start of the forward op that created it.
    """

    source: str
    host: tuple[HostSpan, ...]
    device: tuple[DeviceSpan, ...] = ()
    steps: tuple[Interval, ...] = ()
    are_steps_apart: bool = False
    """True if the host waited for the device after each step and other steps ran in between; False for steps of a loop."""
    device_names: dict[int, str] = {}
    bandwidth_bytes_per_second: dict[int, float] = {}
    forward_links: dict[tuple[str, int], tuple[str, int]] = {}

    @property
    def step_starts(self) -> list[int]:
        return [start for start, _ in self.steps]


MODULE_PREFIX = "plimsoll.module: "
RECOMPUTE_PREFIX = "plimsoll.recompute: "
TORCH_MODULE_PREFIX = "nn.Module: "

_STEP_NAME = re.compile(
    r"(?:(plimsoll\.step): |(ProfilerStep)#|(?:train(?:ing)?[ _])?(step|iteration|iter|batch)[ _#:=]*)\d+\s*",
    re.IGNORECASE,
)


def is_step(span: HostSpan) -> bool:
    """Whether a span (a named interval) marks a training step. Such a span does not tell the phase or module of work inside."""
    return span.kind is HostKind.RANGE and _STEP_NAME.fullmatch(span.name) is not None


def find_steps(host: tuple[HostSpan, ...]) -> tuple[tuple[Interval, ...], bool]:
    """Return the intervals of the training steps, in order, found from the names of ranges on the host.

    The second result says whether they are separate steps (``are_steps_apart``). If ranges of several name families could be
    steps, Plimsoll's own names win, then the profiler's, then the most frequent of the others.
    """
    families: dict[str, list[HostSpan]] = {}
    for span in host:
        match = _STEP_NAME.fullmatch(span.name) if span.kind is HostKind.RANGE else None
        if match is not None:
            families.setdefault(next(filter(None, match.groups())).lower(), []).append(span)
    if not families:
        return (), False
    ranks = {"plimsoll.step": 0, "profilerstep": 1}
    family = min(families, key=lambda name: (ranks.get(name, 2), -len(families[name])))
    steps: list[Interval] = []
    for span in sorted(families[family], key=lambda span: span.start_ns):
        if not steps or span.start_ns >= steps[-1][1]:
            steps.append((span.start_ns, span.end_ns))
    return tuple(steps), family == "plimsoll.step"


def clip(interval: Interval, windows: Sequence[Interval]) -> list[Interval]:
    """Return the parts of an interval that are inside ``windows``, which are disjoint and in order.

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


def covered_ns(interval: Interval, merged: Sequence[Interval]) -> int:
    """Return how many nanoseconds of an interval are covered by ``merged``, which are disjoint intervals in order.

    Example:
        >>> covered_ns((0, 10), [(2, 3), (8, 20)])
        3
    """
    return sum(end - start for start, end in clip(interval, merged))


def owned_ns(pieces: Sequence[tuple[int, int, int]]) -> list[int]:
    """Divide overlapping time among pieces of work, and return the nanoseconds of each piece, in the order of ``pieces``.

    Pieces are (start, end, rank). An instant belongs to the piece with the lowest rank, and among equal ranks to the earliest
    start. So work that overlaps counts once, and the results add up to the length of the union.

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
    """Finds which spans (named intervals of a trace) enclose each other: one tree of spans for each thread.

    ``spans`` are sorted by start, and an enclosing span comes before the spans inside it. ``parents`` holds the index of each
    span's innermost enclosing span, or -1. If a clock is coarse, a span may end after its parent; ``ends`` cuts it there.
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
        """Return the index of the innermost span (named interval) that is open on the thread at that moment, or -1."""
        indices = self._on_thread.get(thread, [])
        position = bisect_right(indices, at_ns, key=lambda index: self.spans[index].start_ns) - 1
        index = indices[position] if position >= 0 else -1
        while index >= 0 and self.ends[index] <= at_ns:
            index = self.parents[index]
        return index

    def own_segments(self) -> list[list[Interval]]:
        """Return, for each span (named interval), the times that belong to the span itself, because none of its child spans
        runs.

        Time of runtime calls counts as the parent's own time.
        """
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
