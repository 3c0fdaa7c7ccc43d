"""Data of an estimate: the memory and speed of training one model on one layout of devices, each figure with an error.

An estimate lists *stages*. All ranks of one pipeline stage hold the same bytes, so one entry represents ``ranks`` ranks.
The items of a stage add up to the bytes that a device has to provide at the peak.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.job import Layout, ModelFacts, Techniques
from plimsoll.artifacts.plan import Peak, Plan


class BudgetItem(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one part of a device's memory at the peak, such as parameters.

    ``bytes`` is ``None`` if the figure is ``UNSUPPORTED``; ``note`` then says why. The true value is expected within a range
    around ``bytes``; ``relative_error`` is half the width of this range, as a share of ``bytes``.
    """

    name: str
    bytes: int | None
    relative_error: float
    basis: Basis
    note: str = ""

    @property
    def error_bytes(self) -> int:
        """By how many bytes the true value is expected to differ from the item's figure at most, up or down."""
        return 0 if self.bytes is None else round(self.bytes * self.relative_error)


class StageSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the times of one pipeline stage, in seconds per micro-batch.

    ``optimizer_seconds`` and ``exposed_seconds`` are per step instead. ``communication_seconds`` is the time of collectives
    within forward and backward, and the figures of forward and backward include it. ``exposed_seconds`` is the time of
    data-parallel collectives during which no computation runs.
    """

    forward_seconds: float
    backward_seconds: float
    weight_gradient_seconds: float
    recompute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    optimizer_seconds: float
    product_seconds: float = 0.0
    """The seconds of matrix products, convolutions and attention within forward and backward."""


class StageEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the memory and time of all ranks at one position in the pipeline, with all virtual stages of these ranks.

    ``in_flight`` is the number of micro-batches between forward and backward at the same time.

    ``allocated_bytes`` is the peak of live tensors. ``reserved_bytes`` is what the caching allocator holds for them; ``None``
    on a CPU, which does not have such an allocator. ``unmanaged_bytes`` is the allocated peak without a plan,
    ``recomputed_bytes`` the allocated peak if all values are recomputed. ``whole_error`` is the relative error of
    ``total_bytes``; it is known only for kinds of runs that were compared with published figures.
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
    """One plan for each virtual stage of these ranks, if memory was managed under a budget; else empty."""
    whole_error: float | None = None

    @property
    def total_bytes(self) -> int:
        """The bytes that a device has to provide at the peak: the sum of all items that have a figure."""
        return sum(item.bytes or 0 for item in self.items)

    @property
    def error_bytes(self) -> int:
        """Half the width, in bytes, of the range that is expected to contain the true total.

        If estimates of such jobs were compared with published runs, the width comes from these. Otherwise it is the sum of the
        items' errors, because the errors are not assumed to cancel.
        """
        if self.whole_error is not None:
            return round(self.whole_error * self.total_bytes)
        return sum(item.error_bytes for item in self.items)

    @property
    def unsupported(self) -> tuple[BudgetItem, ...]:
        """The items whose figure is not supported, so that they do not have bytes."""
        return tuple(item for item in self.items if item.basis is Basis.UNSUPPORTED)


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of the whole job. ``tokens_per_second`` is ``None`` for models that do not count tokens.

    ``mfu`` (model FLOPs utilisation) is the share of the devices' dense peak that the model's own arithmetic reaches;
    recomputed arithmetic does not count. ``relative_error`` applies to the figures per second and to ``mfu``. ``published_mfu``
    is the figure that papers and frameworks print: 6 FLOPs per parameter and token plus 12 per layer, head, element of a head
    and attended position, divided by the dense 16-bit peak, whichever type the arithmetic uses. ``published_mfu`` is ``None``
    if the model is not a plain text transformer or the device does not have a 16-bit peak.
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
    """Data: one setting of a training framework's own switches that save memory.

    It has the switches' values, the equivalent strategy of Plimsoll, and the step's peak and time.
    """

    values: dict[str, str | int | float | bool | list[str] | None]
    strategy: str
    peak_bytes: int
    """The peak, in bytes, of the tensors on the rank that has the highest peak."""
    step_seconds: float
    is_too_close: bool = False
    """Whether the device may be too small: the error range of a rank's whole memory reaches beyond the device's memory."""
    host_bytes: int = 0
    """The bytes of offloaded tensors on the host, for the rank that offloads the most."""


class LayoutChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one result of a search over layouts: a layout, its micro-batch and strategy, and the peak and time of its step."""

    layout: Layout
    batch: int
    strategy: str
    peak_bytes: int
    """The peak, in bytes, of the tensors on the rank that has the highest peak."""
    step_seconds: float
    is_too_close: bool = False
    """Whether the device may be too small: the error range of a rank's whole memory reaches beyond the device's memory."""


class MeasuredFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one measured figure of a real run and the estimate's figure; ``unit`` is bytes, seconds or per second.

    ``estimated`` is ``None`` if the estimate does not have this figure. ``error`` is half the width of the range that was
    expected to contain the measured figure. ``note`` says what a figure outside that range may mean.
    """

    name: str
    unit: str
    estimated: float | None
    error: float
    measured: float
    note: str = ""

    @property
    def is_inside(self) -> bool:
        """Whether the measured figure is within the estimate's range. False if the estimate does not have this figure."""
        return self.estimated is not None and abs(self.measured - self.estimated) <= self.error


class FittingChange(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one change of a job that does not fit, with the memory and speed of the changed job, which fits.

    ``options`` are the options of ``plimsoll estimate`` that change, by name; an empty text leaves an option out. ``command``
    is the whole command, if the estimate came from a command. ``rank_seconds_per_sample`` is the price of the change: seconds
    of one step times ranks, per sample.
    """

    name: str
    options: dict[str, str]
    ranks: int
    total_bytes: int
    error_bytes: int
    step_seconds: float
    rank_seconds_per_sample: float
    tokens_per_second: float | None = None
    command: str = ""


class Estimate(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Data: the memory and speed of training ``target`` on ``device`` under ``layout``. ``plimsoll.estimate`` makes it."""

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
    """Bytes that torch's allocator would reserve with ``expandable_segments:True``, on the ranks of the stage that needs the
    most memory."""
    notes: tuple[str, ...] = ()
    framework: str = ""
    """The training framework whose switches were requested; empty if none. ``switches`` then lists the chosen setting first,
    followed by settings close to it."""
    switches: tuple[SwitchSetting, ...] = ()
    layouts: tuple[LayoutChoice, ...] = ()
    """The fastest layouts, if layouts were searched; the estimate describes the first of them."""
    measured: tuple[MeasuredFigure, ...] = ()
    """The measured figures of a real run, if such a run was given; ``measured_source`` names the run."""
    measured_source: str = ""
    changes: tuple[FittingChange, ...] = ()
    """The cheapest changes that make the job fit, if it may not fit and changes were searched."""
    run_tokens: int | None = None
    """The number of tokens that the whole run trains on, if it was given."""
    hourly_price: float | None = None
    """The price of one device for one hour, in the user's currency, if it was given."""
    trace_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def tightest(self) -> StageEstimate:
        """The stage of the pipeline that needs the most memory of a device."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def device_hours(self) -> float | None:
        """The hours of all devices together for the whole run, or ``None`` if its tokens or its speed are unknown."""
        speed = self.throughput.tokens_per_second
        return None if self.run_tokens is None or not speed else self.run_tokens / speed / 3600 * self.layout.ranks

    @property
    def price(self) -> float | None:
        """The price of the whole run in the user's currency, or ``None`` if it is unknown."""
        hours = self.device_hours
        return None if hours is None or self.hourly_price is None else hours * self.hourly_price

    @property
    def does_fit(self) -> bool | None:
        """Whether each rank fits its device and the budget (if a budget was given).

        ``None`` if the device's memory is not known, or if the error range contains this memory.
        """
        if self.budget_bytes is not None and any(stage.allocated_bytes > self.budget_bytes for stage in self.stages):
            return False
        if self.device_bytes is None:
            return None
        needed, error = self.tightest.total_bytes, self.tightest.error_bytes
        if needed + error <= self.device_bytes:
            return True
        return False if needed - error > self.device_bytes else None
