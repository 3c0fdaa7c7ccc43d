"""What existing autograd graphs have saved: tensors that Python does not know."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from plimsoll.tracing.meters.memory import PeakMeter, live_tensors, storage_bytes
from plimsoll.tracing.meters.saved import saved_tensors

ROWS = (64, 32)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x * x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient * ctx.saved_tensors[0]


class Copy(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def shapes(root: torch.Tensor) -> list[torch.Size]:
    return [tensor.shape for tensor in saved_tensors([root])]


def test_what_torchs_nodes_and_the_users_functions_save_is_found_once():
    rows = torch.ones(ROWS, requires_grad=True)
    assert shapes(Cube.apply(rows.exp()).sum()) == [ROWS, ROWS]
    assert shapes(Copy.apply(Copy.apply(rows.exp()) + 1).sum()) == [ROWS]
    assert shapes(torch.cat([rows.exp(), rows.tanh()]).sum()) == [ROWS, ROWS]


def test_a_graph_is_empty_after_its_backward_unless_it_is_retained():
    rows = torch.ones(ROWS, requires_grad=True)
    loss = torch.stack([Cube.apply(rows.exp()).sum(), nn.LSTM(32, 4)(rows)[0].sum()]).sum()
    loss.backward(retain_graph=True)
    assert shapes(loss)
    loss.backward()
    assert shapes(loss) == []


def test_what_a_pack_hook_has_packed_is_left_as_it_is():
    unpacked: list[object] = []
    with saved_tensors_hooks(lambda tensor: [tensor.shape], unpacked.append):
        loss = torch.ones(ROWS, requires_grad=True).exp().sum()
    assert shapes(loss) == []
    assert unpacked == []


def test_the_graph_of_gradients_is_found_and_seen_to_go():
    """As in a loop that learns to learn: its second backward frees the graphs of its first forward and backward."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    before = storage_bytes(live_tensors("cpu"))
    with PeakMeter() as making:
        gradients = torch.autograd.grad(model(torch.ones(ROWS)).sum(), list(model.parameters()), create_graph=True)
    assert storage_bytes(live_tensors("cpu")) - before == making.resident_bytes
    with PeakMeter() as freeing:
        del gradients
    assert freeing.resident_bytes == -making.resident_bytes
