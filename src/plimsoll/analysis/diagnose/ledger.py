"""The ledger of one profile: its pieces of work, each with phase, module and own time, and the idle time.

On a device, a piece of work is a kernel, a copy, a fill or a whole CUDA graph. Without device activity, a piece of work is a
CPU op and its own time. Every busy instant belongs to one piece, so the pieces add up to the busy time, and busy plus idle time
add up to the steps.
"""

from __future__ import annotations

import enum
import re

import msgspec

from plimsoll.artifacts.finding import WorkPhase, WorkUnit

_FUSED = re.compile(r"triton_(?:poi|red|per|tem|for)_|_fused_|nvfuser|CompiledF(?:unction|xGraph)", re.IGNORECASE)
_HEAVY = re.compile(
    r"gemm|cutlass|cublas|conv|wgrad|dgrad|flash|fmha|attention|splitk|::(?:_?mm|addmm|bmm|baddbmm|linear|matmul)$",
    re.IGNORECASE,
)


class WorkKind(enum.Enum):
    """The kind of a piece of work. If several pieces run at once, the instant counts for the kind that comes first here."""

    COMPUTE = 0
    COMMUNICATION = 1
    GRAPH = 2
    COPY = 3
    SET = 4


class WorkPiece(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Data: one piece of work in a profile, such as a kernel, a copy or a CPU op.

    ``own_ns`` is its part of the busy time in nanoseconds; ``operation`` is the op or range that launched it.
    """

    name: str
    shape: str
    kind: WorkKind
    phase: WorkPhase
    module: str
    operation: str
    step: int
    own_ns: int
    is_counted: bool = True
    """Whether the piece counts when pieces of work are counted, because it computes.

    A CPU op that only makes views, or only calls other ops, takes time but is not counted.
    """
    bytes: int | None = None

    @property
    def is_fused(self) -> bool:
        """Whether this piece of work is one kernel that a compiler made out of several ops."""
        return bool(_FUSED.search(self.name))

    @property
    def is_element_wise(self) -> bool:
        """Whether a compiler could fuse the work with other work.

        It could if the work computes, is not fused yet, and is not a matrix product, convolution or attention.
        """
        return self.kind is WorkKind.COMPUTE and not is_heavy(self.name) and not self.is_fused


def is_heavy(name: str) -> bool:
    """Whether the op or kernel is a matrix product, a convolution or attention, which fusion does not remove."""
    return bool(_HEAVY.search(name))


class Gap(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Data: one idle interval of a profile. Its nanoseconds are split by the host's activity."""

    step: int
    waiting_ns: int
    """The part of the idle time, in nanoseconds, while the host waited for the device."""
    launching_ns: int
    """The part of the idle time, in nanoseconds, before the host launched the next work."""
    stalled_ns: int
    """The part of the idle time, in nanoseconds, after the host launched the next work. It is counted if that work started
    later than a launch takes."""

    @property
    def length_ns(self) -> int:
        return self.waiting_ns + self.launching_ns + self.stalled_ns


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Data: where the time of a profile went, by pieces of work and idle gaps.

    The nanoseconds of ``work`` and ``idle`` add up to the lengths of the steps, ``wall_ns``.
    """

    source: str
    unit: WorkUnit
    device: int | None
    device_name: str
    bandwidth_bytes_per_second: float | None
    wall_ns: tuple[int, ...]
    work: tuple[WorkPiece, ...]
    idle: tuple[Gap, ...]
    forward_ops: tuple[tuple[str, str], ...]
    """The ops of the forward pass that compute, each with its input shapes."""
    are_steps_marked: bool
    graph_launches: int
    has_shapes: bool
    has_modules: bool
    has_nodes: bool
    """Whether the trace shows autograd's nodes, so that recomputation inside them can be distinguished from backward."""
    notes: tuple[str, ...]

    @property
    def steps(self) -> int:
        """How many training steps of the profile the ledger covers."""
        return len(self.wall_ns)
