"""Turns a profile into a ledger: which piece of work each instant of the profiled steps belongs to, and what the host did while
the device was idle.

``_HostAccounts`` counts CPU ops, for traces without device activity. ``_DeviceAccounts`` counts the work of one device.
"""

from __future__ import annotations

import abc
import itertools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator

from plimsoll.analysis.diagnose.attribution import Label, label_spans
from plimsoll.analysis.diagnose.ledger import Gap, Ledger, WorkKind, WorkPiece
from plimsoll.analysis.diagnose.profile import (
    DeviceKind,
    DeviceSpan,
    HostKind,
    HostSpan,
    Interval,
    Nesting,
    Profile,
    clip,
    covered_ns,
    is_step,
    owned_ns,
)
from plimsoll.artifacts.finding import LONG_GAP_SECONDS, WorkPhase, WorkUnit
from plimsoll.planning.step import merge, subtract

_WAITING = re.compile(r"(?:cuda|cu|hip)(?:Device|Stream|Event|Ctx)Synchronize|(?:cuda|hip)Mem(?:cpy|set)(?:_v\d+)?$")
_LAUNCHING_GRAPHS = re.compile(r"(?:cuda|cu|hip)GraphLaunch")
_COMMUNICATION = re.compile(r"nccl|rccl", re.IGNORECASE)
_LONG_GAP_NS = round(LONG_GAP_SECONDS * 1e9)
_CPU_COPIES = frozenset({"aten::copy_", "aten::_to_copy", "aten::clone", "aten::fill_", "aten::zero_"})
_KINDS = {DeviceKind.GRAPH: WorkKind.GRAPH, DeviceKind.COPY: WorkKind.COPY, DeviceKind.SET: WorkKind.SET}
_MOVES_NOTHING = re.compile(
    r"(?:aten::)?(?:view|as_strided|expand|reshape|t|transpose|permute|unsqueeze|squeeze|slice|select|narrow|detach|alias"
    r"|empty|empty_like|empty_strided|empty_permuted|resolve_conj|resolve_neg|result_type|_unsafe_view|unbind|chunk|split"
    r"|to|resize_|unflatten|flatten|contiguous|item|_local_scalar_dense|is_nonzero|movedim|diagonal|_reshape_alias"
    r"|lift_fresh|set_|view_as|expand_as|unfold|split_with_sizes|new_empty|new_empty_strided)"
)
"""Matches the names of ops that do not move data: they only return a view, read metadata or allocate a tensor."""

_Piece = tuple[int, int, int, int]
"""One piece of time on a device or thread: its start and end in nanoseconds, its rank (where pieces overlap, the lowest rank
wins), and the index of the span that it belongs to."""


def keep_ledger(profile: Profile, unit: WorkUnit) -> Ledger:
    """Return the ledger of a profile: it assigns each instant of the steps to a piece of work.

    The work is kernels or CPU ops, as ``unit`` says. CPU ops can be counted even if there is device activity.
    """
    return (_DeviceAccounts if unit is WorkUnit.KERNELS else _HostAccounts)(profile).close()


