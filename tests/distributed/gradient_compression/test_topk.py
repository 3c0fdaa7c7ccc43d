"""What topk puts on the wire: its length, and what comes back; and the bytes that every method sends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.distributed.gradient_compression.method import parse_method
from plimsoll.distributed.gradient_compression.slots import compressed_bytes, dense_bytes
from plimsoll.distributed.gradient_compression.topk import TopKMean

SHARES = ("topk:1%", "topk:30%", "topk:100%")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(0, 2**31), st.sampled_from((1e-30, 1.0, 1e4)))


def rows_of(drawn: tuple[int, int, int, float]) -> torch.Tensor:
    count, elements, seed, scale = drawn
    return torch.randn(count, elements, generator=torch.Generator().manual_seed(seed)) * scale


def make_topk(method: str) -> TopKMean:
    return TopKMean(parse_method(method), "mean")


def returned(topk: TopKMean, rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    places, values = topk.decode(topk.encode(rows, dtype), dtype)
    return torch.zeros_like(rows).scatter_(1, places, values)


@pytest.mark.parametrize("method", SHARES)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(drawn=ROWS)
def test_a_payload_is_as_long_as_what_is_counted(method: str, dtype: torch.dtype, drawn: tuple[int, int, int, float]):
    rows, topk = rows_of(drawn), make_topk(method)
    payload = topk.encode(rows, dtype)
    assert payload.dtype == torch.uint8
    sent_bytes = compressed_bytes(parse_method(method), (rows.shape[1],), dtype, 2, "mean")
    assert payload.shape == (len(rows), sent_bytes)
    places, values = topk.decode(payload, dtype)
    assert places.shape == values.shape == (len(rows), parse_method(method).elements_sent(rows.shape[1]))


@pytest.mark.parametrize("method", SHARES)
@settings(max_examples=10, deadline=None)
@given(drawn=ROWS)
def test_rows_do_not_know_each_other(method: str, drawn: tuple[int, int, int, float]):
    rows, topk = rows_of(drawn), make_topk(method)
    apart = torch.cat([topk.encode(row.view(1, -1), torch.float32) for row in rows])
    assert torch.equal(topk.encode(rows, torch.float32), apart)


@settings(max_examples=30, deadline=None)
@given(drawn=ROWS, share=st.sampled_from((1, 10, 50, 100)))
def test_topk_sends_the_largest_elements_exactly_and_nothing_else(drawn: tuple[int, int, int, float], share: int):
    rows, method = rows_of(drawn), f"topk:{share}%"
    back = returned(make_topk(method), rows)
    is_sent = back != 0
    assert torch.equal(back[is_sent], rows[is_sent])
    for row, sent in zip(rows.abs(), is_sent, strict=True):
        assert int(sent.sum()) == parse_method(method).elements_sent(len(row))
        if not sent.all():
            assert row[sent].min() >= row[~sent].max()


def test_zeros_come_back_as_zeros():
    assert not returned(make_topk("topk:30%"), torch.zeros(2, 33)).any()


def test_values_beyond_float16_are_cut_and_stay_finite():
    back = returned(make_topk("topk:100%"), torch.tensor([[1e6, 1.0, -1e9]]), torch.float16)
    assert back.tolist() == [[65504.0, 1.0, -65504.0]]


def test_bytes_in_a_ring_are_those_of_the_textbook():
    assert dense_bytes(1000, torch.bfloat16, 4, "mean") == 3000
    assert dense_bytes(1000, torch.float32, 4, "shard") == 3000
    assert dense_bytes(1000, torch.float32, 1, "mean") == 0


@pytest.mark.parametrize(
    ("method", "ranks", "expected"),
    [
        ("topk:1%", 2, 80_000),  # 8 bytes for each of 10,000 elements to one other rank
        ("topk:1%", 8, 560_000),
        ("powersgd:4", 2, 32_000),
        ("powersgd:4", 8, 56_000),
    ],
)
def test_bytes_of_a_compressed_matrix_of_a_million(method: str, ranks: int, expected: int):
    assert compressed_bytes(parse_method(method), (1000, 1000), torch.float32, ranks, "mean") == expected


def test_bytes_of_a_shard_grow_with_the_other_ranks_shards_only():
    # 8 ranks with shards of 1000 elements: 10 elements of 8 bytes go to each of 7 ranks.
    assert compressed_bytes(parse_method("topk:1%"), (8, 1000), torch.float32, 8, "shard") == 7 * 10 * 8
