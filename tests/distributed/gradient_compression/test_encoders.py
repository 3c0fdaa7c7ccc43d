"""What topk, sign and int8 put on the wire: its length, what comes back, and how far off it may be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.distributed.gradient_compression.encoders import Encoder, encoder_of
from plimsoll.distributed.gradient_compression.method import parse_method
from plimsoll.distributed.gradient_compression.rounds import draw_places, generator_for
from plimsoll.distributed.gradient_compression.slots import GradientSlot, compressed_bytes, dense_bytes

METHODS = ("topk:1%", "topk:30%", "topk:100%", "sign:8", "sign:1024", "int8:16", "int8:256")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(0, 2**31), st.sampled_from((1e-30, 1.0, 1e4)))


def rows_of(drawn: tuple[int, int, int, float]) -> torch.Tensor:
    count, elements, seed, scale = drawn
    return torch.randn(count, elements, generator=torch.Generator().manual_seed(seed)) * scale


def returned(encoder: Encoder, rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return encoder.decode(encoder.encode(rows, dtype), rows.shape[1], dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(drawn=ROWS)
def test_a_payload_is_as_long_as_announced_and_aligned(
    method: str, dtype: torch.dtype, drawn: tuple[int, int, int, float]
):
    rows, encoder = rows_of(drawn), encoder_of(parse_method(method))
    payload = encoder.encode(rows, dtype)
    assert payload.dtype == torch.uint8
    assert payload.shape == (len(rows), encoder.payload_bytes(rows.shape[1], dtype))
    assert payload.shape[1] % 4 == 0
    assert encoder.decode(payload, rows.shape[1], dtype).shape == rows.shape


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=10, deadline=None)
@given(drawn=ROWS)
def test_rows_do_not_know_each_other(method: str, drawn: tuple[int, int, int, float]):
    rows, encoder = rows_of(drawn), encoder_of(parse_method(method))
    together = encoder.encode(rows, torch.float32)
    apart = torch.cat([encoder.encode(row.view(1, -1), torch.float32) for row in rows])
    assert torch.equal(together, apart)


@pytest.mark.parametrize("method", METHODS)
def test_zeros_come_back_as_zeros(method: str):
    assert not returned(encoder_of(parse_method(method)), torch.zeros(2, 33)).any()


@settings(max_examples=30, deadline=None)
@given(drawn=ROWS, share=st.sampled_from((1, 10, 50, 100)))
def test_topk_sends_the_largest_elements_exactly_and_nothing_else(drawn: tuple[int, int, int, float], share: int):
    rows, method = rows_of(drawn), parse_method(f"topk:{share}%")
    back = returned(encoder_of(method), rows)
    is_sent = back != 0
    assert torch.equal(back[is_sent], rows[is_sent])
    for row, sent in zip(rows.abs(), is_sent, strict=True):
        assert int(sent.sum()) == method.elements_sent(len(row))
        if not sent.all():
            assert row[sent].min() >= row[~sent].max()


@settings(max_examples=30, deadline=None)
@given(drawn=ROWS)
def test_sign_keeps_every_sign_and_the_mean_magnitude_of_every_block(drawn: tuple[int, int, int, float]):
    rows = rows_of(drawn)
    back = returned(encoder_of(parse_method("sign:8")), rows)
    assert torch.equal(back >= 0, rows >= 0)
    for start in range(0, rows.shape[1], 8):
        block = slice(start, start + 8)
        torch.testing.assert_close(back[:, block].abs().mean(1), rows[:, block].abs().mean(1))


@settings(max_examples=30, deadline=None)
@given(drawn=ROWS)
def test_sign_leaves_less_than_it_was_given(drawn: tuple[int, int, int, float]):
    # The condition under which error feedback converges: the residual shrinks unless the gradient was zero.
    rows = rows_of(drawn).double()
    back = returned(encoder_of(parse_method("sign")), rows.float()).double()
    assert ((rows - back).norm(dim=1) <= rows.norm(dim=1) * (1 + 1e-6)).all()


@settings(max_examples=30, deadline=None)
@given(drawn=ROWS)
def test_int8_is_off_by_at_most_half_a_step_of_its_block(drawn: tuple[int, int, int, float]):
    rows = rows_of(drawn)
    back = returned(encoder_of(parse_method("int8:16")), rows)
    for start in range(0, rows.shape[1], 16):
        block = slice(start, start + 16)
        step = rows[:, block].abs().amax(1, keepdim=True) / 127
        assert ((back - rows)[:, block].abs() <= 0.5001 * step + 1e-38).all()


def test_values_beyond_float16_are_cut_and_stay_finite():
    rows = torch.tensor([[1e6, 1.0, -1e9]])
    back = returned(encoder_of(parse_method("topk:100%")), rows, torch.float16)
    assert back.tolist() == [[65504.0, 1.0, -65504.0]]


@settings(max_examples=60, deadline=None)
@given(elements=st.integers(1, 500), share=st.floats(0.001, 1), seed=st.integers(0, 2**40))
def test_drawn_places_are_different_in_order_and_exist(elements: int, share: float, seed: int):
    sent = max(1, round(share * elements))
    places = draw_places(torch.Generator().manual_seed(seed), elements, sent).tolist()
    assert len(places) == sent
    assert places == sorted(set(places))
    assert places[0] >= 0
    assert places[-1] < elements


def test_every_place_is_drawn_equally_often():
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(60)
    for _ in range(1000):
        counts[draw_places(generator, 60, 6)] += 1
    assert (counts / 100 - 1).abs().max() < 0.45  # 100 expected each, four and a half standard deviations


def test_places_depend_on_seed_parameter_step_and_row_and_on_nothing_else():
    of = {"name": "w", "shape": (1000,), "dtype": torch.float32, "ranks": 2, "form": "mean", "reason": ""}
    slots = [GradientSlot(number=number, reductions=step, **of) for number in (0, 1) for step in (0, 1)]
    keys = [(seed, slot, row) for seed in (0, 1) for slot in slots for row in (0, 1)]
    drawn = [tuple(draw_places(generator_for(*key), 1000, 20).tolist()) for key in keys]
    assert len(set(drawn)) == len(keys)
    assert drawn == [tuple(draw_places(generator_for(*key), 1000, 20).tolist()) for key in keys]


def test_bytes_in_a_ring_are_those_of_the_textbook_and_one_bit_per_element_is_one_bit_on_the_wire():
    assert dense_bytes(1000, torch.bfloat16, 4, "mean") == 3000
    assert dense_bytes(1000, torch.float32, 4, "shard") == 3000
    elements = 1 << 20
    payload_bytes = encoder_of(parse_method("sign:1024")).payload_bytes(elements, torch.float32)
    assert payload_bytes == elements // 8 + 4 * elements // 1024


@pytest.mark.parametrize(
    ("method", "ranks", "expected"),
    [
        ("topk:1%", 2, 80_000),  # 8 bytes for each of 10,000 elements to one other rank
        ("topk:1%", 8, 560_000),
        ("randomk:1%", 8, 70_000),
        ("sign:1000", 2, 129_000),
        ("powersgd:4", 2, 32_000),
    ],
)
def test_bytes_of_a_compressed_matrix_of_a_million(method: str, ranks: int, expected: int):
    assert compressed_bytes(parse_method(method), (1000, 1000), torch.float32, ranks, "mean") == expected


def test_int8_needs_no_more_bytes_on_more_ranks():
    few, many = (compressed_bytes(parse_method("int8"), (1000, 1000), torch.float32, n, "mean") for n in (8, 128))
    assert many < 1.2 * few
