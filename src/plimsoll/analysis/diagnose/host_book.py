"""A profile's CPU ops in, their accounts out: each op's own time; what lies between ops is the host's Python and framework."""

from __future__ import annotations

from plimsoll.analysis.diagnose.book import Book, is_inside
from plimsoll.analysis.diagnose.intervals import Interval, clip, covered_ns, gaps, owned_ns, union
from plimsoll.analysis.diagnose.ledger import Gap, Ledger, Work, WorkKind
from plimsoll.analysis.diagnose.profile import HostKind
from plimsoll.artifacts.finding import WorkPhase

_CPU_COPIES = frozenset({"aten::copy_", "aten::_to_copy", "aten::clone", "aten::fill_", "aten::zero_"})


class HostBook(Book):
    """Accounts of CPU ops: each op's own time; what lies between ops is the host's Python and framework."""

    def _windows(self) -> list[Interval]:
        return self._host_windows()

    def close(self) -> Ledger:
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
            if is_inside(self.nesting.spans[index].start_ns, self.windows):
                counted.setdefault(index, 0)
        for index, own in zip(owners, owned_ns(pieces), strict=True):
            counted[index] = counted.get(index, 0) + own
        work = [self._work(index, own, is_counted=self.is_computing[index]) for index, own in sorted(counted.items())]
        covered = union((start, end) for start, end, _ in pieces)
        idle = [self._gap(start, end) for start, end in gaps(covered, self.windows)]
        return self.ledger(work, idle, None)

    def _work(self, index: int, own_ns: int, *, is_counted: bool) -> Work:
        span, label = self.nesting.spans[index], self.labels[index]
        return Work(
            name=span.name,
            shape=span.shape,
            kind=WorkKind.COPY if span.name in _CPU_COPIES else WorkKind.COMPUTE,
            phase=label.phase or WorkPhase.OTHER,
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
