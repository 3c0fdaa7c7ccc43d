"""The figures of a training under a budget as columns of a csv file, next to the loss. Runs on a CPU in a few seconds.

docs/integrations/loops.md shows the same for TensorBoard and wandb.
"""

from __future__ import annotations

import csv
import sys

import torch
from torch import nn

import plimsoll


class Block(nn.Module):
    """A small residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    rows: list[dict[str, float]] = []
    with plimsoll.attach(model, budget="16MiB") as handle:
        for step in range(6):
            loss = model(torch.randn(512, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.append({"step": step, "loss": loss.item(), **handle.metrics()})  # no figures in the first step

    table = csv.DictWriter(sys.stdout, fieldnames=list(rows[-1]), restval="")
    table.writeheader()
    table.writerows(rows)


if __name__ == "__main__":
    main()