class _Accounts(abc.ABC):
    """The common part of the two kinds of accounts, which turn a profile into a ledger of where the time went.

    It has the intervals of the steps, and the host's launches and waits.
    """

    unit: WorkUnit
    device: int | None = None

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.nesting = Nesting(profile.host)
        self.labels = label_spans(self.nesting, profile)
        self.notes: list[str] = []
        self.is_computing = _computing_ops(self.nesting)
        calls = [(index, span) for index, span in enumerate(self.nesting.spans) if span.kind is HostKind.CALL]
        self.launches = {span.correlation: index for index, span in calls if span.correlation}
        self.waits = merge((span.start_ns, span.end_ns) for _, span in calls if _WAITING.match(span.name))
        self.windows = self._windows()
        self.step_starts = profile.step_starts or [self.windows[0][0]]
        graphs = (span.start_ns for _, span in calls if _LAUNCHING_GRAPHS.match(span.name))
        self.graph_launches = sum(self._is_inside(at_ns) for at_ns in graphs)

    def _windows(self) -> list[Interval]:
        """Return the intervals of time whose work is accounted for.

        Steps of a loop follow each other, so they are one interval; separate steps have one each.
        """
        steps = self.profile.steps
        if not steps:
            self.notes.append(f"{self.profile.source} does not mark steps: the whole trace counts as one step.")
            spans: list[HostSpan | DeviceSpan] = [*self.profile.host, *self.profile.device]
            return [(min(span.start_ns for span in spans), max(span.end_ns for span in spans))]
        if self.profile.are_steps_apart:
            return list(steps)
        return [(steps[0][0], steps[-1][1])]

    def _is_inside(self, at_ns: int) -> bool:
        return bool(clip((at_ns, at_ns + 1), self.windows))

    def _step_of(self, at_ns: int) -> int:
        return max(0, bisect_right(self.step_starts, at_ns) - 1)

    def _wall_ns(self) -> tuple[int, ...]:
        """Return the length of each step in nanoseconds.

        In a loop, the first step begins and the last step ends with the whole interval.
        """
        if len(self.windows) > 1 or len(self.step_starts) == 1:
            return tuple(end - start for start, end in self.windows)
        start, end = self.windows[0]
        edges = [start, *(min(max(start, step), end) for step in self.step_starts[1:]), end]
        return tuple(high - low for low, high in itertools.pairwise(edges))

    def _forward_ops(self) -> Iterator[tuple[str, str]]:
        for span, label, is_computing in zip(self.nesting.spans, self.labels, self.is_computing, strict=True):
            if is_computing and label.phase is WorkPhase.FORWARD and self._is_inside(span.start_ns):
                yield span.name, span.shape

    def close(self) -> Ledger:
        """Assign each busy instant to one piece of work and the idle time to gaps, and return all of them as the ledger."""
        pieces = list(self._pieces())
        own_ns: Counter[int] = Counter()
        for (*_, owner), nanoseconds in zip(pieces, owned_ns([piece[:3] for piece in pieces]), strict=True):
            own_ns[owner] += nanoseconds
        covered = merge((start, end) for start, end, _, _ in pieces)
        profile, device = self.profile, self.device
        return Ledger(
            source=profile.source,
            unit=self.unit,
            device=device,
            device_name="CPU" if device is None else profile.device_names.get(device, ""),
            bandwidth_bytes_per_second=None if device is None else profile.bandwidth_bytes_per_second.get(device),
            wall_ns=self._wall_ns(),
            work=tuple(self._work(owner, nanoseconds) for owner, nanoseconds in sorted(own_ns.items())),
            idle=tuple(self._gap(start, end) for start, end in subtract(self.windows, covered)),
            forward_ops=tuple(self._forward_ops()),
            are_steps_marked=bool(profile.steps),
            graph_launches=self.graph_launches,
            has_shapes=any(span.bytes is not None for span in self.nesting.spans),
            has_modules=any(label.module for label in self.labels),
            has_nodes=any(label.is_in_node for label in self.labels),
            notes=tuple(self.notes),
        )

    @abc.abstractmethod
    def _pieces(self) -> Iterator[_Piece]: ...

    @abc.abstractmethod
    def _work(self, owner: int, own_ns: int) -> WorkPiece: ...

    def _gap(self, start: int, end: int, stalled_ns: int = 0) -> Gap:
        waiting = covered_ns((start, end), self.waits)
        launching = end - start - waiting - stalled_ns
        return Gap(step=self._step_of(start), waiting_ns=waiting, launching_ns=launching, stalled_ns=stalled_ns)


class _HostAccounts(_Accounts):
    """Accounts for CPU ops, each by its own time without the ops inside. Time between ops counts as idle.

    The host runs Python and the framework then.
    """

    unit = WorkUnit.CPU_OPS

    def _pieces(self) -> Iterator[_Piece]:
        for index, segments in enumerate(self.nesting.own_segments()):
            span = self.nesting.spans[index]
            if span.kind is not HostKind.OP or self.labels[index].is_engine:
                continue
            if self._is_inside(span.start_ns):  # an empty piece, so that an op without own time is counted too
                yield span.start_ns, span.start_ns, 0, index
            for segment in segments:
                for start, end in clip(segment, self.windows):
                    yield start, end, 0, index

    def _work(self, owner: int, own_ns: int) -> WorkPiece:
        span, label, is_counted = self.nesting.spans[owner], self.labels[owner], self.is_computing[owner]
        return WorkPiece(
            name=span.name,
            shape=span.shape,
            kind=WorkKind.COPY if span.name in _CPU_COPIES else WorkKind.COMPUTE,
            phase=label.phase or WorkPhase.OTHER,
            module=label.module,
            operation=span.name,
            step=self._step_of(span.start_ns),
            own_ns=own_ns,
            is_counted=is_counted,
            # Only the innermost op counts its input bytes, so that they are not counted twice.
            bytes=span.bytes if is_counted or span.bytes is None else 0,
        )


