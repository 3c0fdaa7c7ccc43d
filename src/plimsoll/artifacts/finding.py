"""A finding: the time of a training step with and without a plan, and what the difference consists of."""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import AdvisedEnum, ArtifactBase

EXCESSIVE_KERNEL_RATIO = 1.5
"""The number of kernels per layer with the plan, divided by the baseline's number. A larger ratio is excessive."""
CONTENDED_BANDWIDTH_SHARE = 0.8
"""A share of the device's peak bandwidth. If recomputation uses more than this share, it competes with other work for the
memory.
"""
LONG_GAP_SECONDS = 50e-6
"""An idle gap between two kernels that lasts longer than this many seconds means that the device waits for the host, or that a
CUDA graph is broken.
"""


class WorkUnit(enum.StrEnum):
    """The unit for counting a step's work: kernels on a GPU, or ops on a CPU."""

    KERNELS = "kernels"
    CPU_OPS = "CPU ops"


class ProfileOrigin(enum.StrEnum):
    """Where the two profiles (with and without the plan) come from."""

    PROFILED = "profiled here"
    CHROME = "torch.profiler traces"
    NSYS = "Nsight Systems exports"


class WorkPhase(enum.StrEnum):
    """The phases of a training step, such as forward and backward, that kernels and ops belong to.

    A kernel belongs to the phase that launched it.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class OverheadCause(AdvisedEnum):
    """The possible causes of a plan's extra time, each with advice. Causes do not overlap in time (see docs/diagnose.md)."""

    RECOMPUTE = (
        "recompute arithmetic",
        "recompute fewer or cheaper values: give a larger budget, use strategy auto, or allow compression (allow=compress)",
        "recomputed forward work, at the speed of forward",
    )
    MEMORY = (
        "extra memory reads",
        "recompute fewer or smaller values per block; check that no other program ran on the machine",
        "the same work as in the baseline, but slower",
    )
    FUSION = (
        "lost fusion",
        "leave compiled regions to the compiler's own recomputation, and plan only the rest of the model",
        "element-wise operations where the baseline ran fused kernels",
    )
    ADDED = (
        "added work",
        "look at which operations these are; use cheaper codecs, and fewer samples if the model is launch-bound",
        "other work that the baseline does not do",
    )
    COPIES = (
        "copies",
        "offload less, or earlier; copies are free only if computation hides them",
        "copies and fills that computation does not hide",
    )
    LAUNCH = (
        "launch latency",
        "use larger batches, or fewer and larger regions; on a GPU, use a CUDA graph that covers forward and backward",
        "the device is idle because the host has not launched the next kernel",
    )
    SYNCHRONISATION = (
        "synchronisation",
        "find what reads values back (.item(), printing, blocking copies); between ranks, find the late rank",
        "the host waits for the device, or ranks wait for each other",
    )
    UNEXPLAINED = (
        "unexplained",
        "profile again with shapes, modules and more steps; compare the two timelines in a viewer",
        "time that the two traces do not explain",
    )


class OverheadPart(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one part of a plan's overhead: a cause, and the seconds per step that it adds (negative if the plan saves time).

    ``spread_seconds`` is the standard error over steps, ``None`` if only one step was profiled. ``details`` names the largest
    pieces of work.
    """

    cause: OverheadCause
    seconds: float
    spread_seconds: float | None = None
    details: tuple[str, ...] = ()


class PhaseUse(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the device time, the amount of work and the bytes read in one phase (forward, backward, …) of one step.

    ``count`` is the number of kernels or CPU ops. ``read_bytes`` is a lower bound of the bytes read; it is known if the trace
    has shapes. ``bandwidth_share`` is ``read_bytes`` divided by the phase's seconds, as a share of the device's peak bandwidth;
    ``None`` if that peak is not known.
    """

    phase: WorkPhase
    busy_seconds: float
    count: float
    read_bytes: float | None = None
    bandwidth_share: float | None = None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the figures of one of the two profiles (with or without the plan), per step.

    Three shares say how much of the busy time could be assigned: ``attributed_share`` to the operation or range that launched
    the work, ``phased_share`` to a phase, ``module_share`` to a module. ``count`` is the number of kernels or CPU ops.
    """

    source: str
    steps: int
    step_seconds: float
    busy_seconds: float
    idle_seconds: float
    waiting_seconds: float
    """The seconds per step while the device is idle and the host waits for the device in a call."""
    count: float
    kernels_per_layer: float | None = None
    layers: int = 0
    long_gaps: float = 0.0
    long_gap_seconds: float = 0.0
    graph_launches: float = 0.0
    copied_bytes: float | None = None
    phases: tuple[PhaseUse, ...] = ()
    attributed_share: float = 0.0
    phased_share: float = 0.0
    module_share: float = 0.0


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the work of one layer with and without the plan, per step.

    If the profiles do not have modules, it is the work of one operation instead.
    """

    name: str
    baseline_count: float
    plan_count: float
    baseline_seconds: float
    plan_seconds: float
    recompute_seconds: float


class WarningSign(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one warning sign. ``text`` compares the plan's figure with a threshold, ``is_raised`` says if it is a warning.

    ``is_raised`` is ``None`` if the trace does not show the figure.
    """

    name: str
    is_raised: bool | None
    text: str


class Finding(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Data: the causes of the time that a plan adds to a step. ``plimsoll.diagnose`` makes a finding; ``str`` shows it.

    Seconds are measured under the profiler. Only ``measured_baseline_seconds`` and ``measured_plan_seconds`` are medians of
    steps without a profiler; they are ``None`` if such steps could not be run.
    """

    KIND: ClassVar[str] = "finding"
    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    origin: ProfileOrigin
    unit: WorkUnit
    model: str = ""
    fingerprint: str = ""
    signature: str = ""
    strategy: str = ""
    device: str = ""
    versions: dict[str, str] = {}
    baseline: Side
    plan: Side
    parts: tuple[OverheadPart, ...]
    layers: tuple[Layer, ...] = ()
    are_layers_modules: bool = False
    signs: tuple[WarningSign, ...] = ()
    measured_baseline_seconds: float | None = None
    measured_plan_seconds: float | None = None
    notes: tuple[str, ...] = ()
    """Sentences about what the traces do not show."""

    @property
    def overhead_seconds(self) -> float:
        """The seconds per step with the plan minus those without it, measured under the profiler."""
        return self.plan.step_seconds - self.baseline.step_seconds

    @property
    def overhead_share(self) -> float:
        """The time that the plan adds to a step, as a share of the step without the plan, measured under the profiler."""
        return self.overhead_seconds / self.baseline.step_seconds if self.baseline.step_seconds else 0.0

    @property
    def measured_overhead_share(self) -> float | None:
        """The time that the plan adds to a step, as a share of the step without the plan, measured without a profiler.

        ``None`` if it was not measured.
        """
        if not self.measured_baseline_seconds or self.measured_plan_seconds is None:
            return None
        return self.measured_plan_seconds / self.measured_baseline_seconds - 1

    @property
    def kernel_ratio(self) -> float:
        """The plan's number of kernels (or CPU ops) per step, divided by the baseline's number."""
        return self.plan.count / self.baseline.count if self.baseline.count else 0.0

    def seconds_of(self, cause: OverheadCause) -> float:
        """Return the seconds per step that one cause adds; negative if the plan saves time there."""
        return sum(part.seconds for part in self.parts if part.cause is cause)
