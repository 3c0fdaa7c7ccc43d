"""What two ranks found about blocks that read values: whether backward runs their forward again, and the gradients."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import plimsoll
from steps import mean_square

WIDTH, ROWS, KNOWN_STEPS, STEPS = 32, 96, 4, 8


class Branching(nn.Module):
    """Takes another way if the first number of its input is negative. With ``adds``, ranks add up a number in between."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.adds = adds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.up(x))
        if self.adds:
            total = wide.detach().abs().mean()
            dist.all_reduce(total)
            wide = wide * (1 + total)
        if x.detach()[0, 0].item() < 0:
            wide = wide.sin() * wide.sigmoid()
        return x + self.down(F.gelu(wide))


def _model(*, adds: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Branching(adds=adds) for _ in range(2)))
    with torch.no_grad():
        for block in model:
            block.down.weight.mul_(0.01)  # the sign of the first number stays
    return model


def _sharded(model: nn.Module) -> nn.Module:
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def _gradients(model: nn.Module, number: int) -> list[torch.Tensor]:
    """Train on a batch. In later steps the ranks go different ways."""
    takes_way = number >= KNOWN_STEPS and (number + dist.get_rank()) % 2 == 0
    torch.manual_seed(number + 100 * dist.get_rank())
    batch = torch.randn(ROWS, WIDTH)
    batch[:, 0] = batch[:, 0].abs() * (-1 if takes_way else 1)
    mean_square(model(batch)).backward()
    found = [each.grad.to_local() if hasattr(each.grad, "to_local") else each.grad for each in model.parameters()]
    found = [each.clone() for each in found]
    model.zero_grad()
    return found


def _trained(plain: nn.Module, model: nn.Module) -> dict[str, Any]:
    torch.manual_seed(5 + 100 * dist.get_rank())
    plan = plimsoll.plan(model, torch.rand(ROWS, WIDTH), loss=mean_square, strategy="full")
    with plimsoll.apply(model, plan) as handle, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        equal = [all(map(torch.equal, _gradients(plain, number), _gradients(model, number))) for number in range(STEPS)]
        return {
            "equal": equal,
            "reruns": [outcome.reruns for outcome in handle.outcomes()],
            "said": [str(each.message) for each in caught if "plimsoll" in str(each.message)],
        }


def found() -> dict[str, Any]:
    """Train blocks under ``fully_shard``, and blocks with a collective inside."""
    return {
        "fully_shard": _trained(*(_sharded(_model(adds=False)) for _ in range(2))),
        "collective": _trained(*(_model(adds=True) for _ in range(2))),
    }
