"""Compiled dropout under torch's memory budgets and under plans: how many dropped positions get a gradient.

A position that dropout sets to zero does not affect the loss, so its gradient is zero. Torch's partitioner may draw another
mask in backward. Then about half of the dropped positions get a gradient. Run ``python -m benchmarks.dropout_gradients``.
Where Plimsoll is not installed, ``python benchmarks/dropout_gradients.py --torch-only`` counts torch's own budgets alone.
"""

from __future__ import annotations

import argparse

import torch
import torch._functorch.config
from torch import nn

ROWS, WIDTH = 1024, 64
BUDGETS = (1.0, 0.7, 0.5, 0.1, 0.0)


class Dropped(nn.Module):
    """Dropout of a weight of ones, then three layers whose results backward reads. Returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS, WIDTH))
        layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)]
        self.layers = nn.ModuleList(layers)

    def forward(self, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = nn.functional.dropout(self.weight * scale, 0.5, self.training)
        x = nn.functional.gelu(kept)
        for layer in self.layers:
            x = x + layer(x)
        return kept, x


def loss_of(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The sum of the second output."""
    return output[1].sum()


def counted(model: nn.Module, weight: nn.Parameter, scale: torch.Tensor) -> tuple[int, int]:
    """Run one step. Return the number of dropped positions, and how many of them got a gradient."""
    weight.grad = None
    output = model(scale)
    loss_of(output).backward()
    assert weight.grad is not None
    dropped = output[0] == 0
    return int(dropped.sum()), int((weight.grad[dropped] != 0).sum())


def under_torch(budget: float) -> tuple[int, int]:
    """Count under torch's ``activation_memory_budget``, a share of the saved bytes."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, scale = Dropped(), torch.ones(ROWS, WIDTH)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        return counted(torch.compile(model), model.weight, scale)


def under_plan(share: float) -> tuple[int, int, str]:
    """Count under a plan whose budget is the floor plus ``share`` of the way to the unmanaged peak. Say its peak."""
    import plimsoll

    torch.manual_seed(0)
    torch._dynamo.reset()
    model, scale = Dropped(), torch.ones(ROWS, WIDTH)
    keeping = plimsoll.plan(model, scale, loss=loss_of, compile=True)
    floor, unmanaged = keeping.floor_bytes, keeping.predicted_peak_bytes
    plan = plimsoll.plan(model, scale, loss=loss_of, compile=True, budget=int(floor + share * (unmanaged - floor)))
    with plimsoll.apply(model, plan):
        dropped, wrong = counted(model, model.weight, scale)
    return dropped, wrong, f"{plan.predicted_peak_bytes / 2**20:.1f} of {unmanaged / 2**20:.1f} MiB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch-only", action="store_true", help="do not plan")
    args = parser.parse_args()
    print(torch.__version__)
    for budget in BUDGETS:
        dropped, wrong = under_torch(budget)
        print(f"torch, memory budget {budget}: {wrong:,} of {dropped:,} dropped positions get a gradient")
    for share in () if args.torch_only else (0.75, 0.5, 0.1):
        dropped, wrong, peak = under_plan(share)
        print(f"plan, {peak}: {wrong:,} of {dropped:,} dropped positions get a gradient")
