"""What an op costs, as far as its arguments tell."""

from __future__ import annotations

import torch

from plimsoll.tracing.recorder.opkey import cost_key, op_spec

_ATEN = torch.ops.aten


def heads(count: int) -> torch.Tensor:
    return torch.empty(2, count, 8, 16, device="meta")


def test_grouped_queries_take_the_arithmetic_of_as_many_keys_and_values():
    forward, backward = _ATEN._scaled_dot_product_flash_attention, _ATEN._scaled_dot_product_flash_attention_backward
    for op, before, query, after in (
        (forward.default, (), (heads(8),), (0.0, True)),
        (backward.default, (heads(8),), (heads(8),), (heads(8), torch.empty(2, 8, 8, device="meta"))),
    ):
        grouped, equal = (op_spec(op, (*before, *query, heads(n), heads(n), *after), {}, heads(8)) for n in (2, 8))
        assert 0 < grouped.flops == equal.flops


def test_products_say_their_batch_rows_columns_and_inner_size():
    left, right = torch.empty(2, 3, 5, device="meta"), torch.empty(2, 5, 7, device="meta")
    assert op_spec(_ATEN.bmm.default, (left, right), {}, left).product == (2, 3, 7, 5)
    bias = torch.empty(7, device="meta")
    assert op_spec(_ATEN.addmm.default, (bias, left[0], right[0]), {}, left).product == (1, 3, 7, 5)
    assert op_spec(_ATEN.mul.Tensor, (left, left), {}, left).product is None


def test_casts_to_different_dtypes_have_different_costs():
    keys = {cost_key(_ATEN._to_copy.default, (heads(2),), {"dtype": each}) for each in (torch.bfloat16, torch.float64)}
    assert len(keys) == 2
