"""A target of the command line that knows nothing of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def step() -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Three blocks of one layer each, and a loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
    return model, torch.ones(32, 16), torch.sum
