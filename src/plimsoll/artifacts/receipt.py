"""A receipt: what a plan claimed, what was measured, and whether the two agree. No torch in here.

Differences that are not finite numbers are ``None``, so that a receipt stays valid JSON; use ``finite`` to make them.
"""

from __future__ import annotations

import enum
import math
from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import ArtifactBase
from plimsoll.artifacts.confirmation import Confirmation
from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import Plan

SCHEMA_VERSION = 3
"""3: a plan made without the device is confirmed, and may come back revised; files of 2 are read without."""
OWN = "own"
"""The strategy of a receipt for what a model does by itself: its own checkpointing, offloading or compiled budget."""


def finite(number: float) -> float | None:
    """The number, or ``None`` where it is infinite or not a number."""
    return number if math.isfinite(number) else None


class Verdict(enum.StrEnum):
    """What a receipt comes to; the first line that applies."""

    GRADIENTS_DIFFER = "GRADIENTS_DIFFER"
    BUFFERS_DIFFER = "BUFFERS_DIFFER"
    LOSSES_DIFFER = "LOSSES_DIFFER"
    TENSORS_DIFFER = "TENSORS_DIFFER"
    INTERMEDIATES_DIFFER = "INTERMEDIATES_DIFFER"
    OVER_BUDGET = "OVER_BUDGET"
    WITHIN_ERROR = "WITHIN_ERROR"
    WITHIN_SPREAD = "WITHIN_SPREAD"
    WITHIN_ROUNDING = "WITHIN_ROUNDING"
    VERIFIED = "VERIFIED"

    @property
    def advice(self) -> str:
        """One sentence that says what it means for the user."""
        return _ADVICE[self]

    @property
    def is_pass(self) -> bool:
        """Whether training may rely on the plan."""
        return self in (Verdict.VERIFIED, Verdict.WITHIN_ROUNDING, Verdict.WITHIN_SPREAD, Verdict.WITHIN_ERROR)


_ADVICE = {
    Verdict.GRADIENTS_DIFFER: "Do not train like this: gradients differ by more than the model differs from itself.",
    Verdict.BUFFERS_DIFFER: "Do not train like this: buffers after the step differ from the unmanaged step's.",
    Verdict.LOSSES_DIFFER: "Do not train like this: the forward gives other losses than the unmanaged one.",
    Verdict.TENSORS_DIFFER: "Do not train like this: backward reads tensors that are not what forward saved, even if the "
    "gradients of this one step agree.",
    Verdict.INTERMEDIATES_DIFFER: "Do not train like this: named intermediates differ from the unmanaged step's.",
    Verdict.OVER_BUDGET: "Gradients are right, but the step needs more than the budget: plan again with a lower budget.",
    Verdict.WITHIN_ERROR: "Values are held in lossy forms: the gradient's error is within what was allowed.",
    Verdict.WITHIN_SPREAD: "The model differs from itself from run to run; the plan stays within that spread.",
    Verdict.WITHIN_ROUNDING: "Compiled code rounds differently: the gradient agrees to half the digits of its dtype or better.",
    Verdict.VERIFIED: "Gradients and buffers are equal bit for bit, and the peak keeps to the budget, if there is one.",
}


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that is not equal bit for bit.

    ``baseline_max_absolute_difference`` is how far two unmanaged runs of the same step lie apart on this tensor;
    ``None`` where that is no finite number.
    """

    name: str
    max_absolute_difference: float | None
    max_relative_difference: float | None
    baseline_max_absolute_difference: float | None = 0.0

    @property
    def is_within_spread(self) -> bool:
        """Whether the unmanaged model differs from itself by at least as much."""
        if self.max_absolute_difference is None:
            return False
        spread = self.baseline_max_absolute_difference
        return spread is None or self.max_absolute_difference <= spread


class Intermediate(msgspec.Struct, frozen=True, kw_only=True):
    """One named module's output, or the gradient of it, in both runs. ``call`` counts the module's calls in the step."""

    module: str
    call: int
    is_gradient: bool
    is_bit_equal: bool
    max_absolute_difference: float | None = 0.0
    max_relative_difference: float | None = 0.0


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the loss changes along the gradient: as the gradient says, and as the loss itself shows.

    ``measured`` comes from losses at shifted parameters under the same random numbers (central differences, loss per unit
    of length); ``measured_error`` is how far two step lengths disagree. It needs no second way to make the gradient.
    """

    expected: float
    measured: float
    measured_error: float

    @property
    def is_conclusive(self) -> bool:
        """Whether the loss is smooth and precise enough to judge the gradient within 2%."""
        return self.expected > 0 and self.measured_error <= 0.02 * self.expected

    @property
    def disagrees(self) -> bool:
        """Whether the gradient is not the loss's: off by more than 2% and five times the measurement's own error."""
        apart = abs(self.measured - self.expected)
        return self.is_conclusive and apart > max(0.02 * self.expected, 5 * self.measured_error)


class RegionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one region call was served, and why.

    ``droppable_bytes`` of the ``activation_bytes`` that autograd saved could be recomputed bit for bit;
    ``dropped_bytes`` are those that this plan did recompute.
    """

    name: str
    call: int
    engine: Engine
    reason: str = ""
    activation_bytes: int = 0
    droppable_bytes: int = 0
    dropped_bytes: int = 0


class Receipt(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """The evidence for one plan on one batch. ``plimsoll.verify`` makes one; ``str`` shows it.

    Where the ``strategy`` is ``own`` there is no plan: the model's own checkpointing, offloading or compiled budget is held
    against the same model with that switched off, and nothing was predicted. ``method`` says what was found at work.

    Peaks count everything that the step allocates on the device; seconds are medians over ``steps`` steps, their spread
    is half the distance between the quartiles.
    """

    KIND: ClassVar[str] = "receipt"

    schema_version: int = SCHEMA_VERSION
    model: str
    fingerprint: str
    signature: str
    device: str
    strategy: str
    method: str = ""
    budget_bytes: int | None
    versions: dict[str, str]
    steps: int

    compared_gradients: int
    gradient_mismatches: tuple[Mismatch, ...] = ()
    compared_buffers: int = 0
    buffer_mismatches: tuple[Mismatch, ...] = ()
    is_lossless: bool = True
    """Whether the plan holds no value in a lossy form."""
    max_error: float | None = 0.0
    """The relative error of the gradient that the plan was allowed; ``None``: any."""
    predicted_error: float = 0.0
    gradient_error: float | None = 0.0
    """The measured relative error of the whole gradient, ‖Δg‖ / ‖g‖; ``None`` where it is not finite."""
    rounding_tolerance: float = 0.0
    """The relative error of the gradient that differently compiled arithmetic explains; 0: the same kernels run."""
    slope: Slope | None = None
    faults: tuple[Fault, ...] = ()
    """Saved tensors that came back as something else, each with its place and likely cause."""
    compared_tensors: int = 0
    """Saved tensors that were compared with what came back in backward."""
    intermediates: tuple[Intermediate, ...] = ()
    is_deterministic: bool
    """Whether two unmanaged runs of the step gave the same bits."""
    baseline_losses: tuple[float | None, ...]
    plan_losses: tuple[float | None, ...]
    baseline_curve: tuple[float | None, ...] = ()
    """Losses of steps with the optimizer, from the same weights; empty where no curve was asked for."""
    plan_curve: tuple[float | None, ...] = ()

    predicted_baseline_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_baseline_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_recording_peak_bytes: int | None = None
    """The peak of the first managed step, which records."""

    predicted_baseline_seconds: float | None = None
    predicted_seconds: float | None = None
    measured_baseline_seconds: float | None = None
    measured_baseline_spread_seconds: float = 0.0
    measured_seconds: float | None = None
    measured_spread_seconds: float = 0.0

    regions: tuple[RegionOutcome, ...] = ()
    notes: tuple[str, ...] = ()
    confirmation: Confirmation | None = None
    """What the device said about a plan that was made without it; ``None`` where the plan was made on the device."""
    revised_plan: Plan | None = None
    """The plan solved again with measured costs, where the given one was off."""

    @property
    def is_bit_equal(self) -> bool:
        """Whether every gradient and every buffer has the bits of the unmanaged step."""
        return not self.gradient_mismatches and not self.buffer_mismatches

    @property
    def unexpected_mismatches(self) -> tuple[Mismatch, ...]:
        """Tensors that differ; of a lossy plan that keeps to its error, buffers alone: its gradients are bound to."""
        if self.verdict is Verdict.WITHIN_ERROR:
            return self.buffer_mismatches
        return (*self.gradient_mismatches, *self.buffer_mismatches)

    @property
    def droppable_share(self) -> float:
        """Share of the regions' saved activation bytes that could be recomputed bit for bit."""
        total = sum(region.activation_bytes for region in self.regions)
        return sum(region.droppable_bytes for region in self.regions) / total if total else 0.0

    @property
    def is_over_budget(self) -> bool:
        """Whether a measured peak, the recording step's included, exceeds the budget."""
        if self.budget_bytes is None:
            return False
        peaks = (self.measured_peak_bytes, self.measured_recording_peak_bytes)
        return any(peak is not None and peak > self.budget_bytes for peak in peaks)

    @property
    def verdict(self) -> Verdict:
        """What the receipt comes to."""
        gradients = self._verdict_on_gradients()
        if gradients is Verdict.GRADIENTS_DIFFER or self._slope_disagrees:
            return Verdict.GRADIENTS_DIFFER
        if not all(mismatch.is_within_spread or self._is_rounding(mismatch) for mismatch in self.buffer_mismatches):
            return Verdict.BUFFERS_DIFFER
        if self.is_deterministic and not self._losses_agree(gradients):
            return Verdict.LOSSES_DIFFER
        if self.faults and (self.is_lossless or self.strategy != OWN):  # a plan's lossy values are not compared
            return Verdict.TENSORS_DIFFER
        if self.is_deterministic and gradients is Verdict.VERIFIED and not self._intermediates_agree():
            return Verdict.INTERMEDIATES_DIFFER
        if self.is_over_budget:
            return Verdict.OVER_BUDGET
        if gradients is Verdict.VERIFIED and not self.is_bit_equal:
            is_spread = all(mismatch.is_within_spread for mismatch in self.buffer_mismatches)
            return Verdict.WITHIN_SPREAD if is_spread else Verdict.WITHIN_ROUNDING
        return gradients

    def _verdict_on_gradients(self) -> Verdict:
        """``VERIFIED``, or why it is something less."""
        error = math.inf if self.gradient_error is None else self.gradient_error
        if not self.is_lossless:
            is_allowed = math.isfinite(error) and (self.max_error is None or error <= self.max_error)
            return Verdict.WITHIN_ERROR if is_allowed else Verdict.GRADIENTS_DIFFER
        if not self.gradient_mismatches:
            return Verdict.VERIFIED
        if all(mismatch.is_within_spread for mismatch in self.gradient_mismatches):
            return Verdict.WITHIN_SPREAD
        return Verdict.WITHIN_ROUNDING if error <= self.rounding_tolerance > 0 else Verdict.GRADIENTS_DIFFER

    def _is_rounding(self, mismatch: Mismatch) -> bool:
        """Whether kernels compiled anew explain it."""
        relative = mismatch.max_relative_difference
        return relative is not None and relative <= self.rounding_tolerance

    @property
    def _slope_disagrees(self) -> bool:
        """Whether the loss itself contradicts the gradient; one from lossy forms is judged by the error it was allowed."""
        return self.is_lossless and self.slope is not None and self.slope.disagrees

    def _losses_agree(self, gradients: Verdict) -> bool:
        """Whether forward gives the same losses; with lossy values or other kernels, weights may drift apart later on."""
        if self.rounding_tolerance:
            pairs = zip(self.baseline_losses, self.plan_losses, strict=True)
            return all(_is_close(one, other, self.rounding_tolerance) for one, other in pairs)
        if gradients is Verdict.VERIFIED and self.baseline_curve != self.plan_curve:
            return False
        return self.baseline_losses == self.plan_losses

    def _intermediates_agree(self) -> bool:
        return all(intermediate.is_bit_equal for intermediate in self.intermediates)

    @property
    def exit_code(self) -> int:
        """0 where the verdict passes, else 1."""
        return 0 if self.verdict.is_pass else 1


def _is_close(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=tolerance)
