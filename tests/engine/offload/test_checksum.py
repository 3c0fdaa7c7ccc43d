"""Samples: what they find, and that they are samples."""

from __future__ import annotations

import pytest

from plimsoll.engine.offload.checksum import checksum
from plimsoll.units import MIB


@pytest.mark.parametrize("size", [1, 512, 1024, 1025, 5000, 3 * MIB + 17])
@pytest.mark.parametrize("at", [0, -1])
def test_the_ends_are_looked_at(size: int, at: int):
    data = bytearray(size)
    before = checksum(memoryview(data))
    data[at] ^= 1
    assert checksum(memoryview(data)) != before


def test_a_lost_mebibyte_in_the_middle_is_found():
    data = bytearray(b"\x55" * (8 * MIB))
    before = checksum(memoryview(data))
    data[3 * MIB : 4 * MIB] = bytes(MIB)
    assert checksum(memoryview(data)) != before


def test_nothing_has_a_checksum_too():
    assert checksum(memoryview(b"")) == 0
