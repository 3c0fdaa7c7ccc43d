"""Text with units in, bytes out; what could be read twice is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import InvalidBudget
from plimsoll.units import (
    GIB,
    KIB,
    MIB,
    format_bytes,
    format_bytes_up,
    format_seconds,
    format_share,
    parse_budget,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("amount", "bytes_"),
    [
        ("70GiB", 70 * GIB),
        ("80GB", 80 * 10**9),
        ("1.5 GiB", 3 * GIB // 2),
        (" 512 mib ", 512 * MIB),
        ("1_000B", 1000),
        ("2TiB", 2 * 1024**4),
        (12345, 12345),
    ],
)
def test_bytes_are_read_in_binary_and_decimal_units(amount: int | str, bytes_: int):
    assert parse_bytes(amount) == bytes_


@pytest.mark.parametrize("amount", ["24G", "24g", "24 M", "24T", "24K"])
def test_an_ambiguous_unit_is_refused_with_both_readings(amount: str):
    with pytest.raises(InvalidBudget) as caught:
        parse_bytes(amount)
    letter = amount.strip()[-1].upper()
    assert f"24{letter}B" in caught.value.why
    assert f"24{letter}iB" in caught.value.why


@pytest.mark.parametrize(
    "amount", ["", "GiB", "70", "-1GiB", "1e9B", "nan GiB", "70 GiB/s", "70 bytes", 0, -5, "0GiB", True, 1.5, None]
)
def test_what_is_no_amount_of_memory_is_refused(amount: object):
    with pytest.raises(InvalidBudget) as caught:
        parse_bytes(amount)  # type: ignore[arg-type]
    assert caught.value.found
    assert caught.value.next


@given(st.integers(min_value=1, max_value=2**50))
def test_ints_pass_through(bytes_: int):
    assert parse_bytes(bytes_) == bytes_
    assert parse_budget(bytes_ + KIB) == bytes_ + KIB
    assert parse_bytes(f"{bytes_}B") == bytes_


@pytest.mark.parametrize("amount", [1, 24, 80, 1023])
def test_a_number_that_must_be_meant_in_gib_is_refused(amount: int):
    with pytest.raises(InvalidBudget, match=f'write "{amount}GiB"'):
        parse_budget(amount)


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1024, "1.0 KiB"),
        (512 * MIB, "512.0 MiB"),
        (1023 * MIB, "1023 MiB"),
        (int(7.3 * GIB), "7.3 GiB"),
        (-2 * GIB, "-2.0 GiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(bytes_: int, text: str):
    assert format_bytes(bytes_) == text


@pytest.mark.parametrize("share", [1.0, 7.26, 999.96, 1000.3, 1010.44, 1023.999])
@pytest.mark.parametrize("unit", [1024, MIB, GIB])
def test_bytes_that_are_rounded_up_are_enough_as_a_budget(share: float, unit: int):
    bytes_ = int(share * unit)
    assert bytes_ <= parse_bytes(format_bytes_up(bytes_)) <= 1.1 * bytes_


@pytest.mark.parametrize(("seconds", "text"), [(1.239, "1.24 s"), (0.014, "14.0 ms"), (8e-7, "0.8 µs")])
def test_seconds_are_shown_with_a_fitting_unit(seconds: float, text: str):
    assert format_seconds(seconds) == text


def test_shares_are_signed():
    assert format_share(0.031) == "+3.1%"
    assert format_share(-0.2) == "-20.0%"
