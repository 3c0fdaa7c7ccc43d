"""What ops allocate inside themselves is measured, and only that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plimsoll
from plimsoll.artifacts.plan import Holder, Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.meters.workspaces import hidden_bytes, release_library_workspaces
from plimsoll.tracing.trace import trace
from plimsoll.units import MIB
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


def test_workspaces_of_cublas_are_part_of_the_trace_under_their_name(monkeypatch: pytest.MonkeyPatch):
    def peaks() -> Plan:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        return plimsoll.plan(model, torch.randn(4, 8), strategy="full", loss=torch.sum)

    before = peaks()
    monkeypatch.setattr("plimsoll.tracing.trace.release_library_workspaces", lambda device: 64 * MIB)
    after = peaks()
    assert after.predicted_peak_bytes - before.predicted_peak_bytes == 64 * MIB
    assert Holder(label="workspaces of cuBLAS", bytes=64 * MIB) in after.peak.holders


def test_releasing_workspaces_of_a_gpu_tells_their_bytes_and_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch):
    assert release_library_workspaces(torch.device("cpu")) == 0
    allocated, order = [100 * MIB, 36 * MIB], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("waited"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated.pop(0))
    monkeypatch.setattr(
        "plimsoll.tracing.meters.workspaces.free_cublas_workspaces", lambda: order.append(f"freed at {len(allocated)}")
    )
    assert release_library_workspaces(torch.device("cuda")) == 64 * MIB
    assert order == ["waited", "freed at 1"]  # between both looks


def test_a_measured_step_makes_its_workspaces_anew(monkeypatch: pytest.MonkeyPatch):
    """What is released before the meter starts counts when the step takes it again."""
    held = [torch.empty(MIB, dtype=torch.uint8)]

    def release(device: torch.device) -> int:
        held.clear()
        return MIB

    def loss(output: torch.Tensor) -> torch.Tensor:
        if not held:
            held.append(torch.empty(MIB, dtype=torch.uint8))
        return output.sum()

    monkeypatch.setattr("plimsoll.session.training_step.release_library_workspaces", release)
    model = nn.Linear(4, 4)
    step = TrainingTask.read(model, torch.randn(2, 4), loss=loss, optimizer=None).step()
    assert step.measure_peak().peak_bytes > MIB
    assert step.measure_peak().peak_bytes > MIB
