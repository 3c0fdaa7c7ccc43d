"""What every link promises, asked of every link that runs without a GPU."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from plimsoll.engine.offload.protocol import Link
from plimsoll.errors import OffloadFailed

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


def noise(dtype: torch.dtype, length: int) -> torch.Tensor:
    """Every bit pattern, NaNs and denormals too; only bools must stay 0 or 1."""
    if dtype is torch.bool:
        return torch.randint(0, 2, (length,)).bool()
    return torch.randint(0, 256, (length * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 1023, 300_001])
def test_a_tensor_comes_back_bit_for_bit(link: Link, dtype: torch.dtype, length: int):
    tensor = noise(dtype, length)
    ticket = link.store(tensor)
    ticket.settle()
    ticket.prefetch()
    assert same_bits(ticket.read(), tensor)


def test_a_view_into_a_larger_tensor_comes_back_alone(link: Link):
    whole = torch.arange(1000)
    assert torch.equal(link.store(whole[100:300]).read(), whole[100:300])


def test_a_lazily_conjugated_tensor_comes_back_conjugated(link: Link):
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(link.store(tensor).read(), tensor)


def test_what_comes_back_shares_memory_neither_with_the_source_nor_with_another_reading(link: Link):
    tensor = torch.arange(100)
    ticket = link.store(tensor)
    ticket.settle()
    tensor.zero_()
    first, second = ticket.read(), ticket.read()
    first.zero_()
    assert torch.equal(second, torch.arange(100))


@pytest.mark.parametrize("ends", ["settle", "prefetch"])
def test_settling_and_prefetching_let_go_of_the_source_in_the_thread_that_does(link: Link, ends: str):
    tensor = torch.arange(1000)
    alive = weakref.ref(tensor)
    ticket = link.store(tensor)
    del tensor
    assert alive() is not None
    getattr(ticket, ends)()
    assert alive() is None


def test_every_call_may_be_repeated(link: Link):
    ticket = link.store(torch.arange(10))
    for call in (ticket.settle, ticket.settle, ticket.prefetch, ticket.prefetch):
        call()
    assert torch.equal(ticket.read(), torch.arange(10))
    ticket.settle()


def test_a_ticket_holds_nothing_after_it_was_read_and_reads_again(link: Link):
    ticket = link.store(torch.arange(10))
    first = ticket.read()
    alive = weakref.ref(first)
    kept = first.clone()
    del first
    assert alive() is None
    assert torch.equal(ticket.read(), kept)


def test_a_closed_link_has_ended_what_was_under_way_takes_nothing_and_says_so(link: Link):
    ticket = link.store(torch.arange(1000))
    link.close()
    link.close()
    ticket.settle()
    with pytest.raises(OffloadFailed) as failure:
        link.store(torch.arange(3))
    assert "closed" in failure.value.found


def test_dropped_tickets_leave_no_cycles_behind(link: Link):
    gc.collect()
    gc.disable()
    try:
        ticket = link.store(torch.arange(10))
        ticket.read()
        alive = weakref.ref(ticket)
        del ticket
        assert alive() is None
    finally:
        gc.enable()
