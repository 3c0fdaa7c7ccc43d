"""Names of precisions: what they mean, what others call them, what is unsupported."""

import pytest

from plimsoll.artifacts.job import Precision, parse_precision
from plimsoll.errors import InvalidOption


@pytest.mark.parametrize("precision", list(Precision))
def test_every_precision_is_found_by_its_name(precision: Precision):
    assert parse_precision(precision.value.upper()) is precision
    assert parse_precision(precision) is precision
    assert precision.is_mixed is (precision.autocast_dtype is not None)


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("torch.bfloat16", Precision.BF16),
        ("float32", Precision.FP32),
        ("bf16_mixed", Precision.BF16_MIXED),
        (None, None),
    ],
)
def test_other_names_are_known_and_nothing_stays_nothing(text: str | None, precision: Precision | None):
    assert parse_precision(text) is precision


@pytest.mark.parametrize("text", ["fp8", "float8_e4m3fn", "int8", "tf32", "nvfp4"])
def test_what_is_not_traced_is_unsupported_and_not_guessed(text: str):
    with pytest.raises(InvalidOption, match="unsupported") as caught:
        parse_precision(text)
    assert "bf16-mixed" in caught.value.next


def test_an_unknown_precision_shows_the_closest():
    with pytest.raises(InvalidOption, match="is not the name of a precision") as caught:
        parse_precision("bf16-mxed")
    assert "'bf16-mixed'" in caught.value.next
