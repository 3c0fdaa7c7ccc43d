"""What compiled blocks save is packed and comes back as it was. Nothing is compiled here: hooks see any function alike."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine.offload.simulated import SimulatedLink
from plimsoll.engine.compiled.units import PackingCall
from plimsoll.engine.offload.transfers import TransfersUnderWay
from plimsoll.engine.stored_forms import Packer, Taking
from plimsoll.errors import OffloadFailed, SavedTensorModified

pytestmark = pytest.mark.usefixtures("without_the_collector")


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Saves the first, then the second."""
    return y * x


def packing(transfers: TransfersUnderWay, link: SimulatedLink, forms: tuple[str, ...] = ("simulated",)) -> PackingCall:
    taking = [Taking("value", form) for form in forms]
    return PackingCall(product, "block", taking, Packer(link), transfers)


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*size, requires_grad=True)


def test_what_goes_over_the_link_is_free_once_the_next_block_returns_and_comes_back_as_it_lay() -> None:
    transfers, link = TransfersUnderWay(), SimulatedLink()
    block, after = packing(transfers, link), packing(transfers, link, ())
    whole, other, last = leaf(6, 8), leaf(4, 3), leaf(4, 3)
    made = whole + 1
    storage = StorageWeakRef(made.untyped_storage())
    output = block(made.t()[2:6, ::2], other)
    del made
    assert not storage.expired()
    output = after(output, last)
    assert storage.expired()
    assert link.resident_bytes == whole.nbytes
    output.sum().backward()
    del output
    assert link.resident_bytes == 0
    assert other.grad is not None
    assert torch.equal(other.grad, last.detach() * (whole.detach() + 1).t()[2:6, ::2])


def test_backward_may_come_twice() -> None:
    block = packing(TransfersUnderWay(), SimulatedLink())
    x, y = leaf(5), leaf(5)
    output = block(x, y).sum()
    output.backward(retain_graph=True)
    output.backward()
    assert y.grad is not None
    assert torch.equal(y.grad, 2 * x.detach())


@pytest.mark.parametrize("written", [0, 1], ids=["packed", "kept"])
def test_a_write_to_what_was_saved_is_found_as_without_a_plan(written: int) -> None:
    block = packing(TransfersUnderWay(), SimulatedLink())
    given = [leaf(5) * 1, leaf(5) * 1]
    output = block(*given)
    with torch.no_grad():
        given[written] += 1
    with pytest.raises(SavedTensorModified):
        output.sum().backward()


def test_an_output_that_is_saved_and_kept_goes_with_its_graph() -> None:
    block = PackingCall(lambda x, _: x.exp(), "block", (), Packer(None), TransfersUnderWay())
    packed = PackingCall(
        lambda x, y: (x * y).exp(),
        "block",
        [Taking("value", "simulated")],
        Packer(SimulatedLink()),
        TransfersUnderWay(),
    )
    for call in (block, packed):
        output = call(leaf(5), leaf(5))
        storage = StorageWeakRef(output.untyped_storage())
        del output
        assert storage.expired()


def test_nothing_is_packed_where_nothing_is_saved_and_a_full_link_says_so() -> None:
    link = SimulatedLink(fail_store=(0,))
    block = packing(TransfersUnderWay(), link)
    with torch.no_grad():
        block(leaf(5), leaf(5))
    with pytest.raises(OffloadFailed):
        block(leaf(5), leaf(5))


def test_what_a_codec_cannot_take_is_held_as_it_is_and_counted() -> None:
    block = PackingCall(
        product, "block", [Taking("value", "bits"), Taking("mask", "bits")], Packer(None), TransfersUnderWay()
    )
    x, y = leaf(8192), (torch.rand(8192) < 0.5).float()
    y.requires_grad_()
    block(x, y).sum().backward()
    assert block.refused == {("value", "bits"): 1}
    assert y.grad is not None
    assert torch.equal(y.grad, x.detach())
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
