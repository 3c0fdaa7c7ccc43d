"""A receipt's verdict follows from its evidence."""

from __future__ import annotations

import msgspec
import pytest

from plimsoll.artifacts.fault import Cause, Fault
from plimsoll.artifacts.receipt import OWN, Mismatch, ReceiptVerdict, Slope, finite
from plimsoll.units import MIB
from samples import make_comparison, make_mismatch, make_receipt

OFF = Slope(expected=1.0, measured=0.9, measured_error=1e-6)
FAULT = Fault(step=1, region="a", value="b", op="mul", cause=Cause.TRANSFER, elements=4, differing_elements=4)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, ReceiptVerdict.VERIFIED),
        ({"gradient_mismatches": (make_mismatch(),)}, ReceiptVerdict.GRADIENTS_DIFFER),
        ({"gradient_mismatches": (make_mismatch(difference=None),)}, ReceiptVerdict.GRADIENTS_DIFFER),
        (
            {"gradient_mismatches": (make_mismatch(spread=1e-2),), "is_deterministic": False},
            ReceiptVerdict.WITHIN_SPREAD,
        ),
        (
            {"gradient_mismatches": (make_mismatch(spread=None),), "is_deterministic": False},
            ReceiptVerdict.WITHIN_SPREAD,
        ),
        ({"buffer_mismatches": (make_mismatch(),)}, ReceiptVerdict.BUFFERS_DIFFER),
        ({"buffer_mismatches": (make_mismatch(),), "rounding_tolerance": 1e-2}, ReceiptVerdict.WITHIN_ROUNDING),
        ({"buffer_mismatches": (make_mismatch(),), "rounding_tolerance": 1e-4}, ReceiptVerdict.BUFFERS_DIFFER),
        ({"slope": OFF}, ReceiptVerdict.GRADIENTS_DIFFER),
        ({"slope": OFF, "is_lossless": False, "max_error": 0.1, "gradient_error": 0.05}, ReceiptVerdict.WITHIN_ERROR),
        ({"faults": (FAULT,)}, ReceiptVerdict.TENSORS_DIFFER),
        ({"faults": (FAULT,), "is_lossless": False, "max_error": 0.1}, ReceiptVerdict.TENSORS_DIFFER),
        ({"faults": (FAULT,), "is_lossless": False, "max_error": 0.1, "strategy": OWN}, ReceiptVerdict.WITHIN_ERROR),
        ({"plan_losses": (1.25, 1.0)}, ReceiptVerdict.LOSSES_DIFFER),
        ({"plan_losses": (1.25, 1.0), "is_deterministic": False}, ReceiptVerdict.VERIFIED),
        ({"measured_peak_bytes": 65 * MIB}, ReceiptVerdict.OVER_BUDGET),
        ({"measured_recording_peak_bytes": 65 * MIB}, ReceiptVerdict.OVER_BUDGET),
        ({"measured_peak_bytes": 65 * MIB, "budget_bytes": None}, ReceiptVerdict.VERIFIED),
        ({"measured_peak_bytes": 90 * MIB, "budget_bytes": None}, ReceiptVerdict.OVER_PREDICTION),
        ({"measured_peak_bytes": None, "measured_recording_peak_bytes": None}, ReceiptVerdict.VERIFIED),
    ],
)
def test_the_verdict_names_the_first_thing_that_fails(changes: dict[str, object], verdict: ReceiptVerdict):
    receipt = make_receipt(**changes)
    assert receipt.verdict is verdict
    assert receipt.exit_code == (0 if verdict.is_pass else 1)


def test_every_verdict_has_advice():
    assert all(verdict.advice for verdict in ReceiptVerdict)


def test_the_droppable_share_is_weighed_by_bytes():
    assert make_receipt().droppable_share == pytest.approx(11 / 12)
    assert make_receipt(regions=()).droppable_share == 0.0


def test_what_is_not_finite_becomes_none():
    assert finite(float("nan")) is None
    assert finite(float("-inf")) is None
    assert finite(0.5) == 0.5


def test_a_comparison_fails_only_when_gradients_differ():
    first, second = make_comparison().rows
    for is_equal, code in ((True, 0), (None, 0), (False, 1)):
        rows = (msgspec.structs.replace(first, is_bit_equal=is_equal), second)
        assert make_comparison(rows=rows).exit_code == code


def test_a_lossy_plan_is_held_to_its_error_and_to_exact_buffers():
    apart = Mismatch(name="w", max_absolute_difference=0.1, max_relative_difference=0.1)
    lossy = {"is_lossless": False, "max_error": 0.01, "gradient_error": 0.005, "gradient_mismatches": (apart,)}
    assert make_receipt(**lossy).verdict is ReceiptVerdict.WITHIN_ERROR
    assert make_receipt(**lossy).unexpected_mismatches == ()
    assert make_receipt(**lossy | {"gradient_error": 0.02}).verdict is ReceiptVerdict.GRADIENTS_DIFFER
    assert make_receipt(**lossy | {"gradient_error": None}).verdict is ReceiptVerdict.GRADIENTS_DIFFER
    assert make_receipt(**lossy | {"gradient_error": 0.5, "max_error": None}).verdict is ReceiptVerdict.WITHIN_ERROR
    assert make_receipt(**lossy | {"buffer_mismatches": (apart,)}).verdict is ReceiptVerdict.BUFFERS_DIFFER
