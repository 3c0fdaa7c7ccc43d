"""A simulated link keeps time by its own arithmetic, and fails when and where it was told to."""

from __future__ import annotations

import pytest
import torch

from plimsoll.engine.offload.simulated import SimulatedLink
from plimsoll.errors import OffloadFailed

MB = torch.zeros(10**6, dtype=torch.uint8)


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def slow(clock: Clock, latency_seconds: float = 0.0) -> SimulatedLink:
    return SimulatedLink(50e6, latency_seconds, clock=clock, sleep=clock.sleep)


def test_storing_returns_at_once_and_settling_waits_for_the_bytes(clock: Clock):
    ticket = slow(clock).store(MB)
    assert clock.now == 100.0
    ticket.settle()
    assert clock.now == pytest.approx(100.02)


def test_one_direction_carries_one_transfer_after_the_other(clock: Clock):
    link = slow(clock, latency_seconds=0.001)
    tickets = [link.store(MB) for _ in range(3)]
    tickets[2].settle()
    assert clock.now == pytest.approx(100.063)
    tickets[0].settle()
    assert clock.now == pytest.approx(100.063)


def test_prefetching_hides_the_way_back_behind_other_work(clock: Clock):
    ticket = slow(clock).store(MB)
    ticket.settle()
    ticket.prefetch()
    clock.sleep(0.5)
    ticket.read()
    assert clock.now == pytest.approx(100.52)


def test_the_two_directions_do_not_disturb_each_other(clock: Clock):
    link = slow(clock)
    first = link.store(MB)
    first.settle()
    second = link.store(MB)
    first.read()
    assert clock.now == pytest.approx(100.04)
    second.settle()
    assert clock.now == pytest.approx(100.04)


def test_reading_without_prefetching_pays_for_the_whole_way(clock: Clock):
    ticket = slow(clock, latency_seconds=0.003).store(MB)
    ticket.read()
    assert clock.now == pytest.approx(100.046)


def test_closing_waits_for_both_directions(clock: Clock):
    with slow(clock) as link:
        ticket = link.store(MB)
        link.store(MB)
        ticket.prefetch()
    assert clock.now == pytest.approx(100.04)


def test_a_full_link_raises_when_storing():
    link = SimulatedLink(1e12, fail_store={1})
    link.store(MB)
    with pytest.raises(OffloadFailed):
        link.store(MB)
    link.store(MB)


def test_a_tensor_that_was_lost_on_its_way_out_is_still_held():
    source = torch.arange(3)
    ticket = SimulatedLink(1e12, fail_settle={0}).store(source)
    for _ in range(2):
        with pytest.raises(OffloadFailed):
            ticket.settle()
    ticket.prefetch()
    assert ticket.read() is source


def test_a_load_that_fails_may_be_tried_again():
    ticket = SimulatedLink(1e12, fail_load=lambda index: index == 0).store(torch.arange(3))
    with pytest.raises(OffloadFailed):
        ticket.read()
    assert torch.equal(ticket.read(), torch.arange(3))


def test_the_link_knows_what_it_holds():
    link = SimulatedLink(1e12)
    tickets = [link.store(MB), link.store(MB)]
    assert link.resident_bytes == 2 * MB.nbytes
    del tickets[0]
    assert link.resident_bytes == MB.nbytes
