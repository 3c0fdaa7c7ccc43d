"""The simulated caching allocator against cases counted by hand, facts of torch's own tests, and a recorded run."""

from __future__ import annotations

import pytest

from plimsoll.estimator.allocator_sim.allocator import AllocatorSettings, CachingAllocator, DeviceFull
from plimsoll.estimator.allocator_sim.blocks import Block
from plimsoll.units import MIB

PLAIN, EXPANDABLE = AllocatorSettings(), AllocatorSettings(is_expandable=True)
BOTH = pytest.mark.parametrize("is_expandable", [False, True], ids=["segments", "expandable"])


def limited(mib: int, *, is_expandable: bool = False, max_split_mib: int | None = None) -> CachingAllocator:
    most = None if max_split_mib is None else max_split_mib * MIB
    return CachingAllocator(AllocatorSettings(limit_bytes=mib * MIB, max_split_bytes=most, is_expandable=is_expandable))


def get(allocator: CachingAllocator, *sizes_bytes: int, stream: int = 0) -> list[Block]:
    return [allocator.allocate(size, stream=stream) for size in sizes_bytes]


@pytest.mark.parametrize(("asked", "got"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
@BOTH
def test_blocks_are_multiples_of_512_bytes(asked: int, got: int, is_expandable: bool):
    allocator = CachingAllocator(EXPANDABLE if is_expandable else PLAIN)
    get(allocator, asked)
    assert allocator.allocated_bytes == got


@pytest.mark.parametrize(
    ("asked", "reserved_mib"), [(512, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)]
)
def test_segments_have_the_sizes_of_their_pools(asked: int, reserved_mib: int):
    allocator = CachingAllocator(PLAIN)
    get(allocator, asked)
    assert allocator.reserved_bytes == reserved_mib * MIB


def test_two_blocks_of_7_mib_share_a_segment_and_a_third_needs_another():
    # As in test_mempool_with_allocator of torch's test_cuda.py.
    allocator = CachingAllocator(PLAIN)
    get(allocator, 7 * MIB, 7 * MIB)
    assert allocator.segments == 1
    get(allocator, 7 * MIB)
    assert allocator.segments == 2
    assert allocator.inactive_split_bytes == (6 + 13) * MIB


def test_tensors_of_84_mib_take_what_they_ask_for():
    # As in test_allocator_settings: 21 * 1024 * 1024 floats.
    allocator = CachingAllocator(PLAIN)
    get(allocator, 4 * 21 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (84 * MIB, 84 * MIB)


def test_what_is_left_of_a_large_block_stays_with_it_up_to_one_mib():
    allocator = CachingAllocator(PLAIN)
    get(allocator, 11 * MIB)
    assert allocator.allocated_bytes == 12 * MIB
    allocator = CachingAllocator(PLAIN)
    get(allocator, 11 * MIB - 512)
    assert allocator.allocated_bytes == 11 * MIB - 512


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest():
    allocator = CachingAllocator(PLAIN)
    blocks = get(allocator, 30 * MIB, 14 * MIB, 20 * MIB, 14 * MIB)
    for block in blocks:
        allocator.release(block)
    (found,) = get(allocator, 13 * MIB)
    assert found.address == blocks[1].address
    (found,) = get(allocator, 14 * MIB)
    assert found.address == blocks[3].address


@BOTH
def test_neighbours_that_come_back_are_one_block_again(is_expandable: bool):
    allocator = CachingAllocator(EXPANDABLE if is_expandable else PLAIN)
    blocks = get(allocator, *[4 * MIB] * 5)
    for position in (0, 2, 4, 3, 1):
        allocator.release(blocks[position])
    reserved_bytes = allocator.reserved_bytes
    (whole,) = get(allocator, 20 * MIB)
    assert whole.address == blocks[0].address
    assert allocator.reserved_bytes == reserved_bytes == 20 * MIB


def test_streams_do_not_share_what_is_cached():
    allocator = CachingAllocator(PLAIN)
    (block,) = get(allocator, 5 * MIB, stream=0)
    allocator.release(block)
    (other,) = get(allocator, 5 * MIB, stream=1)
    assert other.address != block.address
    assert allocator.reserved_bytes == 40 * MIB


@BOTH
def test_three_blocks_of_40_mib_fill_120_mib_and_their_memory_serves_one_of_120(is_expandable: bool):
    # As in test_max_split_expandable, which mixes both kinds of segments.
    allocator = limited(120, is_expandable=is_expandable, max_split_mib=40)
    blocks = get(allocator, 40 * MIB, 40 * MIB, 40 * MIB)
    with pytest.raises(DeviceFull):
        get(allocator, 40 * MIB)
    for block in blocks:
        allocator.release(block)
    get(allocator, 120 * MIB)
    assert allocator.allocated_bytes == 120 * MIB
    assert allocator.reserved_bytes == 120 * MIB


def test_a_full_device_gives_back_what_is_wholly_free_and_no_pieces():
    allocator = limited(60)
    a, b, c = get(allocator, 8 * MIB, 8 * MIB, 20 * MIB)
    allocator.release(a)
    allocator.release(c)
    get(allocator, 36 * MIB)  # takes the place of c; the 12 MiB in pieces beside b stay
    assert (allocator.retries, allocator.reserved_bytes) == (1, 56 * MIB)
    assert allocator.inactive_split_bytes == 12 * MIB
    with pytest.raises(DeviceFull):
        get(allocator, 12 * MIB)
    allocator.release(b)
    allocator.give_back()
    assert allocator.reserved_bytes == 36 * MIB


def test_expandable_segments_serve_what_pieces_cannot():
    sizes = [8 * MIB] * 6
    plain, expandable = CachingAllocator(PLAIN), CachingAllocator(EXPANDABLE)
    for allocator in (plain, expandable):
        blocks = get(allocator, *sizes)
        for block in blocks:
            allocator.release(block)
        get(allocator, 45 * MIB)
    assert plain.reserved_bytes == (3 * 20 + 46) * MIB
    assert expandable.reserved_bytes == 60 * MIB
    assert expandable.segments == 1


def test_expandable_segments_unmap_whole_free_pages_and_map_them_elsewhere():
    allocator = limited(80, is_expandable=True)
    a, b, c = get(allocator, 30 * MIB, 10 * MIB, 40 * MIB)
    assert (allocator.reserved_bytes, allocator.device_allocations) == (80 * MIB, 2)
    allocator.release(a)
    (small,) = get(allocator, 512, stream=1)
    # Of a's 30 MiB only the first page of 20 MiB is whole; 2 MiB of it serve the other stream.
    assert (allocator.retries, allocator.reserved_bytes) == (1, 62 * MIB)
    (again,) = get(allocator, 10 * MIB)
    assert again.address == a.address + 20 * MIB
    with pytest.raises(DeviceFull):
        get(allocator, 20 * MIB)
    for block in (b, c, small, again):
        allocator.release(block)
    allocator.give_back()
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (0, 0)


def test_blocks_above_the_split_limit_serve_no_smaller_request():
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=64 * MIB))
    (block,) = get(allocator, 100 * MIB)
    allocator.release(block)
    get(allocator, 30 * MIB)
    assert allocator.reserved_bytes == 130 * MIB
    (close,) = get(allocator, 90 * MIB)
    assert (close.address, close.size) == (block.address, 100 * MIB)
    allocator.release(close)
    get(allocator, 70 * MIB)
    assert allocator.reserved_bytes == 200 * MIB


def test_oversize_blocks_are_given_back_one_by_one_before_all_else():
    allocator = limited(300, max_split_mib=64)
    small, first, second = get(allocator, 20 * MIB, 100 * MIB, 160 * MIB)
    for block in (small, first, second):
        allocator.release(block)
    get(allocator, 130 * MIB)
    assert allocator.retries == 0
    assert allocator.reserved_bytes == (20 + 100 + 130) * MIB


def test_segments_and_addresses_are_those_of_a_recorded_run():
    # Three calls of nn.Linear(10_000, 50_000), recorded on a GPU: shreyansh26/MLSys-Experiments, profile_grad.pkl.
    batch, output, workspace = 200_000_000, 1_000_000_000, 1_048_576
    allocator = CachingAllocator(PLAIN)

    def segments(size: int) -> tuple[Block, int]:
        before = allocator.reserved_bytes
        (block,) = get(allocator, size)
        return block, allocator.reserved_bytes - before

    assert segments(2_000_000_000)[1] == 2_000_683_008
    bias, asked = segments(200_000)
    assert asked == 2_097_152
    first = [segments(size) for size in (batch, output, workspace, 33_554_432)]
    assert [asked for _, asked in first] == [201_326_592, 1_000_341_504, 0, 33_554_432]
    assert first[2][0].address == bias.address + 0x30E00
    allocator.release(first[2][0])
    second = [segments(size) for size in (batch, output, workspace)]
    assert [asked for _, asked in second] == [201_326_592, 1_000_341_504, 0]
    assert second[2][0].address == bias.address + 0x30E00
    for block, _ in (second[2], first[0], first[1]):
        allocator.release(block)
    third = [segments(size) for size in (batch, output, workspace)]
    assert [asked for _, asked in third] == [0, 0, 0]
    assert [block.address for block, _ in third] == [first[0][0].address, first[1][0].address, bias.address + 0x30E00]
