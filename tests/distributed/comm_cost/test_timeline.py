"""Two lanes, reckoned by hand: what is hidden, what is not, and how they slow each other down."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.distributed.comm_cost.forecast import BucketWork, Sharing, run_step

seconds = st.floats(min_value=0, max_value=10)
works = st.lists(
    st.builds(
        BucketWork,
        compute_seconds=seconds,
        local_seconds=st.tuples(seconds, seconds),
        transfer_seconds=st.tuples(seconds),
    ),
    min_size=1,
    max_size=6,
)


def transfer_only(compute: float, transfer: float) -> BucketWork:
    return BucketWork(compute, (0.0, 0.0), (transfer,))


def test_a_transfer_hides_behind_the_computing_that_follows_and_transfers_wait_for_each_other():
    timeline = run_step([transfer_only(2.0, 1.0), transfer_only(2.0, 1.0)], 0.0)
    assert (timeline.step_seconds, timeline.exposed_seconds) == (5.0, 1.0)
    assert run_step([transfer_only(1.0, 5.0), transfer_only(1.0, 5.0)], 0.0).step_seconds == 11.0


@pytest.mark.parametrize(("sharing", "seconds"), [(Sharing(), 7.5), (Sharing(processor=1.0), 6.5)])
def test_encoding_shares_the_processor_with_backward_unless_it_has_its_own(sharing: Sharing, seconds: float):
    # Bucket 0 is full at 2; its second of encoding takes two, as does backward's first second beside it.
    # 4-5: a transfer beside backward's last second; 5-6 encoding, 6-7 transfer, 7-7.5 decoding.
    buckets = [BucketWork(2.0, (1.0, 0.0), (1.0,)), BucketWork(2.0, (1.0, 0.5), (1.0,))]
    assert run_step(buckets, 0.0, sharing).step_seconds == pytest.approx(seconds)


def test_a_transfer_that_takes_half_of_the_processor_makes_both_last_twice_as_long():
    # 2-4: the transfer of bucket 0 beside the first of backward's two remaining seconds, both at half speed.
    # 4-5 backward alone, then bucket 1's transfer beside the tail: 5-7.
    timeline = run_step([transfer_only(2.0, 1.0), transfer_only(2.0, 1.0)], 1.0, Sharing(compute=0.5, transfer=0.5))
    assert timeline.step_seconds == pytest.approx(7.0)


@settings(max_examples=50)
@given(works, seconds)
def test_a_step_is_no_shorter_than_its_computing_and_no_longer_than_everything_in_a_row(buckets, tail):
    timeline = run_step(buckets, tail)
    computing = sum(work.compute_seconds for work in buckets) + tail
    assert timeline.step_seconds >= computing - 1e-9
    assert timeline.step_seconds <= computing + timeline.transfer_seconds + timeline.local_seconds + 1e-9


@settings(max_examples=50)
@given(works, seconds, st.floats(min_value=0.1, max_value=1.0))
def test_slower_lanes_never_make_a_shorter_step(buckets, tail, share):
    free = run_step(buckets, tail, Sharing(processor=1.0)).step_seconds
    assert run_step(buckets, tail, Sharing(share, share, 0.5)).step_seconds >= free - 1e-9
