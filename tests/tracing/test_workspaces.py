"""What ops allocate inside themselves is measured, and only that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plimsoll.artifacts.trace import Trace
from plimsoll.tracing.meters.workspaces import hidden_bytes
from plimsoll.tracing.trace import trace
from steps import Net
from tracing import zoo


def workspace_of(step: Trace, op: str) -> int:
    return max((size for key, size in step.workspaces.items() if key.startswith(f"aten.{op}.")), default=0)


def test_hidden_bytes_are_peak_minus_what_stays():
    timeline = [(1, 100), (11, 140), (12, 190), (13, 150), (21, 130), (22, 135)]
    spans = {"op": (10, 19), "quiet": (15, 16), "frees": (20, 30)}
    assert hidden_bytes(spans, timeline) == {"op": 40, "quiet": 0, "frees": 0}


def test_convolution_unfolds_its_input():
    model, batch = zoo.conv_net()
    step = trace(model, batch, repeats=1)
    assert workspace_of(step, "convolution_backward") > 0


def weighted(function: Callable[..., torch.Tensor], *shape: int) -> Net:
    """Runs a function of the input and one weight."""
    return Net(lambda net, x: function(x, net.weight).sum(), weight=nn.Parameter(torch.ones(shape)))


def test_batched_product_copies_operands_that_are_not_contiguous():
    model = weighted(lambda x, weight: torch.bmm(x[:, ::2, ::2], weight[:, ::2, ::2]), 4, 64, 128)
    assert workspace_of(trace(model, torch.randn(4, 64, 64), repeats=1), "bmm") >= 32 * 32 * 4


def test_attention_has_a_workspace():
    model = weighted(lambda x, scale: F.scaled_dot_product_attention(x * scale, x * scale, x * scale))
    step = trace(model, torch.randn(1, 2, 64, 16), repeats=1)
    assert workspace_of(step, "_scaled_dot_product_flash_attention_for_cpu") > 0


@pytest.mark.parametrize("op", ["mul", "add", "relu", "gelu", "mm"])
def test_plain_ops_have_none_but_a_wrapped_number(op: str):
    model, batch = zoo.gpt2()
    assert workspace_of(trace(model, batch, repeats=1), op) < 64
