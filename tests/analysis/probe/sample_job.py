"""A small model with dropout and batch norm, data for it and plans: training it takes milliseconds a step."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import plimsoll
from plimsoll.artifacts.plan import Plan
from steps import Net

WIDTH = 64


def block() -> Net:
    way = lambda net, x: x + net.down(net.drop(nn.functional.gelu(net.up(net.norm(x)))))  # noqa: E731
    up, down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Net(way, norm=nn.BatchNorm1d(WIDTH), up=up, drop=nn.Dropout(0.1), down=down)


def small(net: Net, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    for each in net.blocks:
        x = each(x)
    return {"loss": nn.functional.mse_loss(net.head(x)[:, 0], y)}


def make_model() -> Net:
    torch.manual_seed(0)
    return Net(small, blocks=nn.ModuleList(block() for _ in range(2)), head=nn.Linear(WIDTH, 1)).train()


def make_batches(count: int = 40, *, rows: int = 64) -> list[dict[str, torch.Tensor]]:
    """A regression on a fixed random function: there is something to learn, and new rows in every batch."""
    random = torch.Generator().manual_seed(1)
    direction = torch.randn(WIDTH, generator=random)
    xs = [torch.randn(rows, WIDTH, generator=random) for _ in range(count)]
    return [{"x": x, "y": torch.tanh(x @ direction / 4)} for x in xs]


def stop_at(step: int, *, turn: int = 2) -> Callable[[str, float], None]:
    """Interrupt as Ctrl-C does when an arm has taken this step: the baseline's turn is the first, the plan's the second."""
    turns = itertools.count(1)

    def report(stage: str, share: float) -> None:
        if stage.startswith(f"step {step} of") and next(turns) == turn:
            raise KeyboardInterrupt

    return report


@functools.cache
def make_plan(strategy: str = "int8") -> Plan:
    """A plan for the small model; the same one for every test, because planning takes longer than probing."""
    return plimsoll.plan(make_model(), make_batches(1)[0], strategy=strategy)


def read_log(run: Path, arm: str) -> list[dict[str, Any]]:
    """The log without what a clock or a meter said."""
    lines = [json.loads(line) for line in (run / f"{arm}.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "peak_bytes")} for line in lines]
