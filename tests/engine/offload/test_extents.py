"""The free list: nothing overlaps, nothing is lost, and everything comes together again."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.engine.offload.extents import ALIGNMENT_BYTES, Extent, Extents


def take(extents: Extents, nbytes: int) -> Extent:
    extent = extents.fit(nbytes)
    extents.take(extent)
    return extent


def assert_consistent(extents: Extents, taken: list[Extent]) -> None:
    """Taken extents and holes tile the file up to its end; holes never touch each other or the end."""
    holes = extents.holes
    tiles = sorted(
        [*((e.offset, e.end, "taken") for e in taken if e.size_bytes), *((h.offset, h.end, "hole") for h in holes)]
    )
    position = 0
    for start, end, _ in tiles:
        assert start == position < end
        position = end
    assert position == extents.end_bytes
    assert all(not (a[2] == b[2] == "hole") for a, b in itertools.pairwise(tiles))
    assert not tiles or tiles[-1][2] == "taken"
    assert extents.taken_bytes == sum(e.size_bytes for e in taken)


@given(st.lists(st.tuples(st.integers(0, 5 * ALIGNMENT_BYTES), st.floats(0, 1), st.booleans()), max_size=60))
def test_any_sequence_of_taking_and_giving_back_tiles_the_file(steps: list[tuple[int, float, bool]]):
    extents, taken = Extents(), []
    for nbytes, which, is_taking in steps:
        if is_taking or not taken:
            taken.append(take(extents, nbytes))
            assert nbytes <= taken[-1].size_bytes < nbytes + ALIGNMENT_BYTES
        else:
            extents.give_back(taken.pop(int(which * (len(taken) - 1))))
        assert_consistent(extents, taken)
    while taken:
        extents.give_back(taken.pop(len(taken) // 2))
        assert_consistent(extents, taken)
    assert (extents.end_bytes, extents.taken_bytes, extents.holes) == (0, 0, ())


def test_the_lowest_hole_that_is_large_enough_is_used_again():
    extents = Extents()
    first, second, third, _ = (take(extents, pages * ALIGNMENT_BYTES) for pages in (1, 3, 2, 1))
    extents.give_back(first)
    extents.give_back(third)
    assert extents.fit(2 * ALIGNMENT_BYTES) == third
    assert extents.fit(1).offset == 0
    extents.give_back(second)
    assert extents.holes == (Extent(0, 6 * ALIGNMENT_BYTES),)


def test_finding_a_place_takes_nothing():
    extents = Extents()
    extents.fit(10)
    assert extents.end_bytes == extents.taken_bytes == 0
