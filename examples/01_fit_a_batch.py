"""Fit a training step under a budget, look at the plan, check it, train with it. Runs on a CPU in a few seconds."""

from __future__ import annotations

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
    batch = torch.randn(512, 128)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    plain = plimsoll.plan(model, batch, loss=loss, optimizer=optimizer, strategy="none")
    budget = (plain.floor_bytes + plain.baseline_peak_bytes) // 2
    plan = plimsoll.plan(model, batch, budget, loss=loss, optimizer=optimizer)
    print(plan)

    receipt = plimsoll.verify(model, batch, plan, loss=loss, optimizer=optimizer)
    print(receipt)

    with plimsoll.apply(model, plan):
        for step in range(5):
            optimizer.zero_grad()
            value = loss(model(batch))
            value.backward()
            optimizer.step()
            print(f"step {step}  loss {value.item():.4f}")

    if not receipt.verdict.is_pass:
        raise SystemExit(receipt.exit_code)


if __name__ == "__main__":
    main()
