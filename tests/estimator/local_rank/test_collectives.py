"""Stand-ins for collectives: shapes, gradients, memory, and what a trace says of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from plimsoll.errors import InvalidLayout
from plimsoll.estimator.local_rank import collectives
from plimsoll.estimator.local_rank.vocabulary import VocabularyLoss
from plimsoll.tracing.recorder.opkey import op_spec


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (torch.ops.plimsoll.all_gather.default, (1, 4, "tp")),
        (torch.ops.plimsoll.reduce_scatter.default, (1, 4, "tp")),
        (torch.ops.plimsoll.all_to_all.default, (4, "ep")),
        (torch.ops.plimsoll.all_reduce_.default, (4, "tp")),
    ],
    ids=str,
)
def test_fake_and_real_forms_agree(op: torch._ops.OpOverload, arguments: tuple):
    x = torch.randn(2, 8, 3).transpose(0, 2)
    real = op(x.clone(), *arguments)
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(x), *arguments)
    if real is None:
        assert fake is None
    else:
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_gathering_and_scattering_are_each_others_gradient():
    x = torch.randn(2, 4, 3, requires_grad=True)
    gathered = collectives.all_gather(x, 1, 4, "tp")
    assert gathered.shape == (2, 16, 3)
    (to_x,) = torch.autograd.grad(gathered, x, torch.arange(96.0).view(2, 16, 3))
    assert torch.equal(to_x, torch.arange(96.0).view(2, 16, 3)[:, :4])
    scattered = collectives.reduce_scatter(x, 1, 4, "tp")
    assert scattered.shape == (2, 1, 3)
    (to_x,) = torch.autograd.grad(scattered, x, torch.ones(2, 1, 3))
    assert to_x.shape == x.shape


@pytest.mark.parametrize(("move", "positions"), [(collectives.unsplit, 8), (collectives.split, 2)])
def test_whole_gradients_are_split_and_not_sent(move, positions: int):
    x = torch.randn(2, 4, 3, requires_grad=True)
    moved = move(x, 1, 2, "tp")
    assert moved.shape == (2, positions, 3)
    (to_x,) = torch.autograd.grad(moved, x, torch.ones(2, positions, 3))
    assert to_x.shape == x.shape


def test_entering_and_leaving_take_no_memory():
    x = torch.randn(2, 4, requires_grad=True)
    product = x * 2
    entered = collectives.enter(product, 4, "tp")
    left = collectives.leave(entered * 1, 4, "tp")
    assert entered.untyped_storage()._cdata == product.untyped_storage()._cdata
    (to_x,) = torch.autograd.grad(left, x, torch.ones(2, 4))
    assert torch.equal(to_x, torch.full((2, 4), 2.0))


@pytest.mark.parametrize(
    ("op", "arguments", "whole_bytes"),
    [
        (torch.ops.plimsoll.all_gather.default, (1, 4, "tp"), 4 * 96),
        (torch.ops.plimsoll.reduce_scatter.default, (1, 4, "tp"), 96),
        (torch.ops.plimsoll.all_to_all.default, (4, "ep"), 96),
        (torch.ops.plimsoll.all_reduce_.default, (4, "cp"), 96),
    ],
    ids=str,
)
def test_specs_say_the_group_and_the_whole_tensors_size(op: torch._ops.OpOverload, arguments: tuple, whole_bytes: int):
    x = torch.randn(2, 4, 3)
    spec = op_spec(op, (x, *arguments), {}, op(x, *arguments))
    assert (spec.group, spec.moved_bytes, spec.flops) == (arguments[-1], whole_bytes, 0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_divided_loss_over_all_words_is_cross_entropy(reduction: str):
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 8, -100, 3, 3, 7])
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    expected = F.cross_entropy(logits, targets, reduction=reduction)
    with VocabularyLoss(9, 1):
        found = F.cross_entropy(logits, targets, reduction=reduction)
    torch.testing.assert_close(found, expected)
    way = weights if reduction == "none" else torch.tensor(1.0, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits, way)[0] for loss in (found, expected)))


def test_targets_of_other_ranks_take_part_through_the_reductions_only():
    logits = torch.randn(3, 4, requires_grad=True)
    with VocabularyLoss(4, 2):
        losses = F.cross_entropy(logits, torch.tensor([1, 5, 7]), reduction="none")
    assert losses[0] > 0
    assert torch.equal(losses[1:], torch.zeros(2))
    (to_logits,) = torch.autograd.grad(losses.sum(), logits)
    torch.testing.assert_close(to_logits[1:], logits[1:].softmax(1))


def test_losses_over_other_classes_stay_as_they_are():
    logits, targets = torch.randn(3, 5), torch.tensor([0, 1, 4])
    with VocabularyLoss(4, 2):
        found = F.cross_entropy(logits, targets, label_smoothing=0.1)
    assert torch.equal(found, F.cross_entropy(logits, targets, label_smoothing=0.1))


def test_a_smoothed_loss_over_divided_logits_is_refused():
    with VocabularyLoss(4, 2), pytest.raises(InvalidLayout, match="does not support weight= or label_smoothing="):
        F.cross_entropy(torch.randn(3, 4), torch.tensor([0, 1, 7]), label_smoothing=0.1)


def test_under_autocast_the_divided_loss_computes_in_float32_too():
    logits = torch.randn(3, 4, dtype=torch.bfloat16)
    targets = torch.tensor([0, 1, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16), VocabularyLoss(4, 1):
        assert F.cross_entropy(logits, targets).dtype is torch.float32
    with VocabularyLoss(4, 1):
        assert F.cross_entropy(logits, targets).dtype is torch.bfloat16
