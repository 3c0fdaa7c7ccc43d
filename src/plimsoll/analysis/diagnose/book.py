"""What accounts of CPU ops and accounts of a device share: the windows of the steps, and the host's calls."""

from __future__ import annotations

import abc
import itertools
import re
from bisect import bisect_right

from plimsoll.analysis.diagnose.computing import computing_ops
from plimsoll.analysis.diagnose.intervals import Interval, clip, union
from plimsoll.analysis.diagnose.labels import Label
from plimsoll.analysis.diagnose.ledger import Gap, Ledger, Work
from plimsoll.analysis.diagnose.nesting import Nesting
from plimsoll.analysis.diagnose.profile import HostKind, HostSpan, Profile
from plimsoll.artifacts.finding import WorkPhase, WorkUnit

_WAITING = re.compile(r"(?:cuda|cu|hip)(?:Device|Stream|Event|Ctx)Synchronize|(?:cuda|hip)Mem(?:cpy|set)(?:_v\d+)?$")
_LAUNCHING_GRAPHS = re.compile(r"(?:cuda|cu|hip)GraphLaunch")


class Book(abc.ABC):
    """What device and host accounts share: windows of steps, and the host's calls."""

    unit = WorkUnit.CPU_OPS

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
        self.is_computing = computing_ops(nesting)
        self.windows = self._windows()
        self.step_starts = [step.start_ns for step in profile.steps] or [self.windows[0][0]]

    @abc.abstractmethod
    def _windows(self) -> list[Interval]: ...

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
            and is_inside(span.start_ns, self.windows)
        )

    def _forward_ops(self) -> tuple[tuple[str, str], ...]:
        return tuple(
            (span.name, span.shape)
            for span, label, is_computing in zip(self.nesting.spans, self.labels, self.is_computing, strict=True)
            if is_computing and label.phase is WorkPhase.FORWARD and is_inside(span.start_ns, self.windows)
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
            forward_ops=self._forward_ops(),
            are_steps_marked=bool(profile.steps),
            graph_launches=self.graph_launches(),
            has_shapes=any(span.bytes is not None for span in self.nesting.spans),
            has_modules=any(label.module for label in self.labels),
            has_nodes=any(label.is_in_node for label in self.labels),
            notes=tuple(self.notes),
        )

    @abc.abstractmethod
    def close(self) -> Ledger: ...


def is_inside(at_ns: int, windows: list[Interval]) -> bool:
    """Whether a moment lies in one of the windows."""
    return bool(clip((at_ns, at_ns + 1), windows))


def _is_waiting(span: HostSpan) -> bool:
    return span.kind is HostKind.CALL and bool(_WAITING.match(span.name))
