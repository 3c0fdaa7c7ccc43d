"""What lies under the disk link: extents that never overlap and come together again, directories in RAM told from disks,
and checksums by samples."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.engine.offload.copying import checksum
from plimsoll.engine.offload.disk_file import ALIGNMENT_BYTES, Extent, Extents, is_in_memory
from plimsoll.units import MIB


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


def mounts_of(directory: Path, kind: str) -> str:
    device = os.stat(directory).st_dev
    return (
        "1 0 0:999 / /elsewhere rw - tmpfs tmpfs rw\n"
        f"2 0 {os.major(device)}:{os.minor(device)} / /here rw shared:1 master:2 - {kind} source rw\n"
    )


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("ramfs", True), ("ext4", False), ("overlay", False)])
def test_the_type_of_the_directorys_own_device_decides(tmp_path: Path, kind: str, expected: bool):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(mounts_of(tmp_path, kind))
    assert is_in_memory(str(tmp_path), mounts) is expected


def test_a_system_that_does_not_say_is_believed_to_have_a_disk(tmp_path: Path):
    assert not is_in_memory(str(tmp_path), tmp_path / "missing")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no shared memory mount")
def test_shared_memory_is_in_memory():
    assert is_in_memory("/dev/shm")


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
