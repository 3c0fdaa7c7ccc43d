"""The pinned link on a real device: bytes, races, host memory and overlap."""

from __future__ import annotations

import random

import pytest
import torch

from plimsoll.engine.offload.device_links import BounceLink, PinnedLink
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.engine.offload.measure import measure_link
from plimsoll.errors import OffloadFailed
from plimsoll.units import GIB, MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")


def numbered(step: int, length: int) -> torch.Tensor:
    return torch.arange(step, step + length, dtype=torch.int32, device=CUDA)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("length", [0, 1, 100_003])
def test_a_tensor_comes_back_bit_for_bit(dtype: torch.dtype, length: int):
    tensor = torch.randint(0, 2, (length,), device=CUDA).to(dtype)
    with PinnedLink(CUDA) as link:
        ticket = link.store(tensor)
        ticket.settle()
        ticket.prefetch()
        assert torch.equal(ticket.read().view(torch.uint8), tensor.view(torch.uint8))


def test_a_thousand_steps_with_changing_shapes_bring_every_byte_back():
    draw = random.Random(0)
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    with PinnedLink(CUDA, most_bytes=GIB) as link:
        for step in range(1000):
            lengths = [draw.randrange(1, 400_000) for _ in range(draw.randrange(1, 8))]
            tickets = []
            for index, length in enumerate(lengths):
                tickets.append(link.store(numbered(step + index, length)))
                if index:
                    tickets[index - 1].settle()
                torch.full((length,), -1, dtype=torch.int32, device=CUDA)  # takes memory that was just let go
            for index in reversed(range(len(lengths))):
                if index:
                    tickets[index - 1].prefetch()
                if draw.random() < 0.9:
                    wrong += (tickets[index].read() != numbered(step + index, lengths[index])).sum()
                tickets.pop()
        assert wrong.item() == 0
        assert link.taken_bytes <= GIB


def test_settling_frees_device_memory_at_once():
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    with PinnedLink(CUDA) as link:
        ticket = link.store(torch.zeros(64 * MIB, dtype=torch.uint8, device=CUDA))
        assert torch.cuda.memory_allocated() - before_bytes == 64 * MIB
        ticket.settle()
        assert torch.cuda.memory_allocated() == before_bytes


def test_the_host_budget_is_what_the_host_allocator_takes():
    torch._C._host_emptyCache()
    before_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    with PinnedLink(CUDA, most_bytes=64 * MIB) as link:
        tickets = [link.store(torch.zeros(17 * MIB, dtype=torch.uint8, device=CUDA)) for _ in range(2)]
        taken_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before_bytes
        assert link.taken_bytes == taken_bytes == 64 * MIB
        with pytest.raises(OffloadFailed):
            link.store(torch.zeros(1, dtype=torch.uint8, device=CUDA))
        del tickets
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before_bytes


def test_copies_overlap_with_kernels():
    """Together they take less than nine tenths of what they take one after the other."""
    matrix = torch.randn(4096, 4096, device=CUDA)
    tensor = torch.zeros(256 * MIB, dtype=torch.uint8, device=CUDA)

    def compute() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix)

    with PinnedLink(CUDA) as link:

        def seconds(is_copying: bool, is_computing: bool) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            ticket = link.store(tensor) if is_copying else None
            if is_computing:
                compute()
            if ticket is not None:
                ticket.settle()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1e3

        seconds(True, True)
        copying, computing, both = (min(seconds(*what) for _ in range(5)) for what in ((1, 0), (0, 1), (1, 1)))
    assert both < 0.9 * (copying + computing)


def test_a_measured_link_is_faster_than_pageable_memory_ever_is():
    with PinnedLink(CUDA) as link:
        speed = measure_link(link, CUDA, nbytes=64 * MIB)
    assert speed.out_bytes_per_second > 2e9
    assert speed.in_bytes_per_second > 2e9


def test_device_tensors_reach_the_disk_through_the_host(tmp_path: object):
    with BounceLink(DiskLink(str(tmp_path)), CUDA) as link:
        ticket = link.store(numbered(0, 100_000))
        ticket.settle()
        tensor = ticket.read()
    assert tensor.device.type == "cuda"
    assert torch.equal(tensor, numbered(0, 100_000))
