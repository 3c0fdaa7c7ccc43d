"""The pinned link against a device that runs late and in any order that its events allow, and the link that bounces."""

from __future__ import annotations

import weakref

import pytest
import torch

from engine.offload.fake_device import FakeDevice, FakeStream, Program, SleepyDevice
from engine.offload.simulated import SimulatedLink
from plimsoll.engine.offload.device_links import PinnedLink
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.engine.offload.open import BounceLink
from plimsoll.engine.offload.pinned_memory import SMALLEST_BYTES, rounded_up
from plimsoll.errors import OffloadFailed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KIB = 1024


def linked(device: FakeDevice, most_bytes: int | None = None) -> PinnedLink:
    return PinnedLink(CUDA, most_bytes, calls=device)


def random_program(device: FakeDevice, most_bytes: int | None = None, steps: int = 120) -> int:
    """Stores, settles, prefetches, reads and drops in a random order on two streams; how many kernels saw wrong bytes."""
    random, program, streams = device.random, Program(device), (device.program, FakeStream(device, "other"))
    link = linked(device, most_bytes)
    tickets: list = []
    for step in range(steps):
        device.program = random.choice(streams)
        expected = torch.full((random.choice((0, 1, 100, 128, 300)),), step, dtype=torch.int16)
        choice = random.choice(("store", "store", "settle", "prefetch", "read", "drop"))
        if choice == "store" or not tickets:
            if len(tickets) > 8:
                del tickets[0]
            tensor = program.make(expected)
            tickets.append((link.store(tensor), expected))
            del tensor
            program.make(expected + 1)  # scribbles over whatever was just freed
        elif choice == "drop":
            del tickets[random.randrange(len(tickets))]
        else:
            ticket, expected = random.choice(tickets)
            result = getattr(ticket, choice)()
            if choice == "read":
                program.use(result, expected)
            del ticket, result
            program.make(expected + 1)
    link.close()
    device.finish()
    return program.mistakes


@pytest.mark.parametrize("seed", range(30))
def test_every_order_that_a_device_may_choose_brings_the_right_bytes(seed: int):
    assert random_program(FakeDevice(seed)) == 0


@pytest.mark.parametrize("seed", range(10))
def test_the_same_under_a_budget_that_makes_buffers_wait_and_change_size(seed: int):
    device = FakeDevice(seed)
    assert random_program(device, most_bytes=9 * KIB) == 0
    assert device.pinned_bytes == 0


def test_a_device_that_ignores_events_is_caught_by_these_programs():
    mistakes = [random_program(FakeDevice(seed, keeps_order=False)) for seed in range(10)]
    assert sum(mistakes) > 0


def test_copies_wait_for_the_source_and_for_each_other():
    device = SleepyDevice()
    ticket = linked(device).store(device.empty(10, torch.int64))
    assert device.calls == ["program records", "out waits for program", "out copies", "out records"]
    device.calls.clear()
    ticket.settle()
    assert device.calls == ["program waits for out"]
    device.calls.clear()
    ticket.prefetch()
    assert device.calls == ["program records", "in waits for program", "in waits for out", "in copies", "in records"]
    device.calls.clear()
    ticket.read()
    assert device.calls == ["program waits for in"]


def test_settling_what_has_left_waits_for_nothing_and_frees_the_source():
    device = FakeDevice()
    source = device.empty(10, torch.int64)
    alive = weakref.ref(source)
    ticket = linked(device).store(source)
    del source
    device.finish()
    device.calls.clear()
    ticket.settle()
    assert device.calls == []
    assert alive() is None


def test_the_host_never_waits():
    device = SleepyDevice()
    link = linked(device)
    ticket = link.store(device.empty(10, torch.int64))
    ticket.settle()
    ticket.prefetch()
    ticket.read()
    assert all(stream.done == 0 for stream in device.streams)


def test_a_tensor_read_on_another_stream_is_known_there():
    device = FakeDevice()
    program = Program(device)
    expected = torch.arange(50)
    ticket = linked(device).store(program.make(expected))
    ticket.prefetch()
    device.program = FakeStream(device, "backward")
    tensor = ticket.read()
    assert "used on backward" in device.calls
    program.use(tensor, expected)
    device.finish()
    assert program.mistakes == 0


def test_a_ticket_dropped_under_way_holds_its_memory_until_the_copy_has_ended():
    device = SleepyDevice()
    link = linked(device)
    dropped = link.store(device.empty(1000, torch.uint8))
    del dropped
    other = link.store(device.empty(10, torch.uint8))
    assert device.live_bytes == 1010
    device.finish()
    other.settle()
    assert device.live_bytes == 0