class _DeviceAccounts(_Accounts):
    """Accounts for the kernels, copies and fills of one device: the device that is busy longest."""

    unit = WorkUnit.KERNELS

    def __init__(self, profile: Profile) -> None:
        busy_ns: Counter[int] = Counter()
        for span in profile.device:
            busy_ns[span.device] += span.end_ns - span.start_ns
        self.device = device = max(busy_ns, key=lambda index: busy_ns[index])
        self.spans = sorted((span for span in profile.device if span.device == device), key=lambda span: span.start_ns)
        self.starts = [span.start_ns for span in self.spans]
        self._read: set[int] = set()
        super().__init__(profile)
        self.by_external = {
            span.external: index
            for index, span in enumerate(self.nesting.spans)
            if span.kind is HostKind.OP and span.external and span.external != "0"
        }
        first_ns = profile.steps[0][0] if profile.steps else None
        named = (span for span in profile.host if span.kind is HostKind.RANGE and span.start_ns == first_ns)
        self.main_thread = next((span.thread for span in named), "")
        if len(busy_ns) > 1:
            self.notes.append(
                f"{profile.source} shows activity on {len(busy_ns)} devices; only device {device}, the busiest, is analysed."
            )

    def _windows(self) -> list[Interval]:
        """Return the intervals of the steps on the device.

        A loop's interval begins when earlier work has finished on the device, and ends when the steps' own work has finished.
        Separate steps keep the host's intervals, because the host waited for the device after each step.
        """
        windows = super()._windows()
        if not self.profile.steps or self.profile.are_steps_apart:
            return windows
        first, last = start, end = windows[0]
        seen_streams: set[int] = set()
        for span in self.spans:
            launch = self.launches.get(span.correlation)
            if launch is not None:
                launched = self.nesting.spans[launch].start_ns
            else:  # launch not in the trace: launched before the trace if its stream has not yet run work of the steps
                launched = first if span.stream in seen_streams else first - 1
            if launched < first < span.end_ns:
                start = max(start, span.end_ns)
            elif first <= launched < last:
                seen_streams.add(span.stream)
                end = max(end, span.end_ns)
        return [(start, end)] if start < end else windows

    def _pieces(self) -> Iterator[_Piece]:
        for index, span in enumerate(self.spans):
            for start, end in clip((span.start_ns, span.end_ns), self.windows):
                yield start, end, _kind_of(span).value, index

    def _work(self, owner: int, own_ns: int) -> WorkPiece:
        span = self.spans[owner]
        launch = self.launches.get(span.correlation, -1)
        asked = self.nesting.parents[launch] if launch >= 0 else -1
        if asked < 0:
            asked = self.by_external.get(span.external, -1)
        if launch < 0:
            launch = asked
        if asked >= 0 and is_step(self.nesting.spans[asked]):
            asked = -1  # the range of a step is not an op or a phase
        if launch >= 0 and asked < 0:
            asked = self._phase_range(self.nesting.spans[launch].start_ns)
        label = self.labels[asked] if asked >= 0 else Label()
        size = span.bytes
        if span.kind is DeviceKind.KERNEL and asked >= 0:  # an op that launches several kernels reads its inputs once
            size = 0 if asked in self._read else self.nesting.spans[asked].bytes
            self._read.add(asked)
        return WorkPiece(
            name=span.name,
            shape=span.shape,
            kind=_kind_of(span),
            phase=label.phase or WorkPhase.OTHER,
            module=label.module,
            operation=self.nesting.spans[asked].name if asked >= 0 else "",
            step=self._step_of(self.nesting.spans[launch].start_ns if launch >= 0 else span.start_ns),
            own_ns=own_ns,
            bytes=size,
        )

    def _phase_range(self, at_ns: int) -> int:
        """Return the index of the named range, open at a moment, that tells the step's phase (such as backward); -1 if none.

        It is the innermost such range on the main thread. Autograd's own thread does not open named ranges. While it launches
        work, the main thread waits inside ``backward``.
        """
        index = self.nesting.innermost(self.main_thread, at_ns)
        while index >= 0 and (self.nesting.spans[index].kind is not HostKind.RANGE or self.labels[index].phase is None):
            index = self.nesting.parents[index]
        return index

    def _gap(self, start: int, end: int, stalled_ns: int = 0) -> Gap:
        """Return a gap, an idle interval of the device, with its length split by the host's activity.

        The time after the launch of the next work counts as stalled if it is longer than a launch takes.
        """
        position = bisect_right(self.starts, end - 1)
        if position < len(self.spans) and self.starts[position] == end:
            launch = self.launches.get(self.spans[position].correlation, -1)
            queued = max(start, self.nesting.spans[launch].end_ns) if launch >= 0 else end
            if queued < end:
                stalled_ns = end - queued - covered_ns((queued, end), self.waits)
        return super()._gap(start, end, stalled_ns if stalled_ns >= _LONG_GAP_NS else 0)


def _kind_of(span: DeviceSpan) -> WorkKind:
    if span.kind is DeviceKind.KERNEL:
        return WorkKind.COMMUNICATION if _COMMUNICATION.search(span.name) else WorkKind.COMPUTE
    return _KINDS[span.kind]


def _computing_ops(nesting: Nesting) -> list[bool]:
    """Return a list with one bool for each span (named interval of a trace): whether it is an innermost op that computes.

    Ops that make views or allocate do not compute.
    """
    is_computing = [False] * len(nesting.spans)
    has_computing = [False] * len(nesting.spans)
    for index in range(len(nesting.spans) - 1, -1, -1):  # backwards: callees come after their callers
        span, parent = nesting.spans[index], nesting.parents[index]
        if span.kind is HostKind.OP and not has_computing[index]:
            is_computing[index] = not _MOVES_NOTHING.fullmatch(span.name)
        if parent >= 0 and (is_computing[index] or has_computing[index]):
            has_computing[parent] = True
    return is_computing
