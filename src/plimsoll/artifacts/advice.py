"""Advice: where the memory goes, what to do about it, what torch.compile can capture, and what was checked.

All figures of a candidate (a plan that was considered) are *predicted* from the seconds of ops. ``evidence`` quotes what a
receipt or a verdict measured.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.explained import MemoryPart


class CheckOutcome(enum.StrEnum):
    """The result of a check: pass or fail for a checklist item, found or not found for a failure mode.

    Without evidence the result is ``NOT_CHECKED``, never ``PASS``.
    """

    PASS = "pass"
    FAIL = "fail"
    FOUND = "found"
    NOT_FOUND = "not found"
    NOT_CHECKED = "not checked"


class Kind(enum.StrEnum):
    """The kinds of recommendations about the memory of a step."""

    DO_NOTHING = "do nothing"
    """The step fits without changes."""
    MANAGE = "manage activations"
    """A plan fits the budget; the chosen candidate is this plan."""
    LOOK_ELSEWHERE = "look elsewhere"
    """Most memory is not in activations, so decisions about activations free little of it."""
    DOES_NOT_FIT = "does not fit"
    """No allowed plan fits the budget."""


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """Data: what takes the memory at the peak of a step without a plan, and how much of it a plan could free.

    ``floor_bytes`` is the lowest peak that recomputation alone can reach.
    """

    part: str
    """The name of the largest group: state, activations, head and loss, or temporaries."""
    peak_bytes: int
    floor_bytes: int
    moment: str
    parts: tuple[MemoryPart, ...]
    summary: str
    remedies: tuple[str, ...] = ()
    """Sentences about changes that lower the peak even if decisions about activations do not, each with its bytes."""

    @property
    def reachable_share(self) -> float:
        """The largest share of the peak that recomputation can free: (peak - lowest reachable peak) / peak."""
        return 1.0 - self.floor_bytes / self.peak_bytes if self.peak_bytes else 0.0


class LayerUse(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one call of one region (a module that Plimsoll manages): bytes saved for backward, and the call's seconds."""

    name: str
    call: int
    saved_bytes: int
    forward_seconds: float
    backward_seconds: float


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one plan that was considered, its predicted memory and time, and the reason why it was chosen or rejected."""

    name: str
    strategy: str
    allow: tuple[str, ...]
    status: Status
    budget_bytes: int | None
    predicted_peak_bytes: int
    predicted_seconds: float
    predicted_overhead: float
    """The plan's extra time, as a share of the step time without a plan."""
    predicted_error: float = 0.0
    """The expected relative error of the gradient; 0 if all values are restored bit for bit."""
    is_lossless: bool = True
    is_chosen: bool = False
    reason: str = ""


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """Data: what to do, as a one-line headline, a few reasons, and the command for it (may be empty)."""

    kind: Kind
    headline: str
    reasons: tuple[str, ...] = ()
    command: str = ""


class GraphBreak(msgspec.Struct, frozen=True, kw_only=True):
    """Data: a place where torch.compile stops capturing: the reason, and the file and line of the user's code.

    File and code are empty and the line is 0 if the place is not known. ``count`` says how often the break occurred.
    """

    reason: str
    file: str = ""
    line: int = 0
    code: str = ""
    count: int = 1


class CompilerCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """Data: how much of forward and backward torch.compile captured, counted in ATen ops and in their eager seconds.

    An op of the eager step counts as captured if a captured graph ran it; a backward op counts if a captured graph made its
    autograd node. Seconds are the times of the eager ops, not of compiled kernels.
    """

    is_measured: bool
    note: str = ""
    """The reason why the coverage was not measured, or what limits its accuracy."""
    ops: int = 0
    captured_ops: int = 0
    seconds: float = 0.0
    captured_seconds: float = 0.0
    graphs: int = 0
    breaks: tuple[GraphBreak, ...] = ()
    uncaptured: tuple[str, ...] = ()
    """Names of modules with ops that were not captured, in the order of the time of these ops, longest first."""
    advice: tuple[str, ...] = ()

    @property
    def op_share(self) -> float:
        """The number of captured ops as a share of all ops of forward and backward."""
        return self.captured_ops / self.ops if self.ops else 0.0

    @property
    def time_share(self) -> float:
        """The seconds of captured ops as a share of the seconds of all ops of forward and backward."""
        return self.captured_seconds / self.seconds if self.seconds else 0.0


class BackwardOp(msgspec.Struct, frozen=True, kw_only=True):
    """One op of backward, and whether a graph that the compiler captured made the op's autograd node."""

    cost_key: str
    is_captured: bool


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the record of one step under a compiler backend that captures graphs and runs them op by op.

    ``forward`` has one entry for each run of a captured graph: the cost keys (names with shapes) of the graph's ops.
    ``backward`` has all ops of backward. Both are in order of execution. ``failure`` is empty if the step ran to its end.
    Otherwise ``failure`` says why the step stopped, and nothing counts as captured. If ``is_asked`` is false, the compiler did
    not run at all, and ``failure`` says why.
    """

    is_asked: bool
    failure: str = ""
    graphs: int = 0
    forward: tuple[tuple[str, ...], ...] = ()
    backward: tuple[BackwardOp, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()


class CaptureHazard(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one thing that prevents capturing the step as a CUDA graph: what it is, where it is, and how often it occurs."""

    what: str
    where: str
    count: int = 1


class CheckItem(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the check of one checklist item, or of one failure mode: its outcome and the evidence.

    ``name`` is a key that does not change between versions, ``title`` is for people, and ``next`` says what to do.
    """

    name: str
    title: str
    outcome: CheckOutcome
    evidence: str
    next: str = ""


class Advice(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Data: what to do about the memory of one training step, and why. ``plimsoll.advise`` makes one; ``str`` shows it."""

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
