"""Comparisons of strategies, merged over ranks."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from plimsoll.analysis.verify.compare import merged_row
from plimsoll.artifacts.comparison import ComparisonRow

EQUAL = ComparisonRow(strategy="full", is_bit_equal=True)
ROUNDED = ComparisonRow(strategy="full", is_bit_equal=False, is_rounding=True, gradient_error=1e-7)
WRONG = ComparisonRow(strategy="full", is_bit_equal=False, gradient_error=0.5)


@pytest.mark.parametrize(
    ("rows", "is_equal", "is_rounding", "is_wrong"),
    [
        ((EQUAL, EQUAL), True, False, False),
        ((EQUAL, ROUNDED), False, True, False),
        ((ROUNDED, WRONG), False, False, True),
        ((WRONG, EQUAL, ROUNDED), False, False, True),
    ],
)
def test_one_rank_with_wrong_gradients_makes_the_row_wrong_whichever_rank_is_slowest(
    rows: tuple[ComparisonRow, ...], is_equal: bool, is_rounding: bool, is_wrong: bool
):
    for order in itertools.permutations((1.0, 2.0, 3.0), len(rows)):
        timed = [
            msgspec.structs.replace(row, measured_seconds=seconds) for row, seconds in zip(rows, order, strict=True)
        ]
        merged = merged_row(timed)
        assert (merged.is_bit_equal, merged.is_rounding, merged.is_wrong) == (is_equal, is_rounding, is_wrong)
        assert merged.measured_seconds == max(order)
