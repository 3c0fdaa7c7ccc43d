"""The whole training budget of one model on one layout of devices, rank by rank, with an error for every figure.

An estimate lists *stages*: the ranks of one stage of a pipeline hold the same, so each stage stands for ``ranks`` of them.
Bytes of a stage's items add up to what the device has to provide at the moment of the peak.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.job import Layout, ModelFacts, Techniques
from plimsoll.artifacts.plan import Peak, Plan


class BudgetItem(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a device's memory at the moment of the peak.

    ``bytes`` is ``None`` where the figure is ``UNSUPPORTED``; ``note`` then says why. ``relative_error`` is half the width of
    the range in which the truth is expected, as a share of ``bytes``.
    """

    name: str
    bytes: int | None
    relative_error: float
    basis: Basis
    note: str = ""

    @property
    def error_bytes(self) -> int:
        """Half the width of the range in which the truth is expected."""
        return 0 if self.bytes is None else round(self.bytes * self.relative_error)


class StageSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one stage: of one micro-batch but for ``optimizer_seconds`` and ``exposed_seconds``, which are of the step.

    ``communication_seconds`` are those of collectives within forward and backward (and part of those figures);
    ``exposed_seconds`` what data-parallel collectives add because no compute hides it.
    """

    forward_seconds: float
    backward_seconds: float
    weight_gradient_seconds: float
    recompute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    optimizer_seconds: float
    product_seconds: float = 0.0
    """Of forward and backward, what matrix products, convolutions and attention take."""


class StageEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank of one pipeline rank's group holds and how long it takes; with virtual stages, all of them.

    ``allocated_bytes`` is the peak of live tensors, ``reserved_bytes`` what the caching allocator holds for them,
    ``None`` on a CPU, which has no such allocator.
    ``unmanaged_bytes`` and ``recomputed_bytes`` are the allocated peaks without a plan and with everything recomputed.
    ``whole_error`` is by how much ``total_bytes`` may be off, as a share, where published runs of the kind tell.
    """

    stage: int
    ranks: int
    regions: str
    in_flight: int
    items: tuple[BudgetItem, ...]
    allocated_bytes: int
    reserved_bytes: int | None
    unmanaged_bytes: int
    recomputed_bytes: int
    peak: Peak
    seconds: StageSeconds
    bubble_share: float
    plans: tuple[Plan, ...] = ()
    """The decisions of each stage of this rank, where memory was managed under a budget."""
    whole_error: float | None = None

    @property
    def total_bytes(self) -> int:
        """What a device has to provide: all items that have a figure."""
        return sum(item.bytes or 0 for item in self.items)

    @property
    def error_bytes(self) -> int:
        """Half the width of the range of ``total_bytes``: what published runs of the kind show; without any, errors of the
        items add up, and none is taken to cancel another.
        """
        if self.whole_error is not None:
            return round(self.whole_error * self.total_bytes)
        return sum(item.error_bytes for item in self.items)

    @property
    def unsupported(self) -> tuple[BudgetItem, ...]:
        """Items that no figure is given for."""
        return tuple(item for item in self.items if item.basis is Basis.UNSUPPORTED)


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of the whole job. ``tokens_per_second`` is ``None`` for models that do not count tokens.

    ``mfu`` is the share of the devices' dense peak that the model's own arithmetic reaches (recomputation does not count as
    arithmetic of the model); ``relative_error`` holds for all of these. ``published_mfu`` is what papers and frameworks print:
    6 per parameter and token and 12 per layer, width and position of attention, of the dense peak in 16 bits, whatever type
    the arithmetic is done in; ``None`` where the model is no plain transformer of text or the device has no such peak.
    """

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float | None
    mfu: float | None
    relative_error: float
    basis: Basis
    note: str = ""
    published_mfu: float | None = None


class SwitchSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a training framework's own switches, the strategy that stands for them, and what a step then takes."""

    values: dict[str, str | int | float | bool | list[str] | None]
    strategy: str
    peak_bytes: int
    """Of the rank that holds most, in tensors."""
    step_seconds: float
    host_bytes: int = 0
    """What the host then holds for the rank that sends most."""


class LayoutChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One layout of a search, with the micro-batch and the strategy under which a step then takes so much."""

    layout: Layout
    batch: int
    strategy: str
    peak_bytes: int
    """Of the rank that holds most, in tensors."""
    step_seconds: float


class MeasuredFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a real run beside the estimate's own, ``None`` where it has none; ``unit`` is bytes, seconds or per second.

    ``error`` is half the width of the range in which the run was expected; ``note`` says what it may mean that it is not.
    """

    name: str
    unit: str
    estimated: float | None
    error: float
    measured: float
    note: str = ""

    @property
    def is_inside(self) -> bool:
        """Whether the run lies in the range that the estimate gives."""
        return self.estimated is not None and abs(self.measured - self.estimated) <= self.error


class Estimate(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """The training budget of ``target`` on ``device`` under ``layout``. Build one with ``plimsoll.estimate``."""

    KIND: ClassVar[str] = "estimate"
    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    target: str
    model: str
    device: str
    device_bytes: int | None
    precision: str
    optimizer: str
    strategy: str
    budget_bytes: int | None
    layout: Layout
    techniques: Techniques = Techniques()
    facts: ModelFacts
    stages: tuple[StageEstimate, ...]
    throughput: Throughput
    expandable_bytes: int | None = None
    """What the allocator of the tightest stage's ranks would reserve with ``expandable_segments:True``."""
    notes: tuple[str, ...] = ()
    framework: str = ""
    """Whose switches were asked for; ``switches`` then has the chosen setting first, and its neighbours."""
    switches: tuple[SwitchSetting, ...] = ()
    layouts: tuple[LayoutChoice, ...] = ()
    """The fastest layouts, where they were searched; the estimate is of the first."""
    measured: tuple[MeasuredFigure, ...] = ()
    """What a real run measured of it; ``measured_source`` is where from."""
    measured_source: str = ""
    trace_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def tightest(self) -> StageEstimate:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def does_fit(self) -> bool | None:
        """Whether every rank keeps to its device, and to the budget if there is one; ``None``: error bars leave it open."""
        if self.budget_bytes is not None and any(stage.allocated_bytes > self.budget_bytes for stage in self.stages):
            return False
        if self.device_bytes is None:
            return None
        needed, error = self.tightest.total_bytes, self.tightest.error_bytes
        if needed + error <= self.device_bytes:
            return True
        return False if needed - error > self.device_bytes else None
