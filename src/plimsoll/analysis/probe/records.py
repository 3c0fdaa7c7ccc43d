"""What an arm writes down: one record per step, one per comparison of gradients, one per look at held-out data.

Numbers that are not finite are ``None``, so that the log is valid JSON.
"""

from __future__ import annotations

import msgspec

BASELINE, PLAN = "baseline", "plan"
ARMS = (BASELINE, PLAN)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One training step. ``seconds`` are left out where the step records or is measured, ``peak_bytes`` where it is not."""

    step: int
    loss: float | None
    gradient_norm: float | None
    block_norms: tuple[float | None, ...]
    seconds: float | None = None
    peak_bytes: int | None = None

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are numbers."""
        return self.loss is not None and self.gradient_norm is not None

    def is_same(self, other: StepRecord) -> bool:
        """Whether loss and norms have the same bits."""
        ours = (self.step, self.loss, self.gradient_norm, self.block_norms)
        return self.is_finite and ours == (other.step, other.loss, other.gradient_norm, other.block_norms)


class GradientRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The plan's gradient beside the unmanaged one, block by block: their product and both squared lengths."""

    step: int
    products: tuple[float, ...]
    baseline_squares: tuple[float, ...]
    plan_squares: tuple[float, ...]


class HeldOutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The loss of every held-out batch after so many steps."""

    steps: int
    losses: tuple[float | None, ...]


class ArmLog(msgspec.Struct, kw_only=True):
    """Everything that one arm wrote down."""

    steps: list[StepRecord] = []
    gradients: list[GradientRecord] = []
    held_out: list[HeldOutRecord] = []

    @property
    def is_finite(self) -> bool:
        """Whether no step went to NaN or infinity (an arm ends at the first one that does)."""
        return not self.steps or self.steps[-1].is_finite

    def lines(self) -> list[bytes]:
        """The log as JSON lines, in the order of the steps."""
        tagged: list[tuple[int, int, bytes]] = []
        encode = msgspec.json.encode
        tagged += [(record.step, 1, encode(record)) for record in self.steps]
        tagged += [(record.step, 0, encode({"gradient": record})) for record in self.gradients]
        tagged += [(record.steps, 2, encode({"held_out": record})) for record in self.held_out]
        return [line for _, _, line in sorted(tagged, key=lambda each: each[:2])]
