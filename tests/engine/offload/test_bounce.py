"""Tensors of a device over a link of ordinary memory; the CPU plays the device."""

from __future__ import annotations

import pytest
import torch

from plimsoll.engine.offload.device_links import BounceLink
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.engine.offload.simulated import SimulatedLink
from plimsoll.errors import OffloadFailed

CPU = torch.device("cpu")


def test_tensors_come_back_and_the_source_is_let_go_when_settled(disk: DiskLink):
    link = BounceLink(disk, CPU)
    source = torch.arange(1000)
    ticket = link.store(source)
    source.add_(1)  # the host copy was made already
    ticket.settle()
    ticket.prefetch()
    assert torch.equal(ticket.read(), torch.arange(1000))
    assert torch.equal(ticket.read(), torch.arange(1000))


def test_it_goes_by_the_name_of_the_link_behind_it_and_closes_it(disk: DiskLink):
    with BounceLink(disk, CPU) as link:
        assert link.name == "disk"
    with pytest.raises(OffloadFailed):
        disk.store(torch.arange(3))


def test_host_copies_on_their_way_out_are_bounded():
    inner = SimulatedLink(1e12)
    link = BounceLink(inner, CPU, most_waiting_bytes=1000)
    tickets = [link.store(torch.zeros(400, dtype=torch.uint8)) for _ in range(10)]
    assert link.waiting_bytes == 800
    assert sum(ticket._inner._source is not None for ticket in tickets) == 2
    link.store(torch.zeros(5000, dtype=torch.uint8))
    assert link.waiting_bytes == 5000


def test_a_failure_on_the_way_out_reaches_its_own_ticket_and_keeps_the_source():
    link = BounceLink(SimulatedLink(1e12, fail_settle={0}), CPU, most_waiting_bytes=10)
    source = torch.arange(100)
    failing = link.store(source)
    other = link.store(torch.arange(3))
    other.settle()
    with pytest.raises(OffloadFailed):
        failing.settle()
    assert failing.read() is source
