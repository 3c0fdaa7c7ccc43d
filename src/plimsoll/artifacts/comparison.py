"""A comparison: several strategies on one model and batch, with predicted and measured figures."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.decision import Status


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the predicted and measured figures of one strategy.

    ``measured_ratio`` is the strategy's step time divided by the step time without a plan: the median over pairs of steps. Its
    95% confidence interval is ``measured_ratio_low`` to ``measured_ratio_high``. Figures that were not measured are ``None``,
    and ``note`` says why.
    """

    strategy: str
    status: Status | None = None
    """How the search for the strategy's plan ended; ``None`` for torch's own strategies, which do not have a plan."""
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
    """Whether a difference in bits comes from other torch.compile kernels, which round differently."""
    is_lossless: bool = True
    gradient_error: float | None = None
    """The measured relative error of the gradient. It is set if the strategy uses a lossy codec or runs other compiled kernels;
    else it is ``None``."""
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the strategy changed the gradients although it should not have.

        This is so if gradients differ, no value is compressed with loss, and rounding does not explain the difference.
        """
        return self.is_lossless and self.is_bit_equal is False and not self.is_rounding


class Comparison(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Data: the figures of several strategies on one model and batch.

    ``plimsoll.compare`` makes a comparison; ``str`` shows it as a table.
    """

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
        """The exit status of the command line: 1 if a strategy changed the gradients although it should not, else 0."""
        return 1 if any(row.is_wrong for row in self.rows) else 0
