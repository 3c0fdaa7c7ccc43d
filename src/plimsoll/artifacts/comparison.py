"""A comparison: several strategies on one model and batch, predicted beside measured."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.decision import Status


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy.

    ``measured_ratio`` is the paired median of its step time over the unmanaged one's, between ``measured_ratio_low`` and
    ``measured_ratio_high`` with 95% confidence. What was not measured is ``None``, and ``note`` says why.
    """

    strategy: str
    status: Status | None = None
    """How the search for its plan ended; ``None`` where there is no plan: what torch has of its own."""
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    measured_ratio: float | None = None
    measured_ratio_low: float | None = None
    measured_ratio_high: float | None = None
    is_bit_equal: bool | None = None
    is_rounding: bool = False
    """Where bits differ: whether other kernels of torch.compile, which round otherwise, explain it."""
    is_lossless: bool = True
    gradient_error: float | None = None
    """The measured relative error of the gradient, for strategies with lossy forms and where compiled kernels differ."""
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether gradients differ although nothing is held in a lossy form."""
        return self.is_lossless and self.is_bit_equal is False and not self.is_rounding


class Comparison(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Strategies side by side. ``plimsoll.compare`` makes one; ``str`` shows it."""

    KIND: ClassVar[str] = "comparison"
    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int = SCHEMA_VERSION
    model: str
    signature: str
    device: str
    versions: dict[str, str]
    steps: int
    baseline_peak_bytes: int
    measured_baseline_seconds: float | None = None
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 where a strategy changed the gradients, else 0."""
        return 1 if any(row.is_wrong for row in self.rows) else 0
