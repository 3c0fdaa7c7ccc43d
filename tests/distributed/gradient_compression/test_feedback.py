"""What is offered, what is sent and what stays, on one rank and without a process group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.distributed.gradient_compression.encoders import encoder_of
from plimsoll.distributed.gradient_compression.feedback import FeedbackOutcome, offer, settle, with_velocity
from plimsoll.distributed.gradient_compression.method import EXCLUDED, CompressionSettings, parse_method
from plimsoll.distributed.gradient_compression.slots import GradientPart, GradientSlot, make_slots
from plimsoll.distributed.gradient_compression.wire_bytes import Form
from plimsoll.errors import InvalidOption

FINE, VOID = torch.zeros(()), torch.ones(())


def slot_of(elements: int) -> GradientSlot:
    settings_ = CompressionSettings(method=parse_method("topk:10%"), exclude=(), min_elements=0, min_ratio=0)
    [slot] = make_slots(
        [GradientPart(name="w", shape=(elements,), dtype=torch.float32)], settings_, ranks=1, form="mean"
    )
    return slot


def reduce_alone(
    slot: GradientSlot, gradient: torch.Tensor, method: str, *, momentum: float = 0.0, void: torch.Tensor = FINE
) -> torch.Tensor:
    """One rank's reduction: the mean is what it sent itself."""
    encoder = encoder_of(parse_method(method))
    offered = offer(slot, gradient, momentum)
    rows = offered.values.view(1, -1)
    sent = encoder.decode(encoder.encode(rows, torch.float32), rows.shape[1], torch.float32).view(-1)
    slot.reductions += 1
    return settle(offered, FeedbackOutcome(mean=sent, sent=sent, kept={}), torch.maximum(void, offered.is_not_finite))


@settings(max_examples=20, deadline=None)
@given(elements=st.integers(1, 60), seed=st.integers(0, 2**31), share=st.sampled_from((1, 10, 40)))
def test_what_was_sent_and_what_stays_add_up_to_the_gradients_exactly(elements: int, seed: int, share: int):
    # Whole numbers, so that sums in float32 are exact in any order.
    generator, slot = torch.Generator().manual_seed(seed), slot_of(elements)
    given_, sent = torch.zeros(elements), torch.zeros(elements)
    for _ in range(20):
        gradient = torch.randint(-50, 51, (elements,), generator=generator).float()
        given_ += gradient
        sent += reduce_alone(slot, gradient, f"topk:{share}%")
        assert torch.equal(sent + slot.residual, given_)


