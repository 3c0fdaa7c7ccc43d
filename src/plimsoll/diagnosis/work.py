"""A profile in; its work, each piece with phase, module and the time that it alone accounts for, and its idle time out.

On a device a piece of work is a kernel, a copy, a fill or a whole graph; without device activity it is a CPU op's own
time. Every busy instant belongs to one piece (computation before communication before graphs before copies before fills),
so the pieces add up to the busy time, and busy and idle time to the step.
"""

from __future__ import annotations

import enum
import itertools
import re
from bisect import bisect_right

import msgspec

from plimsoll.artifacts.finding import LONG_GAP_SECONDS, Phase, Unit
from plimsoll.diagnosis.intervals import Interval, clip, covered_ns, gaps, owned_ns, union
from plimsoll.diagnosis.labels import Label, label_spans
from plimsoll.diagnosis.nesting import Nesting
from plimsoll.diagnosis.profile import DeviceKind, DeviceSpan, HostKind, HostSpan, Profile

_LONG_GAP_NS = round(LONG_GAP_SECONDS * 1e9)
_WAITING = re.compile(r"(?:cuda|cu|hip)(?:Device|Stream|Event|Ctx)Synchronize|(?:cuda|hip)Mem(?:cpy|set)(?:_v\d+)?$")
_LAUNCHING_GRAPHS = re.compile(r"(?:cuda|cu|hip)GraphLaunch")
_COMMUNICATION = re.compile(r"nccl|rccl", re.IGNORECASE)
_CPU_COPIES = frozenset({"aten::copy_", "aten::_to_copy", "aten::clone", "aten::fill_", "aten::zero_"})
_MOVES_NOTHING = re.compile(
    r"(?:aten::)?(?:view|as_strided|expand|reshape|t|transpose|permute|unsqueeze|squeeze|slice|select|narrow|detach|alias"
    r"|empty|empty_like|empty_strided|empty_permuted|resolve_conj|resolve_neg|result_type|_unsafe_view|unbind|chunk|split"
    r"|to|resize_|unflatten|flatten|contiguous|item|_local_scalar_dense|is_nonzero|movedim|diagonal|_reshape_alias"
    r"|lift_fresh|set_|view_as|expand_as|unfold|split_with_sizes|new_empty|new_empty_strided)"
)
"""Ops that only look at a tensor or make room for one."""


class WorkKind(enum.Enum):
    """What a piece of work is; in this order an instant is given to it."""

    COMPUTE = 0
    COMMUNICATION = 1
    GRAPH = 2
    COPY = 3
    SET = 4


