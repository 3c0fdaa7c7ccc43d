"""The result of a search for the best batch and plan: all points evaluated, the best point's plan, and its measurement.

In all figures, ``items`` are tokens for models that read token ids, and examples for all other models.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.costs import Basis, CostSource
from plimsoll.artifacts.decision import Status
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import Claim


class FitPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one micro-batch size under its best plan, with memory and speed.

    ``micro_seconds`` is the time of forward and backward of one micro-batch. ``optimizer_seconds`` is spent once per step,
    after ``accumulation`` micro-batches. ``predicted_peak_bytes`` is the plan's peak, or the smallest reachable peak if no plan
    fits. ``saved_bytes`` are all bytes that a plan may decide about; the plan recomputes ``rebuilt_bytes`` of them. With
    ``is_traced`` the step was traced at exactly this size; otherwise its sizes are derived from other traces.
    """

    micro_batch: int
    sequence: int
    accumulation: int
    status: Status
    unmanaged_peak_bytes: int
    predicted_peak_bytes: int
    unmanaged_seconds: float
    micro_seconds: float
    optimizer_seconds: float
    saved_bytes: int
    rebuilt_bytes: int
    is_traced: bool

    @property
    def items(self) -> int:
        """The number of tokens (or examples, for models without token ids) in one micro-batch."""
        return self.micro_batch * self.sequence

    @property
    def does_fit(self) -> bool:
        """Whether the peak with this micro-batch, under the best plan for it, fits the budget."""
        return self.status.is_usable

    @property
    def is_unmanaged(self) -> bool:
        """Whether the step with this micro-batch fits the budget without recomputing anything."""
        return self.does_fit and not self.rebuilt_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds from one optimizer step to the next, over all accumulated micro-batches."""
        return self.accumulation * self.micro_seconds + self.optimizer_seconds

    @property
    def items_per_second(self) -> float:
        """The number of tokens (or examples, for models without token ids) that one device processes per second."""
        return self.accumulation * self.items / self.step_seconds if self.step_seconds else 0.0

    @property
    def rebuilt_share(self) -> float:
        """The share of ``saved_bytes`` that the plan recomputes, from 0 to 1."""
        return self.rebuilt_bytes / self.saved_bytes if self.saved_bytes else 0.0


class FitChange(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one change that could help a step that does not fit the budget, and the figures of the step with this change.

    ``does_fit`` is ``None`` if it cannot be determined here; ``note`` then says why. ``predicted_peak_bytes`` is the peak under
    the best plan, or the smallest reachable peak if no plan fits. ``items_per_second`` is per device.
    """

    name: str
    does_fit: bool | None
    predicted_peak_bytes: int | None = None
    items_per_second: float | None = None
    note: str = ""


class Fit(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Data: the micro-batch and the plan with the most throughput under a budget. ``plimsoll.fit`` makes one.

    ``best`` is the position of the best point in ``points``. It is ``None`` if nothing fits; then ``changes`` lists changes
    that may help. ``plan`` was made for the step traced at the best point. ``measured`` has the predicted and measured figures
    of that plan on the device; ``None`` if the device is not available.
    """

    KIND: ClassVar[str] = "fit"
    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    model: str
    fingerprint: str
    device: str
    cost_source: CostSource
    cost_device: str
    budget_bytes: int
    items_name: str
    global_batch: int | None
    points: tuple[FitPoint, ...]
    best: int | None = None
    plan: Plan | None = None
    measured: Claim | None = None
    changes: tuple[FitChange, ...] = ()
    seconds_basis: Basis
    seconds_error: float
    """The relative error of the predicted seconds: the true seconds are expected to differ by at most this share of the
    predicted seconds, up or down."""
    traces: int = 0
    solves: int = 0
    total_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def best_point(self) -> FitPoint | None:
        """The micro-batch (with its plan and figures) that has the most throughput; ``None`` if nothing fits the budget."""
        return None if self.best is None else self.points[self.best]

    @property
    def best_unmanaged(self) -> FitPoint | None:
        """The micro-batch with the most throughput among those that fit the budget without a plan; ``None`` if none does."""
        found = [point for point in self.points if point.is_unmanaged]
        return max(found, key=lambda point: point.items_per_second, default=None)

    @property
    def gain(self) -> float | None:
        """How much more throughput plans allow: the best throughput divided by the best one without a plan, minus 1.

        ``None`` if nothing fits without a plan.
        """
        best, unmanaged = self.best_point, self.best_unmanaged
        if best is None or unmanaged is None or not unmanaged.items_per_second:
            return None
        return best.items_per_second / unmanaged.items_per_second - 1.0

    @property
    def exit_code(self) -> int:
        """The exit status of the command line: 0 if something fits, else 3 (the status of a budget below the lowest peak)."""
        return 0 if self.best is not None else 3
