"""A receipt: what a plan predicted, what was measured, and whether the two agree.

Differences that are not finite are stored as ``None``, so that a receipt stays valid JSON; ``finite`` converts them. A plan
made without its target device is *confirmed* once the device is available: the receipt compares predicted with measured
figures, before and, if they disagree, after solving again.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from plimsoll.artifacts.base import AdvisedEnum, ArtifactBase
from plimsoll.artifacts.decision import Engine
from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import Plan

OWN = "own"
"""The strategy's name in a receipt (the result of ``plimsoll.verify``) that was made without a plan: it verifies the model's
own checkpointing, offloading or compiled budget.
"""
SECONDS_TOLERANCE = 0.10
"""A predicted step time is off if it differs from the measured step time by more than this share of the measured time."""
PEAK_TOLERANCE = 0.05
"""A predicted peak is off if it differs from the measured peak by more than this share of the measured peak. A measured peak
above the budget is off whatever was predicted."""
MOST_ROUNDING = 1.5
"""The error of a gradient tensor against float64 that tiles may cause, as a multiple of the plain step's own error. On Llama,
Qwen3 and GPT-2 (float32 and bfloat16) the largest ratio was 1.2, and the median 1.0."""
_UNCHECKED_ROUNDING = 1e-3
"""The relative difference of the gradient that tiles may cause if no step in float64 can be compared with."""
_BROKEN_PROMISE = 0.10
"""A share of the predicted peak. A plan without a budget fails if the measured peak exceeds the predicted peak by more than
this share.

Small steps on the gloo backend exceed it by about this share.
"""


def finite(number: float) -> float | None:
    """Return the number, or ``None`` if it is infinite or NaN."""
    return number if math.isfinite(number) else None


class ReceiptVerdict(AdvisedEnum):
    """The possible verdicts of a receipt (the evidence for a plan), and advice on each. A receipt has the first verdict, in
    this order, that applies.
    """

    GRADIENTS_DIFFER = (
        "GRADIENTS_DIFFER",
        "Do not train like this: gradients differ from the unmanaged step by more than two unmanaged runs differ.",
    )
    BUFFERS_DIFFER = (
        "BUFFERS_DIFFER",
        "Do not train like this: buffers after the step differ from the unmanaged step's.",
    )
    LOSSES_DIFFER = "LOSSES_DIFFER", "Do not train like this: forward gives other losses than the unmanaged step."
    TENSORS_DIFFER = (
        "TENSORS_DIFFER",
        "Do not train like this: backward reads other tensors than forward saved, even if the "
        "gradients of this one step agree.",
    )
    INTERMEDIATES_DIFFER = (
        "INTERMEDIATES_DIFFER",
        "Do not train like this: the compared module outputs differ from the unmanaged step's.",
    )
    OVER_BUDGET = (
        "OVER_BUDGET",
        "Gradients are correct, but the step needs more memory than the budget: plan again with a lower budget.",
    )
    OVER_PREDICTION = (
        "OVER_PREDICTION",
        "Gradients are correct, but the peak is over 10% above the plan's prediction: look at which regions keep more than "
        "planned, and why. Then plan again with a budget, because a budget is checked by measurement.",
    )
    WITHIN_ERROR = (
        "WITHIN_ERROR",
        "Some values are held in lossy forms; the gradient's error is within the allowed error.",
    )
    WITHIN_SPREAD = (
        "WITHIN_SPREAD",
        "The model is not deterministic; the plan's gradients differ no more than two unmanaged runs do.",
    )
    WITHIN_ROUNDING = (
        "WITHIN_ROUNDING",
        "Compiled code or tiles round differently: the gradients differ by no more than rounding explains.",
    )
    VERIFIED = (
        "VERIFIED",
        "Gradients and buffers are equal bit for bit, and the peak is within its limit (the budget, or without one 10% above "
        "the prediction).",
    )

    @property
    def is_pass(self) -> bool:
        """Whether training may rely on the plan."""
        return self in (
            ReceiptVerdict.VERIFIED,
            ReceiptVerdict.WITHIN_ROUNDING,
            ReceiptVerdict.WITHIN_SPREAD,
            ReceiptVerdict.WITHIN_ERROR,
        )


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Data: one gradient or buffer that is not equal bit for bit between the step with the plan and the step without a plan.

    ``baseline_max_absolute_difference`` is how far two runs without a plan of the same step differ on this tensor; ``None`` if
    that difference is not finite.
    """

    name: str
    max_absolute_difference: float | None
    max_relative_difference: float | None
    baseline_max_absolute_difference: float | None = 0.0

    @property
    def is_within_spread(self) -> bool:
        """Whether the plan changes this tensor by at most as much as two runs without a plan differ on it."""
        if self.max_absolute_difference is None:
            return False
        spread = self.baseline_max_absolute_difference
        return spread is None or self.max_absolute_difference <= spread


