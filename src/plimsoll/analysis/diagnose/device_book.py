"""A profile's device activity in, its accounts out: of the device that is busy longest."""

from __future__ import annotations

import re
from bisect import bisect_right

from plimsoll.analysis.diagnose.book import Book
from plimsoll.analysis.diagnose.intervals import Interval, clip, covered_ns, gaps, owned_ns, union
from plimsoll.analysis.diagnose.labels import Label
from plimsoll.analysis.diagnose.ledger import Gap, Ledger, Work, WorkKind
from plimsoll.analysis.diagnose.nesting import Nesting
from plimsoll.analysis.diagnose.profile import DeviceKind, DeviceSpan, HostKind, Profile, is_step
from plimsoll.artifacts.finding import LONG_GAP_SECONDS, WorkPhase, WorkUnit

_LONG_GAP_NS = round(LONG_GAP_SECONDS * 1e9)
_COMMUNICATION = re.compile(r"nccl|rccl", re.IGNORECASE)


class DeviceBook(Book):
    """Accounts of one device: the one that is busy longest."""

    unit = WorkUnit.KERNELS

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
        step_start_ns = profile.steps[0].start_ns if profile.steps else None
        named = (s for s in profile.host if s.kind is HostKind.RANGE and s.start_ns == step_start_ns)
        self.main_thread = next((span.thread for span in named), "")
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
        if asked >= 0 and is_step(self.nesting.spans[asked]):
            asked = -1
        if launch >= 0 and asked < 0:
            asked = self._phase_range(self.nesting.spans[launch].start_ns)
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
            phase=label.phase or WorkPhase.OTHER,
            module=label.module,
            operation=self.nesting.spans[asked].name if asked >= 0 else "",
            step=self.step_of(at_ns),
            own_ns=own_ns,
            bytes=bytes_,
        )

    def _phase_range(self, at_ns: int) -> int:
        """What the thread that runs the steps has named at a moment, for launches by a thread that names nothing.

        It waits inside ``backward`` while autograd's thread launches.
        """
        index = self.nesting.innermost(self.main_thread, at_ns)
        while index >= 0 and (self.nesting.spans[index].kind is not HostKind.RANGE or self.labels[index].phase is None):
            index = self.nesting.parents[index]
        return index

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
