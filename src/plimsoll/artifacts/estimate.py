"""The whole training budget of one model on one layout of devices, rank by rank, with an error for every figure.

An estimate lists *stages*: the ranks of one pipeline stage hold the same bytes, so one entry represents ``ranks`` of them.
The items of a stage add up to the bytes that the device has to provide at the peak.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.job import Layout, ModelFacts, Techniques
from plimsoll.artifacts.plan import Peak, Plan


class BudgetItem(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a device's memory at the peak.

    ``bytes`` is ``None`` if the figure is ``UNSUPPORTED``; ``note`` then says why. ``relative_error`` is half the width of the
    range in which the true value is expected, as a share of ``bytes``.
    """

    name: str
    bytes: int | None
    relative_error: float
    basis: Basis
    note: str = ""

    @property
    def error_bytes(self) -> int:
        """Half the width of the range expected to contain the true value."""
        return 0 if self.bytes is None else round(self.bytes * self.relative_error)


class StageSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one stage, per micro-batch, except ``optimizer_seconds`` and ``exposed_seconds``, which are per step.

    ``communication_seconds`` is the time of collectives within forward and backward, already part of those figures.
    ``exposed_seconds`` is the time of data-parallel collectives that compute does not hide.
    """

    forward_seconds: float
    backward_seconds: float
    weight_gradient_seconds: float
    recompute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    optimizer_seconds: float
    product_seconds: float = 0.0
    """The part of forward and backward that matrix products, convolutions and attention take."""


class StageEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and time of one pipeline rank's group of ranks, over all of its virtual stages.

    ``allocated_bytes`` is the peak of live tensors. ``reserved_bytes`` is what the caching allocator holds for them;
    ``None`` on a CPU, which does not have such an allocator.
    ``unmanaged_bytes`` and ``recomputed_bytes`` are the allocated peaks without a plan and with everything recomputed.
    ``whole_error`` is the relative error of ``total_bytes``, known only where published runs of this kind were compared.
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
    """One plan for each stage of this rank, if memory was managed under a budget."""
    whole_error: float | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes that a device has to provide: the sum of all items that have a figure."""
        return sum(item.bytes or 0 for item in self.items)

    @property
    def error_bytes(self) -> int:
        """Half the width of the range of ``total_bytes``, taken from published runs of this kind where they exist.

        Otherwise the errors of the items are summed: they are not assumed to cancel.
        """
        if self.whole_error is not None:
            return round(self.whole_error * self.total_bytes)
        return sum(item.error_bytes for item in self.items)

    @property
    def unsupported(self) -> tuple[BudgetItem, ...]:
        """Items without a figure."""
        return tuple(item for item in self.items if item.basis is Basis.UNSUPPORTED)


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of the whole job. ``tokens_per_second`` is ``None`` for models that do not count tokens.

    ``mfu`` is the share of the devices' dense peak that the model's own arithmetic reaches; recomputed arithmetic does not
    count. ``relative_error`` holds for all of these. ``published_mfu`` is the figure that papers and frameworks print: 6 FLOPs
    per parameter and token plus 12 per layer, width and attended position, over the dense 16-bit peak, whichever type the
    arithmetic uses. It is ``None`` if the model is not a plain text transformer or the device does not have such a peak.
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
    """Values of a training framework's own switches, the equivalent strategy, and the step's peak and time."""

    values: dict[str, str | int | float | bool | list[str] | None]
    strategy: str
    peak_bytes: int
    """Bytes in tensors on the rank that holds most."""
    step_seconds: float
    host_bytes: int = 0
    """Bytes on the host for the rank that offloads most."""


class LayoutChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One layout of a search: its micro-batch and strategy, and the peak and time of its step."""

    layout: Layout
    batch: int
    strategy: str
    peak_bytes: int
    """Bytes in tensors on the rank that holds most."""
    step_seconds: float


class MeasuredFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure of a real run and the estimate's figure; ``unit`` is bytes, seconds or per second.

    ``estimated`` is ``None`` if the estimate does not have this figure. ``error`` is half the width of the range in which the
    run was expected; ``note`` says what a run outside that range may mean.
    """

    name: str
    unit: str
    estimated: float | None
    error: float
    measured: float
    note: str = ""

    @property
    def is_inside(self) -> bool:
        """Whether the measurement is within the estimate's range."""
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
    """Bytes that the allocator on the tightest stage's ranks would reserve with ``expandable_segments:True``."""
    notes: tuple[str, ...] = ()
    framework: str = ""
    """The framework whose switches were requested; ``switches`` then lists the chosen setting first, then its neighbours."""
    switches: tuple[SwitchSetting, ...] = ()
    layouts: tuple[LayoutChoice, ...] = ()
    """The fastest layouts, if layouts were searched; the estimate describes the first of them."""
    measured: tuple[MeasuredFigure, ...] = ()
    """What a real run measured; ``measured_source`` names the run."""
    measured_source: str = ""
    trace_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def tightest(self) -> StageEstimate:
        """The stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def does_fit(self) -> bool | None:
        """Whether every rank fits its device and the budget, if one was given; ``None`` if the error range leaves it open."""
        if self.budget_bytes is not None and any(stage.allocated_bytes > self.budget_bytes for stage in self.stages):
            return False
        if self.device_bytes is None:
            return None
        needed, error = self.tightest.total_bytes, self.tightest.error_bytes
        if needed + error <= self.device_bytes:
            return True
        return False if needed - error > self.device_bytes else None
