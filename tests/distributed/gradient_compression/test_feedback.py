"""What is offered, what is sent and what stays, on one rank and without a process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.distributed.gradient_compression.feedback import FeedbackOutcome, offer, settle, with_velocity
from plimsoll.distributed.gradient_compression.method import EXCLUDED, CompressionSettings, parse_method
from plimsoll.distributed.gradient_compression.slots import Form, GradientPart, GradientSlot, make_slots
from plimsoll.distributed.gradient_compression.topk import TopKMean
from plimsoll.errors import InvalidOption

FINE, VOID = torch.zeros(()), torch.ones(())


def slots_of(
    parts: list[GradientPart], method: str, ranks: int = 1, form: Form = "mean", **how: Any
) -> list[GradientSlot]:
    return make_slots(parts, CompressionSettings(method=parse_method(method), **how), ranks=ranks, form=form)


def slot_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **how: Any) -> GradientSlot:
    """Of a parameter that is compressed, whether it pays or not."""
    part = GradientPart("w", shape, dtype)
    return slots_of([part], "topk:10%", exclude=(), min_elements=0, min_ratio=0, **how)[0]


def reduce_alone(
    slot: GradientSlot, gradient: torch.Tensor, method: str, *, momentum: float = 0.0, void: torch.Tensor = FINE
) -> torch.Tensor:
    """One rank's reduction: the mean is what it sent itself."""
    topk = TopKMean(parse_method(method), "mean")
    offered = offer(slot, gradient.view(1, -1), momentum)
    places, values = topk.decode(topk.encode(offered.values, torch.float32), torch.float32)
    sent = torch.zeros_like(offered.values).scatter_(1, places, values)
    slot.reductions += 1
    outcome = FeedbackOutcome(mean=sent.view(-1), sent=sent)
    return settle(offered, outcome, torch.maximum(void, offered.is_not_finite), 0)


@settings(max_examples=20, deadline=None)
@given(elements=st.integers(1, 60), seed=st.integers(0, 2**31), share=st.sampled_from((1, 10, 40)))
def test_what_was_sent_and_what_stays_add_up_to_the_gradients_exactly(elements: int, seed: int, share: int):
    # Whole numbers, so that sums in float32 are exact in any order.
    generator, slot = torch.Generator().manual_seed(seed), slot_of((elements,))
    given_, sent = torch.zeros(elements), torch.zeros(elements)
    for _ in range(20):
        gradient = torch.randint(-50, 51, (elements,), generator=generator).float()
        given_ += gradient
        sent += reduce_alone(slot, gradient, f"topk:{share}%")
        assert torch.equal(sent + slot.residual.view(-1), given_)


@pytest.mark.parametrize(
    ("value", "void"), [(float("nan"), FINE), (float("inf"), FINE), (float("-inf"), FINE), (1.0, VOID), (0.0, FINE)]
)
def test_a_gradient_that_is_not_finite_on_some_rank_or_missing_here_leaves_no_trace(value: float, void: torch.Tensor):
    slot = slot_of((40,))
    reduce_alone(slot, torch.randn(40), "topk:10%", momentum=0.9)
    residual, velocity = slot.residual.clone(), slot.velocity.clone()
    gradient = torch.randn(40) if value else torch.zeros(40)  # of a rank without one
    gradient[7] = value
    passed_on = reduce_alone(slot, gradient, "topk:10%", momentum=0.9, void=void)
    assert passed_on.isnan().all() if value else not passed_on.any()
    assert torch.equal(slot.residual, residual)
    assert torch.equal(slot.velocity, velocity)


@pytest.mark.parametrize(("shape", "form", "row"), [((4,), "mean", 0), ((2, 4), "shard", 1)])
def test_a_mean_beyond_float16_is_cut_and_what_was_cut_off_waits(shape: tuple[int, ...], form: Form, row: int):
    slot = slot_of(shape, torch.float16, ranks=2, form=form)
    rows = shape if form == "shard" else (1, *shape)
    slot.residual = torch.full(rows, 60000.0)
    offered = offer(slot, torch.full(rows, 10000.0, dtype=torch.float16), 0.0)
    mean = offered.values[row]
    delivered = settle(offered, FeedbackOutcome(mean=mean, sent=offered.values), FINE, row)
    assert delivered.half().isfinite().all()
    assert torch.equal(delivered, torch.full((4,), 65504.0))
    # Of the mean over two ranks: a shard's remainder waits on its own rank, for both.
    waiting = slot.residual[row] / (2 if form == "shard" else 1)
    assert torch.equal(delivered + waiting, mean)
    if form == "shard":
        assert not slot.residual[0].any()


def test_momentum_correction_follows_deep_gradient_compression():
    generator, slot, momentum = torch.Generator().manual_seed(0), slot_of((50,)), 0.9
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
        assert torch.equal(slot.velocity.view(-1), u)
        assert torch.equal(slot.residual.view(-1), v)


def test_parameters_that_are_not_compressed_get_the_momentum_of_sgd():
    slot, weight = slot_of((10,)), torch.zeros(10, requires_grad=True)
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
    shapes = {
        "embed.weight": (100, 64),
        "mlp.weight": (64, 64),
        "mlp.bias": (2000,),
        "small.weight": (8, 8),
        "double.weight": (64, 64),
        "nothing": (0, 4),
        "huge.weight": (2**16, 2**15),
    }
    kinds = {"double.weight": torch.float64}
    return [GradientPart(n, shape, kinds.get(n, torch.float32)) for n, shape in shapes.items()]


def test_every_parameter_that_is_not_compressed_says_why():
    slots = slots_of(parts(), "topk:1%", ranks=2)
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
    few, many = (slots_of(parts(), "topk:1%", ranks=n)[1] for n in (2, 200))
    assert few.is_compressed
    assert many.reason.startswith("would save too little")
    assert not slots_of(parts(), "topk:100%", ranks=2)[1].is_compressed


def test_a_pattern_that_matches_nothing_is_refused_unless_it_is_a_default():
    with pytest.raises(InvalidOption) as caught:
        slots_of(parts(), "topk:1%", ranks=2, exclude=("*.attn.*",))
    assert "'*.attn.*' matches no parameter" in caught.value.found
    assert "embed.weight" in caught.value.why
    slots_of(parts()[1:2], "topk:1%", ranks=2, exclude=EXCLUDED)
