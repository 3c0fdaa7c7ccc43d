"""One trace in our own terms, whatever profiler wrote it: spans of the host and of the device, and the training steps.

Times are integer nanoseconds from an origin of the file's own, so that sums of parts are exact.
"""

from __future__ import annotations

import enum
import re

import msgspec

Interval = tuple[int, int]
"""Start and end, in nanoseconds."""


class HostKind(enum.Enum):
    """What a span on a thread of the host is."""

    OP = "op"
    """An operation: ``aten::mm``, or a node of autograd's graph."""
    RANGE = "range"
    """Something that a person or a library named: an annotation, an NVTX range, a module."""
    CALL = "call"
    """A call of the device's runtime or driver: a launch, a copy, a wait."""


class DeviceKind(enum.Enum):
    """What a span on a stream of the device is."""

    KERNEL = "kernel"
    COPY = "copy"
    SET = "set"
    GRAPH = "graph"
    """A whole CUDA graph, where the profiler did not record its kernels one by one."""


class HostSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One span on one thread.

    ``sequence`` is autograd's sequence number, -1 where there is none; ``node_thread`` is positive for a node of
    backward. ``bytes`` are those of the tensors that an op was given, ``None`` where the trace has no shapes.
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
    """One span on one stream of a device. ``bytes`` are known of copies and sets."""

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
    """One trace.

    ``steps`` are as the host ran them, empty where nothing marks them. ``forward_links`` lead from the start of a backward op
    (thread, nanosecond) to that of the forward op that made it.
    """

    source: str
    host: tuple[HostSpan, ...]
    device: tuple[DeviceSpan, ...] = ()
    steps: tuple[Interval, ...] = ()
    are_steps_apart: bool = False
    """Whether each step was waited for, and others ran in between; steps of a loop follow each other."""
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
    """Whether a range marks a training step, which says nothing about what runs in it."""
    return span.kind is HostKind.RANGE and _STEP_NAME.fullmatch(span.name) is not None


def find_steps(host: tuple[HostSpan, ...]) -> tuple[tuple[Interval, ...], bool]:
    """The ranges that mark training steps, in order, and whether they stand apart.

    Where several families of names could be meant, the first of Plimsoll's own, the profiler's and other ones counts.
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
