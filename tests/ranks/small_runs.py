"""A small run in any layout: a GPT-2 with dropout over bytes of Python's own source, and an AdamW with two groups."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import CausalLMOutput

TEXT = Path(argparse.__file__ or "").read_bytes()
SEQUENCE = 32


@dataclass
class Run:
    """A model as it is trained, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch_of: Callable[[int], dict[str, torch.Tensor]]

    def train(self, steps: range) -> list[float]:
        """Losses of this rank; its part of the batch depends on the step and the rank."""
        losses = []
        for step in steps:
            loss = self.model(**self.batch_of(step)).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def bits(self) -> dict[str, list[float]]:
        """Every parameter, buffer and state of the optimizer that this rank holds."""
        tensors = dict(self.model.state_dict())
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{index}/{key}": value for key, value in state.items()}
        return {name: local_of(value).double().flatten().tolist() for name, value in tensors.items()}


def build(layout: str, *, seed: int = 0, hidden: int = 32) -> Run:
    """A run in a layout: ``plain``, ``ddp`` or ``fsdp``; the seed makes the weights and the random streams."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=SEQUENCE,
        n_embd=hidden,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: Any = transformers.GPT2LMHeadModel(config).train()
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "ddp":
        model = DistributedDataParallel(model)
    torch.manual_seed(1000 * seed + (dist.get_rank() if dist.is_initialized() else 0))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3, "weight_decay": 0.0}]
    return Run(model, torch.optim.AdamW(groups, lr=1e-2), batch_of)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """This rank's two sequences of a step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    start = (7 * step + rank) * 2 * SEQUENCE
    tokens = torch.tensor(list(TEXT[start : start + 2 * SEQUENCE])).reshape(2, SEQUENCE)
    return {"input_ids": tokens, "labels": tokens}


def local_of(value: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    value = value.to_local() if isinstance(value, DTensor) else value
    return torch.as_tensor(value)


class Block(nn.Module):
    """A block that tensor parallelism can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))
        return out


class Blocks(nn.Module):
    """Two blocks that learn to give back what they are given: cheap to plan, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        y = x
        for layer in self.layers:
            y = layer(y)
        return CausalLMOutput(loss=(y - x).pow(2).mean())


def build_blocks(layout: str, *, seed: int) -> Run:
    """Blocks under FSDP2 (``fsdp``) or ``ddp``."""
    torch.manual_seed(seed)
    model: Any = Blocks()
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    torch.manual_seed(1000 * seed + dist.get_rank())
    return Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2), noise_of)


def noise_of(step: int) -> dict[str, torch.Tensor]:
    """This rank's eight samples of a step."""
    return {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))}
