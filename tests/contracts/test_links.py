"""Links on a device: bytes, races between copies and kernels, host memory and overlap."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from contracts.harness import Block, Stack, batch, hidden_share, manage, weigh
from plimsoll.artifacts.plan import LINK_NAMES
from plimsoll.engine.offload.device_links import PinnedLink
from plimsoll.engine.offload.measure import measure_link
from plimsoll.engine.offload.open import open_link
from plimsoll.engine.offload.protocol import Link
from plimsoll.errors import OffloadFailed
from plimsoll.units import GIB, MIB

LENGTHS = (3, 17)


@pytest.fixture(params=LINK_NAMES)
def link(request: pytest.FixtureRequest, device: torch.device, tmp_path: object) -> Iterator[Link]:
    if (request.param, device.type) == ("host", "cpu"):
        pytest.skip("tensors of a CPU are in host memory already")
    with open_link(request.param, device, host_budget=GIB, directory=str(tmp_path)) as opened:
        yield opened


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type == "cpu":
        pytest.skip("about memory and streams of a GPU")
    return device


def steps_on(device: torch.device) -> int:
    """A thousand where copies and kernels run side by side."""
    return 1000 if device.type == "cuda" else 20


def numbered(step: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(step, step + length, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("length", [0, 1, 100_003])
def test_a_tensor_comes_back_bit_for_bit(link: Link, device: torch.device, dtype: torch.dtype, length: int):
    tensor = torch.randint(0, 2, (length,), device=device).to(dtype)
    ticket = link.store(tensor)
    ticket.settle()
    ticket.prefetch()
    back = ticket.read()
    assert back.device.type == device.type
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_every_byte_comes_back_while_shapes_change(link: Link, device: torch.device):
    draw = random.Random(0)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(steps_on(device)):
        lengths = [draw.randrange(1, 100_000) for _ in range(draw.randrange(1, 8))]
        tickets = []
        for index, length in enumerate(lengths):
            tickets.append(link.store(numbered(step + index, length, device)))
            if index:
                tickets[index - 1].settle()
            torch.full((length,), -1, dtype=torch.int32, device=device)  # takes memory that was just let go
        for index in reversed(range(len(lengths))):
            if index:
                tickets[index - 1].prefetch()
            if draw.random() < 0.9:
                wrong += (tickets[index].read() != numbered(step + index, lengths[index], device)).sum()
            tickets.pop()
    assert wrong.item() == 0


def test_gradients_are_right_in_every_step_while_shapes_change(link: Link, device: torch.device):
    """Recomputed, packed and offloaded at once; nothing waits for the device before the last step."""
    draw = random.Random(0)
    torch.manual_seed(0)
    model = Stack(*(Block(nn.ReLU()) for _ in range(2))).to(device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def gradients(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(weigh(model(x)), tuple(model.parameters()))

    batches = [batch(number, length, 8, device=device) for number, length in enumerate(LENGTHS)]
    expected = [gradients(x) for x in batches]
    with manage(model, packs={"up": link.name, "relu": "zeros"}, link=link) as handle:
        for _ in range(steps_on(device)):
            chosen = draw.randrange(len(batches))
            for got, want in zip(gradients(batches[chosen]), expected[chosen], strict=True):
                wrong += (got != want).sum()
        outcomes = handle.outcomes()
    assert wrong.item() == 0
    assert all(outcome.dropped_bytes > 0 for outcome in outcomes)


def test_settling_frees_device_memory_at_once(gpu: torch.device):
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    with PinnedLink(gpu) as link:
        ticket = link.store(torch.zeros(64 * MIB, dtype=torch.uint8, device=gpu))
        assert torch.cuda.memory_allocated() - before_bytes == 64 * MIB
        ticket.settle()
        assert torch.cuda.memory_allocated() == before_bytes


def test_the_host_budget_is_what_the_host_allocator_takes(gpu: torch.device):
    torch._C._host_emptyCache()
    before_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    with PinnedLink(gpu, most_bytes=64 * MIB) as link:
        tickets = [link.store(torch.zeros(17 * MIB, dtype=torch.uint8, device=gpu)) for _ in range(2)]
        taken_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before_bytes
        assert link.taken_bytes == taken_bytes == 64 * MIB
        with pytest.raises(OffloadFailed):
            link.store(torch.zeros(1, dtype=torch.uint8, device=gpu))
        del tickets
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before_bytes


def test_copies_overlap_with_kernels(gpu: torch.device):
    """Half of the shorter work is hidden behind the longer one, at least. Products are as many as take as long as the copy.

    With another number, the sum of both could be less than a tenth above the longer one: on a link of 50 GB/s twenty products
    take ten times as long as the copy, and hiding all of it saves a twelfth.
    """
    matrix = torch.randn(4096, 4096, device=gpu)
    tensor = torch.zeros(256 * MIB, dtype=torch.uint8, device=gpu)

    with PinnedLink(gpu) as link:

        def seconds(copies: int, products: int) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            tickets = [link.store(tensor) for _ in range(copies)]
            for _ in range(products):
                torch.mm(matrix, matrix)
            for ticket in tickets:
                ticket.settle()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1e3

        seconds(1, 1)  # pins the host memory that the other runs use again
        copying = min(seconds(1, 0) for _ in range(5))
        products = max(1, round(copying / min(seconds(0, 1) for _ in range(5))))
        computing, both = (min(seconds(*what) for _ in range(5)) for what in ((0, products), (1, products)))
    assert hidden_share(copying, computing, both) > 0.5


def test_a_measured_link_is_faster_than_pageable_memory_ever_is(gpu: torch.device):
    with PinnedLink(gpu) as link:
        speed = measure_link(link, gpu, nbytes=64 * MIB)
    assert speed.out_bytes_per_second > 2e9
    assert speed.in_bytes_per_second > 2e9
