"""Advice: where the memory goes, what to do about it, what the compiler can do, what was checked.

Every figure of a candidate is *predicted* from op seconds; what a receipt or a verdict measured is quoted in ``evidence``.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.decision import Status


class CheckOutcome(enum.StrEnum):
    """How an item of the checklist ends; without evidence in hand it is never a pass."""

    PASS = "pass"
    FAIL = "fail"
    NOT_CHECKED = "not checked"


class FailureSign(enum.StrEnum):
    """Whether a failure mode shows in the evidence."""

    FOUND = "found"
    NOT_FOUND = "not found"
    NOT_CHECKED = "not checked"


class Kind(enum.StrEnum):
    """What the advice comes to."""

    DO_NOTHING = "do nothing"
    """The step fits as it is."""
    MANAGE = "manage activations"
    """A plan fits, and the candidate says which."""
    LOOK_ELSEWHERE = "look elsewhere"
    """Activations are not what holds the memory; managing them frees little."""
    DOES_NOT_FIT = "does not fit"
    """No plan that is allowed keeps to the budget."""


class MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the bytes at the unmanaged peak; ``largest`` names who holds most of it."""

    name: str
    bytes: int
    share: float
    largest: str = ""


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """What holds the unmanaged peak, and how much of it activation management could free.

    ``reachable_share`` is (peak - floor) / peak: the most that any plan with recomputation alone takes off the peak.
    """

    part: str
    """The largest of the groups state, activations, head and loss, temporaries."""
    peak_bytes: int
    floor_bytes: int
    moment: str
    parts: tuple[MemoryPart, ...]
    summary: str
    remedies: tuple[str, ...] = ()
    """What would help where activation management does not, each with its bytes."""

    @property
    def reachable_share(self) -> float:
        """The share of the peak that recomputation can free at most."""
        return 1.0 - self.floor_bytes / self.peak_bytes if self.peak_bytes else 0.0


class LayerUse(msgspec.Struct, frozen=True, kw_only=True):
    """One region call: what autograd saves in it, and how long it takes."""

    name: str
    call: int
    saved_bytes: int
    forward_seconds: float
    backward_seconds: float


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One plan that was made, what it is predicted to take, and why it was chosen or not."""

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
    """Relative error of the gradient; 0 where every value comes back bit for bit."""
    is_lossless: bool = True
    is_chosen: bool = False
    reason: str = ""


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, in one line; why, in a few; and the command that does it (empty: none)."""

    kind: Kind
    headline: str
    reasons: tuple[str, ...] = ()
    command: str = ""


class GraphBreak(msgspec.Struct, frozen=True, kw_only=True):
    """A place where torch.compile stops capturing: why, and the line of the user's code (``""``, 0 where unknown)."""

    reason: str
    file: str = ""
    line: int = 0
    code: str = ""
    count: int = 1


class CompilerCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """What torch.compile captured of forward and backward, counted in ATen ops and in their eager seconds.

    An op of the eager step counts as captured when a captured graph ran it (in backward: when it belongs to an autograd
    node that a captured graph made). Seconds are those of the eager ops, not of compiled kernels.
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
    """Modules whose ops were missed, those with most seconds first."""
    advice: tuple[str, ...] = ()

    @property
    def op_share(self) -> float:
        """Captured ops as a share of all ops of forward and backward."""
        return self.captured_ops / self.ops if self.ops else 0.0

    @property
    def time_share(self) -> float:
        """The same in seconds."""
        return self.captured_seconds / self.seconds if self.seconds else 0.0


class BackwardOp(msgspec.Struct, frozen=True, kw_only=True):
    """One op of backward, and whether it belongs to an autograd node that a captured graph made."""

    cost_key: str
    is_captured: bool


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """One step under a compiler that captures graphs and runs them op by op.

    ``forward`` has one entry per run of a captured graph, the ``cost_key``s of its ops; ``backward`` has all ops of backward;
    both in the order of execution. ``failure`` is empty where the step ran to its end; otherwise it says why not, and
    nothing counts as captured. With ``is_asked`` false the compiler was not asked at all, and ``failure`` says why.
    """

    is_asked: bool
    failure: str = ""
    graphs: int = 0
    forward: tuple[tuple[str, ...], ...] = ()
    backward: tuple[BackwardOp, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()


class CaptureHazard(msgspec.Struct, frozen=True, kw_only=True):
    """Something in the step that keeps it from being captured as a CUDA graph."""

    what: str
    where: str
    count: int = 1


class CheckItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of the checklist: ``name`` is stable, ``title`` is for people, ``next`` is a command or an act."""

    name: str
    title: str
    outcome: CheckOutcome
    evidence: str
    next: str = ""


class FailureMode(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which activation management goes wrong, and whether it shows here."""

    name: str
    title: str
    sign: FailureSign
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
    hazards_note: str = ""
    """What about CUDA graphs cannot be told here."""
    checklist: tuple[CheckItem, ...]
    failure_modes: tuple[FailureMode, ...]
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that is recommended; ``None`` where none is."""
        return next((candidate for candidate in self.candidates if candidate.is_chosen), None)