def test_a_buffer_is_used_again_only_after_its_copy_has_ended():
    device = SleepyDevice()
    link = linked(device)
    link.store(device.empty(1000, torch.uint8))
    link.store(device.empty(1000, torch.uint8))
    assert link.taken_bytes == 2 * KIB
    device.finish()
    link.store(device.empty(1000, torch.uint8))
    assert link.taken_bytes == 2 * KIB


def test_the_budget_counts_what_is_really_pinned():
    device = FakeDevice()
    link = linked(device, most_bytes=4 * KIB)
    tickets = [link.store(device.empty(1025, torch.uint8)) for _ in range(2)]
    assert link.taken_bytes == device.pinned_bytes == 4 * KIB
    with pytest.raises(OffloadFailed) as failure:
        link.store(device.empty(1, torch.uint8))
    assert "512 B" in failure.value.found
    assert "4.0 KiB" in failure.value.found
    assert "4.0 KiB" in failure.value.why
    del tickets[0]
    link.store(device.empty(2000, torch.uint8))


def test_idle_buffers_of_other_sizes_make_room():
    device = FakeDevice()
    link = linked(device, most_bytes=4 * KIB)
    tickets = [link.store(device.empty(2 * KIB, torch.uint8)) for _ in range(2)]
    tickets.clear()
    large = link.store(device.empty(4 * KIB, torch.uint8))
    assert link.taken_bytes == device.pinned_bytes == 4 * KIB
    del large


def test_a_refused_tensor_leaves_the_pool_as_it_was():
    device = FakeDevice()
    link = linked(device, most_bytes=2 * KIB)
    kept = link.store(device.empty(KIB, torch.uint8))
    with pytest.raises(OffloadFailed):
        link.store(device.empty(8 * KIB, torch.uint8))
    assert link.taken_bytes == KIB
    assert kept.read().numel() == KIB


def test_a_closed_link_holds_nothing_and_its_tickets_say_so():
    device = FakeDevice()
    link = linked(device)
    fetched, away = (link.store(device.empty(100, torch.uint8)) for _ in range(2))
    fetched.prefetch()
    link.close()
    link.close()
    assert link.taken_bytes == device.pinned_bytes == 0
    assert fetched.read().numel() == 100
    for attempt in (away.read, fetched.read, lambda: link.store(device.empty(1, torch.uint8))):
        with pytest.raises(OffloadFailed):
            attempt()
    away.settle()
    away.prefetch()


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(0, 0), (1, SMALLEST_BYTES), (512, 512), (513, KIB), (KIB, KIB), (KIB + 1, 2 * KIB)]
)
def test_pinned_sizes_are_powers_of_two(nbytes: int, expected: int):
    assert rounded_up(nbytes) == expected


# The CPU plays the device from here on: what bounces is already in ordinary memory.


def test_bounced_tensors_come_back_and_the_source_is_let_go_when_settled(disk: DiskLink):
    link = BounceLink(disk, CPU)
    source = torch.arange(1000)
    ticket = link.store(source)
    source.add_(1)  # the host copy was made already
    ticket.settle()
    ticket.prefetch()
    assert torch.equal(ticket.read(), torch.arange(1000))
    assert torch.equal(ticket.read(), torch.arange(1000))


def test_a_bounce_link_goes_by_the_name_of_the_link_behind_it_and_closes_it(disk: DiskLink):
    with BounceLink(disk, CPU) as link:
        assert link.name == "disk"
    with pytest.raises(OffloadFailed):
        disk.store(torch.arange(3))


def test_host_copies_on_their_way_out_are_bounded():
    inner = SimulatedLink()
    link = BounceLink(inner, CPU, most_waiting_bytes=1000)
    tickets = [link.store(torch.zeros(400, dtype=torch.uint8)) for _ in range(10)]
    assert link.waiting_bytes == 800
    assert sum(ticket._inner._source is not None for ticket in tickets) == 2
    link.store(torch.zeros(5000, dtype=torch.uint8))
    assert link.waiting_bytes == 5000


def test_a_failure_on_the_way_out_of_a_bounce_reaches_its_own_ticket_and_keeps_the_source():
    link = BounceLink(SimulatedLink(fail_settle={0}), CPU, most_waiting_bytes=10)
    source = torch.arange(100)
    failing = link.store(source)
    other = link.store(torch.arange(3))
    other.settle()
    with pytest.raises(OffloadFailed):
        failing.settle()
    assert failing.read() is source
