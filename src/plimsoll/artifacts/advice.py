"""Advice: where the memory goes, what to do about it, what torch.compile can capture, and what was checked.

Every figure of a candidate is *predicted* from op seconds; ``evidence`` quotes what a receipt or a verdict measured.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.explained import MemoryPart


class CheckOutcome(enum.StrEnum):
    """Result of one checklist item, or whether the evidence shows a failure mode; nothing passes without evidence."""

    PASS = "pass"
    FAIL = "fail"
    FOUND = "found"
    NOT_FOUND = "not found"
    NOT_CHECKED = "not checked"


class Kind(enum.StrEnum):
    """The kind of recommendation."""

    DO_NOTHING = "do nothing"
    """The step fits without changes."""
    MANAGE = "manage activations"
    """A plan fits; the chosen candidate says which."""
    LOOK_ELSEWHERE = "look elsewhere"
    """Something other than activations holds the memory; managing activations frees little."""
    DOES_NOT_FIT = "does not fit"
    """No allowed plan fits the budget."""


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """What holds the unmanaged peak, and how much of it activation management could free.

    ``reachable_share`` is (peak - floor) / peak: the most that any plan can take off the peak by recomputation alone.
    """

    part: str
    """The largest of the groups state, activations, head and loss, temporaries."""
    peak_bytes: int
    floor_bytes: int
    moment: str
    parts: tuple[MemoryPart, ...]
    summary: str
    remedies: tuple[str, ...] = ()
    """What would help if activation management does not, each with its bytes."""

    @property
    def reachable_share(self) -> float:
        """The largest share of the peak that recomputation can free."""
        return 1.0 - self.floor_bytes / self.peak_bytes if self.peak_bytes else 0.0


class LayerUse(msgspec.Struct, frozen=True, kw_only=True):
    """One region call: bytes that autograd saves in it, and its time."""

    name: str
    call: int
    saved_bytes: int
    forward_seconds: float
    backward_seconds: float


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One plan that was made, its predicted cost, and why it was chosen or not."""

    name: str
    strategy: str
    allow: tuple[str, ...]
    status: Status
    budget_bytes: int | None
    predicted_peak_bytes: int
    predicted_seconds: float
    predicted_overhead: float
    """Extra time as a share of the unmanaged step."""
    predicted_error: float = 0.0
    """Relative error of the gradient; 0 if every value is restored bit for bit."""
    is_lossless: bool = True
    is_chosen: bool = False
    reason: str = ""


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """What to do: a one-line headline, a few reasons, and the command for it (may be empty)."""

    kind: Kind
    headline: str
    reasons: tuple[str, ...] = ()
    command: str = ""


class GraphBreak(msgspec.Struct, frozen=True, kw_only=True):
    """A place where torch.compile stops capturing: the reason, and the line of user code (``""``, 0 if unknown)."""

    reason: str
    file: str = ""
    line: int = 0
    code: str = ""
    count: int = 1


class CompilerCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """How much of forward and backward torch.compile captured, counted in ATen ops and in their eager seconds.

    An op of the eager step counts as captured if a captured graph ran it; a backward op counts if a captured graph made its
    autograd node. Seconds are the times of the eager ops, not of compiled kernels.
    """

    is_measured: bool
    note: str = ""
    """Why it was not measured, or what limits the figure."""
    ops: int = 0
    captured_ops: int = 0
    seconds: float = 0.0
    captured_seconds: float = 0.0
    graphs: int = 0
    breaks: tuple[GraphBreak, ...] = ()
    uncaptured: tuple[str, ...] = ()
    """Modules with ops that were not captured, longest time first."""
    advice: tuple[str, ...] = ()

    @property
    def op_share(self) -> float:
        """Captured ops as a share of all ops of forward and backward."""
        return self.captured_ops / self.ops if self.ops else 0.0

    @property
    def time_share(self) -> float:
        """Captured seconds as a share of all seconds of forward and backward."""
        return self.captured_seconds / self.seconds if self.seconds else 0.0


class BackwardOp(msgspec.Struct, frozen=True, kw_only=True):
    """One op of backward, and whether a captured graph made its autograd node."""

    cost_key: str
    is_captured: bool


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """One step under a compiler that captures graphs and runs them op by op.

    ``forward`` has one entry for each run of a captured graph: the ``cost_key``s of its ops. ``backward`` has all ops of
    backward. Both are in order of execution. ``failure`` is empty if the step ran to its end; otherwise it says why it did
    not, and nothing counts as captured. If ``is_asked`` is false, the compiler did not run at all, and ``failure`` says why.
    """

    is_asked: bool
    failure: str = ""
    graphs: int = 0
    forward: tuple[tuple[str, ...], ...] = ()
    backward: tuple[BackwardOp, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()


class CaptureHazard(msgspec.Struct, frozen=True, kw_only=True):
    """Something in the step that prevents capturing it as a CUDA graph."""

    what: str
    where: str
    count: int = 1


class CheckItem(msgspec.Struct, frozen=True, kw_only=True):
    """One checklist item or failure mode: ``name`` is a stable key, ``title`` is for people, ``next`` says what to do."""

    name: str
    title: str
    outcome: CheckOutcome
    evidence: str
    next: str = ""


class Advice(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """What to do about the memory of one training step, and why. ``plimsoll.advise`` makes one; ``str`` shows it."""

    KIND: ClassVar[str] = "advice"
    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    model: str
    fingerprint: str
    signature: str
    device: str
    cost_source: str
    budget_bytes: int | None
    max_error: float
    versions: dict[str, str]
    baseline_seconds: float
    recommendation: Recommendation
    bottleneck: Bottleneck
    layers: tuple[LayerUse, ...]
    candidates: tuple[Candidate, ...]
    compiler: CompilerCoverage
    hazards: tuple[CaptureHazard, ...] = ()
    checklist: tuple[CheckItem, ...]
    failure_modes: tuple[CheckItem, ...]
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        """The recommended candidate; ``None`` if no candidate is recommended."""
        return next((candidate for candidate in self.candidates if candidate.is_chosen), None)