class Intermediate(msgspec.Struct, frozen=True, kw_only=True):
    """Data: a comparison of one module's output, or of the output's gradient, between the runs with and without the plan.

    ``call`` is the number of the module's call in the step, and ``output`` the position of the tensor among those that the call
    returned.
    """

    module: str
    call: int
    output: int = 0
    is_gradient: bool
    is_bit_equal: bool
    max_absolute_difference: float | None = 0.0
    max_relative_difference: float | None = 0.0


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """Data: a check of the gradient against the loss: the slope of the loss along the gradient, found in two ways.

    ``expected`` follows from the gradient. ``measured`` comes from losses at shifted parameters under the same random numbers
    (central differences, loss per unit of length). ``measured_error`` is the difference between the results of two step
    lengths. The check does not need a second gradient.
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
        """Whether the loss contradicts the gradient: by more than 2% and by more than five times the measurement's error."""
        apart = abs(self.measured - self.expected)
        return self.is_conclusive and apart > max(0.02 * self.expected, 5 * self.measured_error)


class TileRounding(msgspec.Struct, frozen=True, kw_only=True):
    """Data: how far running module calls in tiles moves the gradients, compared with the rounding that the step has anyway.

    ``difference`` is the relative difference of the tiled and the plain gradient. ``plain_error`` and ``tiled_error`` are their
    relative errors against the same step in float64. For each gradient tensor, the tiled step's error may be ``MOST_ROUNDING``
    times the plain step's; ``worst_ratio`` is the largest such ratio, of ``worst_tensor``, and ``exceeding`` names the tensors
    above the limit. If the model could not run in float64, ``obstacle`` says why.
    """

    compared: int
    difference: float
    plain_error: float = 0.0
    tiled_error: float = 0.0
    worst_tensor: str = ""
    worst_ratio: float = 0.0
    exceeding: tuple[str, ...] = ()
    obstacle: str = ""
    is_without_dropout: bool = False

    @property
    def is_rounding(self) -> bool:
        """Whether the difference between the tiled and the plain gradient is only rounding."""
        return not self.exceeding and (not self.obstacle or self.difference <= _UNCHECKED_ROUNDING)


class RegionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Data: how the calls of one region (a module that the plan decides about) were handled (``engine``), and why (``reason``).

    Autograd saved ``activation_bytes`` in this call. Of these, ``droppable_bytes`` could be recomputed bit for bit, and this
    plan recomputed ``dropped_bytes``. ``streams`` is the number of known sequences of torch calls: a region whose code branches
    has several. ``reruns`` counts the calls with an unknown sequence whose forward ran again in backward.
    """

    name: str
    call: int
    engine: Engine
    reason: str = ""
    activation_bytes: int = 0
    droppable_bytes: int = 0
    dropped_bytes: int = 0
    streams: int = 0
    reruns: int = 0

    @property
    def how(self) -> str:
        """In words, how backward gets the tensors that this region dropped: by running recorded ops, one list or several, or by
        running forward again.
        """
        if self.engine is not Engine.RECIPE:
            return str(self.engine)
        recipes = f"{self.streams} recipes" if self.streams > 1 else str(self.engine)
        return f"{recipes}, and its forward again in {self.reruns} calls" if self.reruns else recipes


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Data: the predicted and the measured peak and step time of one plan.

    The measured peak is the peak of the first managed step, which also records the ops to repeat, or of a later step.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_seconds: float
    measured_seconds: float
    measured_spread_seconds: float = 0.0

    @property
    def peak_error(self) -> float:
        """Predicted peak divided by measured peak, minus 1; positive if the prediction was too high."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1.0 if self.measured_peak_bytes else 0.0

    @property
    def seconds_error(self) -> float:
        """Predicted step seconds divided by measured step seconds, minus 1; positive if the prediction was too high."""
        return self.predicted_seconds / self.measured_seconds - 1.0 if self.measured_seconds else 0.0


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """Data: how measurements on a device compare with a plan that was made without the device.

    The plan was made with roofline costs of ``cost_device``. ``given`` holds the predicted and measured figures of the original
    plan. If they disagree, the step is traced and timed on the device, and a second plan is made: ``revised`` holds its
    figures, and ``revised_verdict`` its receipt's verdict. If a second plan could not be made, ``obstacle`` says why.
    """

    cost_device: str
    budget_bytes: int | None
    given: Claim
    revised: Claim | None = None
    revised_verdict: str = ""
    obstacle: str = ""
    peak_tolerance: float = PEAK_TOLERANCE
    seconds_tolerance: float = SECONDS_TOLERANCE

    @property
    def is_over_budget(self) -> bool:
        """Whether the measured peak of the original plan exceeds its budget."""
        return self.budget_bytes is not None and self.given.measured_peak_bytes > self.budget_bytes

    @property
    def is_peak_off(self) -> bool:
        """Whether the measured peak of the original plan exceeds the budget, or differs too much from the prediction.

        Too much is more than ``peak_tolerance``, a share of the measured peak.
        """
        return self.is_over_budget or abs(self.given.peak_error) > self.peak_tolerance

    @property
    def is_time_off(self) -> bool:
        """Whether the measured step time of the original plan differs too much from the prediction.

        Too much is more than ``seconds_tolerance``, a share of the measured time.
        """
        return abs(self.given.seconds_error) > self.seconds_tolerance

    @property
    def is_confirmed(self) -> bool:
        """Whether peak and step time agree with the predictions, so that the original plan can be used unchanged."""
        return not (self.is_peak_off or self.is_time_off)