class Work(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One piece of work. ``own_ns`` is its share of the busy time; ``operation`` the op or range that asked for it."""

    name: str
    shape: str
    kind: WorkKind
    phase: Phase
    module: str
    operation: str
    step: int
    own_ns: int
    is_counted: bool = True
    """Whether it computes: a CPU op that only looks at tensors, or calls other ops, takes time but is none of the count."""
    bytes: int | None = None


class Gap(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One interval in which nothing runs, split into what the host did meanwhile."""

    step: int
    waiting_ns: int
    """The host waited for the device."""
    launching_ns: int
    """The host had not come as far as launching what runs next."""
    stalled_ns: int
    """What runs next was launched already, and did not start for longer than a launch takes."""

    @property
    def length_ns(self) -> int:
        return self.waiting_ns + self.launching_ns + self.stalled_ns


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """A profile as accounts: ``work`` and ``idle`` together are the ``steps`` steps, ``wall_ns`` each."""

    source: str
    unit: Unit
    device: int | None
    device_name: str
    bandwidth_bytes_per_second: float | None
    wall_ns: tuple[int, ...]
    work: tuple[Work, ...]
    idle: tuple[Gap, ...]
    graph_launches: int
    has_shapes: bool
    has_modules: bool
    has_nodes: bool
    """Whether the trace shows autograd's nodes, so that recomputation inside them can be told from backward."""
    notes: tuple[str, ...]

    @property
    def steps(self) -> int:
        """How many steps the accounts cover."""
        return len(self.wall_ns)


def keep_ledger(profile: Profile, unit: Unit) -> Ledger:
    """The accounts of a profile.

    Args:
        profile: the trace.
        unit: kernels, or CPU ops: those of a trace with device activity as well.
    """
    nesting = Nesting(profile.host)
    labels = label_spans(nesting, profile)
    book = _DeviceBook(profile, nesting, labels) if unit is Unit.KERNELS else _HostBook(profile, nesting, labels)
    return book.close()


class _Book:
    """What device and host accounts share: windows of steps, and the host's calls."""

    unit = Unit.CPU_OPS

    def __init__(self, profile: Profile, nesting: Nesting, labels: list[Label]) -> None:
        self.profile = profile
        self.nesting = nesting
        self.labels = labels
        self.notes: list[str] = []
        self.launches = {
            span.correlation: index
            for index, span in enumerate(nesting.spans)
            if span.kind is HostKind.CALL and span.correlation
        }
        self.waits = union((s.start_ns, s.end_ns) for s in nesting.spans if _is_waiting(s))
        self.windows = self._windows()
        self.step_starts = [step.start_ns for step in profile.steps] or [self.windows[0][0]]

    def _windows(self) -> list[Interval]:
        raise NotImplementedError

    def _host_windows(self) -> list[Interval]:
        steps = self.profile.steps
        if not steps:
            self.notes.append(f"{self.profile.source} marks no steps: the whole trace counts as one.")
            spans = [(span.start_ns, span.end_ns) for span in self.profile.host]
            spans += [(span.start_ns, span.end_ns) for span in self.profile.device]
            return [(min(start for start, _ in spans), max(end for _, end in spans))]
        if self.profile.are_steps_apart:
            return [(step.start_ns, step.end_ns) for step in steps]
        return [(steps[0].start_ns, steps[-1].end_ns)]

    def step_of(self, at_ns: int) -> int:
        """The step that a moment belongs to."""
        return max(0, bisect_right(self.step_starts, at_ns) - 1)

    def wall_ns(self) -> tuple[int, ...]:
        """The length of each step; the first and the last of a loop take what lies before and after them."""
        if len(self.windows) > 1 or len(self.step_starts) == 1:
            return tuple(end - start for start, end in self.windows)
        start, end = self.windows[0]
        edges = [start, *(min(max(start, step), end) for step in self.step_starts[1:]), end]
        return tuple(high - low for low, high in itertools.pairwise(edges))

    def graph_launches(self) -> int:
        return sum(
            1
            for span in self.nesting.spans
            if span.kind is HostKind.CALL
            and _LAUNCHING_GRAPHS.match(span.name)
            and clip_point(span.start_ns, self.windows)
        )

    def ledger(self, work: list[Work], idle: list[Gap], device: int | None) -> Ledger:
        profile = self.profile
        return Ledger(
            source=profile.source,
            unit=self.unit,
            device=device,
            device_name="CPU" if device is None else profile.device_names.get(device, ""),
            bandwidth_bytes_per_second=None if device is None else profile.bandwidth_bytes_per_second.get(device),
            wall_ns=self.wall_ns(),
            work=tuple(work),
            idle=tuple(idle),
            graph_launches=self.graph_launches(),
            has_shapes=any(span.bytes is not None for span in self.nesting.spans),
            has_modules=any(label.module for label in self.labels),
            has_nodes=any(label.is_in_node for label in self.labels),
            notes=tuple(self.notes),
        )

    def close(self) -> Ledger:
        raise NotImplementedError


def clip_point(at_ns: int, windows: list[Interval]) -> bool:
    """Whether a moment lies in one of the windows."""
    return bool(clip((at_ns, at_ns + 1), windows))


def _is_waiting(span: HostSpan) -> bool:
    return span.kind is HostKind.CALL and bool(_WAITING.match(span.name))


class _HostBook(_Book):
    """Accounts of CPU ops: each op's own time; what lies between ops is the host's Python and framework."""

    def _windows(self) -> list[Interval]:
        return self._host_windows()

    def close(self) -> Ledger:
        is_computing = _computing_ops(self.nesting)
        pieces: list[tuple[int, int, int]] = []
        owners: list[int] = []
        counted: dict[int, int] = {}
        for index, segments in enumerate(self.nesting.own_segments()):
            if self.nesting.spans[index].kind is not HostKind.OP or self.labels[index].is_engine:
                continue
            for segment in segments:
                for start, end in clip(segment, self.windows):
                    pieces.append((start, end, 0))
                    owners.append(index)
            if clip_point(self.nesting.spans[index].start_ns, self.windows):
                counted.setdefault(index, 0)
        for index, own in zip(owners, owned_ns(pieces), strict=True):
            counted[index] = counted.get(index, 0) + own
        work = [self._work(index, own, is_counted=is_computing[index]) for index, own in sorted(counted.items())]
        covered = union((start, end) for start, end, _ in pieces)
        idle = [self._gap(start, end) for start, end in gaps(covered, self.windows)]
        return self.ledger(work, idle, None)

    def _work(self, index: int, own_ns: int, *, is_counted: bool) -> Work:
        span, label = self.nesting.spans[index], self.labels[index]
        return Work(
            name=span.name,
            shape=span.shape,
            kind=WorkKind.COPY if span.name in _CPU_COPIES else WorkKind.COMPUTE,
            phase=label.phase or Phase.OTHER,
            module=label.module,
            operation=span.name,
            step=self.step_of(span.start_ns),
            own_ns=own_ns,
            is_counted=is_counted,
            bytes=span.bytes if is_counted else 0 if span.bytes is not None else None,
        )

    def _gap(self, start: int, end: int) -> Gap:
        waiting = covered_ns((start, end), self.waits)
        return Gap(step=self.step_of(start), waiting_ns=waiting, launching_ns=end - start - waiting, stalled_ns=0)


def _computing_ops(nesting: Nesting) -> list[bool]:
    """The innermost ops that compute something, rather than look at tensors or make room for them."""
    is_computing = [False] * len(nesting.spans)
    has_computing = [False] * len(nesting.spans)
    for index in range(len(nesting.spans) - 1, -1, -1):
        span, parent = nesting.spans[index], nesting.parents[index]
        if span.kind is HostKind.OP and not has_computing[index]:
            is_computing[index] = not _MOVES_NOTHING.fullmatch(span.name)
        if parent >= 0 and (is_computing[index] or has_computing[index]):
            has_computing[parent] = True
    return is_computing


class _DeviceBook(_Book):
    """Accounts of one device: the one that is busy longest."""

    unit = Unit.KERNELS

    def __init__(self, profile: Profile, nesting: Nesting, labels: list[Label]) -> None:
        busy: dict[int, int] = {}
        for span in profile.device:
            busy[span.device] = busy.get(span.device, 0) + span.end_ns - span.start_ns
        self.device = max(busy, key=lambda device: busy[device])
        self.spans = sorted((s for s in profile.device if s.device == self.device), key=lambda s: s.start_ns)
        self.by_external = {
            span.external: index
            for index, span in enumerate(nesting.spans)
            if span.kind is HostKind.OP and span.external and span.external != "0"
        }
        super().__init__(profile, nesting, labels)
        if len(busy) > 1:
            self.notes.append(
                f"{profile.source} has activity of {len(busy)} devices; device {self.device}, the busiest, is shown."
            )

    def _windows(self) -> list[Interval]:
        """Steps from when earlier work has drained until their own work has; those that stand apart as they are."""
        windows = self._host_windows()
        if not self.profile.steps or self.profile.are_steps_apart:
            return windows
        first, last = windows[0]
        start, end = first, last
        seen_streams: set[int] = set()
        for span in self.spans:
            launched = self._launched_ns(span)
            if launched is None:  # on a stream that has shown none of the steps' work, it was launched before the trace
                launched = first if span.stream in seen_streams else first - 1
            if launched < first < span.end_ns:
                start = max(start, span.end_ns)
            elif first <= launched < last:
                seen_streams.add(span.stream)
                end = max(end, span.end_ns)
        return [(start, end)] if start < end else windows

    def _launched_ns(self, span: DeviceSpan) -> int | None:
        index = self.launches.get(span.correlation)
        return None if index is None else self.nesting.spans[index].start_ns

    def close(self) -> Ledger:
        pieces: list[tuple[int, int, int]] = []
        owners: list[int] = []
        for position, span in enumerate(self.spans):
            for start, end in clip((span.start_ns, span.end_ns), self.windows):
                pieces.append((start, end, _kind_of(span).value))
                owners.append(position)
        own: dict[int, int] = {}
        for position, nanoseconds in zip(owners, owned_ns(pieces), strict=True):
            own[position] = own.get(position, 0) + nanoseconds
        seen: set[int] = set()
        work = [self._work(self.spans[position], nanoseconds, seen) for position, nanoseconds in sorted(own.items())]
        covered = union((start, end) for start, end, _ in pieces)
        starts = [span.start_ns for span in self.spans]
        idle = [self._gap(start, end, starts) for start, end in gaps(covered, self.windows)]
        return self.ledger(work, idle, self.device)

    def _work(self, span: DeviceSpan, own_ns: int, seen: set[int]) -> Work:
        launch = self.launches.get(span.correlation, -1)
        asked = self.nesting.parents[launch] if launch >= 0 else -1
        if asked < 0:
            asked = self.by_external.get(span.external, -1)
        if launch < 0:
            launch = asked
        label = self.labels[asked] if asked >= 0 else Label()
        at_ns = self.nesting.spans[launch].start_ns if launch >= 0 else span.start_ns
        bytes_ = span.bytes
        if span.kind is DeviceKind.KERNEL and asked >= 0:
            bytes_ = 0 if asked in seen else self.nesting.spans[asked].bytes
            seen.add(asked)
        return Work(
            name=span.name,
            shape=span.shape,
            kind=_kind_of(span),
            phase=label.phase or Phase.OTHER,
            module=label.module,
            operation=self.nesting.spans[asked].name if asked >= 0 else "",
            step=self.step_of(at_ns),
            own_ns=own_ns,
            bytes=bytes_,
        )

    def _gap(self, start: int, end: int, starts: list[int]) -> Gap:
        """Waiting first, then whatever came after the launch of what runs next, if that is longer than a launch takes."""
        waiting = covered_ns((start, end), self.waits)
        rest = end - start - waiting
        position = bisect_right(starts, end - 1)
        stalled = 0
        if position < len(self.spans) and self.spans[position].start_ns == end:
            launch = self.launches.get(self.spans[position].correlation, -1)
            if launch >= 0:
                queued = max(start, self.nesting.spans[launch].end_ns)
                stalled = max(0, end - queued - covered_ns((queued, end), self.waits)) if queued < end else 0
        if stalled < _LONG_GAP_NS:
            stalled = 0
        return Gap(step=self.step_of(start), waiting_ns=waiting, launching_ns=rest - stalled, stalled_ns=stalled)


def _kind_of(span: DeviceSpan) -> WorkKind:
    if span.kind is DeviceKind.KERNEL:
        return WorkKind.COMMUNICATION if _COMMUNICATION.search(span.name) else WorkKind.COMPUTE
    return {DeviceKind.GRAPH: WorkKind.GRAPH, DeviceKind.COPY: WorkKind.COPY, DeviceKind.SET: WorkKind.SET}[span.kind]