@pytest.mark.parametrize("method", ["sign:16", "int8:16"])
@settings(max_examples=15, deadline=None)
@given(elements=st.integers(1, 60), seed=st.integers(0, 2**31))
def test_what_was_sent_and_what_stays_add_up_to_the_gradients_up_to_rounding(method: str, elements: int, seed: int):
    generator, slot = torch.Generator().manual_seed(seed), slot_of(elements)
    given_, sent = torch.zeros(elements, dtype=torch.float64), torch.zeros(elements, dtype=torch.float64)
    for _ in range(20):
        gradient = torch.randn(elements, generator=generator)
        given_ += gradient
        sent += reduce_alone(slot, gradient, method)
    torch.testing.assert_close(sent + slot.residual, given_, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_passed_on_as_nan_and_leaves_no_trace(value: float):
    slot = slot_of(40)
    reduce_alone(slot, torch.randn(40), "topk:10%", momentum=0.9)
    residual, velocity = slot.residual.clone(), slot.velocity.clone()
    gradient = torch.randn(40)
    gradient[7] = value
    assert reduce_alone(slot, gradient, "topk:10%", momentum=0.9).isnan().all()
    assert torch.equal(slot.residual, residual)
    assert torch.equal(slot.velocity, velocity)


@pytest.mark.parametrize(("shape", "form", "row"), [((4,), "mean", None), ((2, 4), "shard", 1)])
def test_a_mean_beyond_float16_is_cut_and_what_was_cut_off_waits(shape: tuple[int, ...], form: Form, row: int | None):
    settings_ = CompressionSettings(method=parse_method("sign:4"), exclude=(), min_elements=0, min_ratio=0)
    [slot] = make_slots([GradientPart(name="w", shape=shape, dtype=torch.float16)], settings_, ranks=2, form=form)
    slot.residual = torch.full(shape, 60000.0)
    offered = offer(slot, torch.full(shape, 10000.0, dtype=torch.float16), 0.0)
    mean = offered.values if row is None else offered.values[row]
    delivered = settle(offered, FeedbackOutcome(mean=mean, sent=offered.values, kept={}), FINE, row)
    assert delivered.half().isfinite().all()
    assert torch.equal(delivered, torch.full((4,), 65504.0))
    # Of the mean over two ranks: a shard's remainder waits on its own rank, for both.
    waiting = slot.residual if row is None else slot.residual[row] / 2
    assert torch.equal(delivered + waiting, mean)
    if row is not None:
        assert not slot.residual[0].any()


def test_a_gradient_that_is_not_finite_on_another_rank_leaves_no_trace_here():
    slot = slot_of(40)
    reduce_alone(slot, torch.randn(40), "topk:10%")
    residual = slot.residual.clone()
    assert reduce_alone(slot, torch.randn(40), "topk:10%", void=VOID).isnan().all()
    assert torch.equal(slot.residual, residual)


def test_a_rank_without_a_gradient_sends_nothing_and_keeps_what_it_has():
    slot = slot_of(40)
    reduce_alone(slot, torch.randn(40), "topk:10%", momentum=0.9)
    residual, velocity = slot.residual.clone(), slot.velocity.clone()
    assert not reduce_alone(slot, torch.zeros(40), "topk:10%", momentum=0.9).any()
    assert torch.equal(slot.residual, residual)
    assert torch.equal(slot.velocity, velocity)


def test_momentum_correction_follows_deep_gradient_compression():
    generator, slot, momentum = torch.Generator().manual_seed(0), slot_of(50), 0.9
    u, v = torch.zeros(50), torch.zeros(50)
    for _ in range(12):
        gradient = torch.randn(50, generator=generator)
        # Algorithm of Lin et al. 2018, written down directly.
        u = momentum * u + gradient
        v = v + u
        is_sent = torch.zeros(50, dtype=torch.bool).scatter(0, v.abs().topk(5).indices, True)
        expected = torch.where(is_sent, v, 0.0)
        u, v = torch.where(is_sent, 0.0, u), torch.where(is_sent, 0.0, v)
        assert torch.equal(reduce_alone(slot, gradient, "topk:10%", momentum=momentum), expected)
        assert torch.equal(slot.velocity, u)
        assert torch.equal(slot.residual, v)


def test_parameters_that_are_not_compressed_get_the_momentum_of_sgd():
    slot, weight = slot_of(10), torch.zeros(10, requires_grad=True)
    optimizer, generator = torch.optim.SGD([weight], lr=1.0, momentum=0.9), torch.Generator().manual_seed(0)
    moved = torch.zeros(10)
    for _ in range(5):
        gradient = torch.randn(10, generator=generator)
        weight.grad = gradient.clone()
        optimizer.step()
        moved -= with_velocity(slot, gradient, 0.9)
        torch.testing.assert_close(moved, weight.detach())
    assert with_velocity(slot, torch.full((10,), torch.inf), 0.9).isinf().all()
    assert slot.velocity.isfinite().all()


def parts() -> list[GradientPart]:
    return [
        GradientPart(name="embed.weight", shape=(100, 64), dtype=torch.float32),
        GradientPart(name="mlp.weight", shape=(64, 64), dtype=torch.float32),
        GradientPart(name="mlp.bias", shape=(2000,), dtype=torch.float32),
        GradientPart(name="small.weight", shape=(8, 8), dtype=torch.float32),
        GradientPart(name="double.weight", shape=(64, 64), dtype=torch.float64),
        GradientPart(name="nothing", shape=(0, 4), dtype=torch.float32),
        GradientPart(name="huge.weight", shape=(2**16, 2**15), dtype=torch.float32),
    ]


def test_every_parameter_that_is_not_compressed_says_why():
    slots = make_slots(parts(), CompressionSettings(method=parse_method("topk:1%")), ranks=2, form="mean")
    assert [slot.reason for slot in slots] == [
        "excluded by '*embed*'",
        "",
        "excluded by '*bias*'",
        "fewer than 1024 elements",
        "gradients of float64 are sent as they are",
        "fewer than 1024 elements",
        "more than 2147483647 elements: places are sent as 32-bit integers",
    ]


def test_what_would_save_too_little_is_not_compressed():
    # Everyone's top elements go to everyone: on 200 ranks that is more than an all-reduce of all elements.
    few, many = (
        make_slots(parts(), CompressionSettings(method=parse_method("topk:1%")), ranks=n, form="mean")[1]
        for n in (2, 200)
    )
    assert few.is_compressed
    assert many.reason.startswith("would save too little")
    dense = make_slots(parts(), CompressionSettings(method=parse_method("topk:100%")), ranks=2, form="mean")[1]
    assert not dense.is_compressed


def test_a_pattern_that_matches_nothing_is_refused_unless_it_is_a_default():
    with pytest.raises(InvalidOption) as caught:
        make_slots(
            parts(), CompressionSettings(method=parse_method("sign"), exclude=("*.attn.*",)), ranks=2, form="mean"
        )
    assert "'*.attn.*' matches no parameter" in caught.value.found
    assert "embed.weight" in caught.value.why
    make_slots(parts()[1:2], CompressionSettings(method=parse_method("sign"), exclude=EXCLUDED), ranks=2, form="mean")