class Receipt(ArtifactBase, msgspec.Struct, frozen=True, kw_only=True):
    """Data: the evidence for one plan on one batch, from running the step. ``plimsoll.verify`` makes it; ``str`` shows it.

    If ``strategy`` is ``own``, there was nothing to plan or predict: the receipt compares the model's own checkpointing,
    offloading or compiled budget with the same model where that method is switched off. ``method`` names the method found.

    Peaks count everything that the step allocates on the device. Seconds are medians over ``steps`` steps; their spread is half
    the distance between the quartiles.
    """

    KIND: ClassVar[str] = "receipt"
    SCHEMA_VERSION: ClassVar[int] = 3
    """Schema 3 added ``confirmation`` and ``revised_plan``, for plans made without the device. Files of schema 2 lack them."""

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
    """Whether the plan restores all values without loss."""
    max_error: float | None = 0.0
    """The relative gradient error that the plan was allowed to cause; ``None`` if any error was allowed."""
    predicted_error: float = 0.0
    gradient_error: float | None = 0.0
    """The measured relative error of the whole gradient, ‖Δg‖ / ‖g‖; ``None`` if it is not finite."""
    rounding_tolerance: float = 0.0
    """The relative gradient error that can come from differently compiled kernels; 0 if both runs use the same kernels."""
    tile_rounding: TileRounding | None = None
    """How far tiles move the gradients; ``None`` if the plan has no tiles. All other comparisons are with the step in tiles."""
    slope: Slope | None = None
    faults: tuple[Fault, ...] = ()
    """Saved tensors that backward would have read with other contents, each with its place and likely cause."""
    compared_tensors: int = 0
    """How many saved tensors were compared with the tensors that backward got."""
    intermediates: tuple[Intermediate, ...] = ()
    is_deterministic: bool
    """Whether two runs of the step without a plan gave the same bits."""
    baseline_losses: tuple[float | None, ...]
    plan_losses: tuple[float | None, ...]
    baseline_curve: tuple[float | None, ...] = ()
    """The losses of several steps with the optimizer, without the plan. ``plan_curve`` has the losses with the plan, from the
    same weights. Both are empty if no curves were requested."""
    plan_curve: tuple[float | None, ...] = ()

    predicted_baseline_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_baseline_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_recording_peak_bytes: int | None = None
    """Peak of the first step with the plan, in bytes. This step also records the ops that later steps repeat."""

    predicted_baseline_seconds: float | None = None
    predicted_seconds: float | None = None
    measured_baseline_seconds: float | None = None
    measured_baseline_spread_seconds: float = 0.0
    measured_seconds: float | None = None
    measured_spread_seconds: float = 0.0

    regions: tuple[RegionOutcome, ...] = ()
    notes: tuple[str, ...] = ()
    confirmation: Confirmation | None = None
    """Measurements on the device of a plan that was made without the device; ``None`` if the plan was made on the device."""
    revised_plan: Plan | None = None
    """A second plan that was made with costs measured on the device, because the original plan's predictions were off; ``None``
    if no second plan was made.
    """

    def __post_init__(self) -> None:
        if not self.rounding_tolerance >= 0:
            raise ValueError(f"rounding_tolerance is {self.rounding_tolerance}, but an error is never below 0")

    @property
    def is_bit_equal(self) -> bool:
        """Whether all gradients and all buffers are equal bit for bit with and without the plan."""
        return not self.gradient_mismatches and not self.buffer_mismatches

    @property
    def unexpected_mismatches(self) -> tuple[Mismatch, ...]:
        """The tensors that differ and should not.

        For a lossy plan whose error is within its limit, these are only buffers, because its gradients have to differ.
        """
        if self.verdict is ReceiptVerdict.WITHIN_ERROR:
            return self.buffer_mismatches
        return (*self.gradient_mismatches, *self.buffer_mismatches)

    @property
    def droppable_share(self) -> float:
        """The share of the bytes saved by autograd in all regions that could be recomputed bit for bit, from 0 to 1."""
        total = sum(region.activation_bytes for region in self.regions)
        return sum(region.droppable_bytes for region in self.regions) / total if total else 0.0

    @property
    def is_over_budget(self) -> bool:
        """Whether a measured peak exceeds the budget; the peak of the first step, which also records, counts too."""
        if self.budget_bytes is None:
            return False
        peaks = (self.measured_peak_bytes, self.measured_recording_peak_bytes)
        return any(peak is not None and peak > self.budget_bytes for peak in peaks)

    @property
    def is_over_prediction(self) -> bool:
        """Whether a plan without a budget exceeds its predicted peak by more than 10%. The predicted peak is its only limit."""
        if self.budget_bytes is not None or not self.predicted_peak_bytes or self.measured_peak_bytes is None:
            return False
        return self.measured_peak_bytes > (1 + _BROKEN_PROMISE) * self.predicted_peak_bytes

    @property
    def verdict(self) -> ReceiptVerdict:
        """The verdict of this receipt (the evidence for a plan): the first member of ``ReceiptVerdict`` that applies."""
        gradients = self._verdict_on_gradients()
        is_beyond_rounding = self.tile_rounding is not None and not self.tile_rounding.is_rounding
        if gradients is ReceiptVerdict.GRADIENTS_DIFFER or self._slope_disagrees or is_beyond_rounding:
            return ReceiptVerdict.GRADIENTS_DIFFER
        if not all(mismatch.is_within_spread or self._is_rounding(mismatch) for mismatch in self.buffer_mismatches):
            return ReceiptVerdict.BUFFERS_DIFFER
        if self.is_deterministic and not self._losses_agree(gradients):
            return ReceiptVerdict.LOSSES_DIFFER
        # A plan's lossy values are not compared with what forward saved, so faults say nothing about them.
        if self.faults and (self.is_lossless or self.strategy != OWN):
            return ReceiptVerdict.TENSORS_DIFFER
        are_equal = all(each.is_bit_equal for each in self.intermediates)
        if self.is_deterministic and gradients is ReceiptVerdict.VERIFIED and not are_equal:
            return ReceiptVerdict.INTERMEDIATES_DIFFER
        if self.is_over_budget:
            return ReceiptVerdict.OVER_BUDGET
        if self.is_over_prediction:
            return ReceiptVerdict.OVER_PREDICTION
        if gradients is ReceiptVerdict.VERIFIED and not self.is_bit_equal:
            is_spread = all(mismatch.is_within_spread for mismatch in self.buffer_mismatches)
            return ReceiptVerdict.WITHIN_SPREAD if is_spread else ReceiptVerdict.WITHIN_ROUNDING
        if gradients is ReceiptVerdict.VERIFIED and self.tile_rounding is not None:
            return ReceiptVerdict.WITHIN_ROUNDING
        return gradients

    def _verdict_on_gradients(self) -> ReceiptVerdict:
        """Return the verdict on gradients alone.

        It is ``VERIFIED`` if they are equal bit for bit, and otherwise the weaker verdict that applies.
        """
        error = math.inf if self.gradient_error is None else self.gradient_error
        if not self.is_lossless:
            is_allowed = math.isfinite(error) and (self.max_error is None or error <= self.max_error)
            return ReceiptVerdict.WITHIN_ERROR if is_allowed else ReceiptVerdict.GRADIENTS_DIFFER
        if not self.gradient_mismatches:
            return ReceiptVerdict.VERIFIED
        if all(mismatch.is_within_spread for mismatch in self.gradient_mismatches):
            return ReceiptVerdict.WITHIN_SPREAD
        return (
            ReceiptVerdict.WITHIN_ROUNDING if error <= self.rounding_tolerance > 0 else ReceiptVerdict.GRADIENTS_DIFFER
        )

    def _is_rounding(self, mismatch: Mismatch) -> bool:
        """Return True if kernels that were compiled differently, and so round differently, explain a tensor's difference."""
        relative = mismatch.max_relative_difference
        return relative is not None and relative <= self.rounding_tolerance

    @property
    def _slope_disagrees(self) -> bool:
        """Whether the loss contradicts the gradient. False for a lossy plan, which is judged by its allowed error instead."""
        return self.is_lossless and self.slope is not None and self.slope.disagrees

    def _losses_agree(self, gradients: ReceiptVerdict) -> bool:
        """Return True if the runs with and without the plan have the same losses, as far as they have to.

        The losses of several steps have to be equal only if the gradients are equal, because otherwise the weights drift apart.
        """
        if self.rounding_tolerance:
            pairs = zip(self.baseline_losses, self.plan_losses, strict=True)
            return all(_is_close(one, other, self.rounding_tolerance) for one, other in pairs)
        if gradients is ReceiptVerdict.VERIFIED and self.baseline_curve != self.plan_curve:
            return False
        return self.baseline_losses == self.plan_losses

    @property
    def exit_code(self) -> int:
        """The exit status of the command line: 0 if training may rely on the plan, else 1."""
        return 0 if self.verdict.is_pass else 1


def _is_close(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=tolerance)
