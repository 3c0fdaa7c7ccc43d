"""Small models that several scenarios put on ranks, and targets of the command line that know nothing of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from plimsoll.ui.cli.app import app
from steps import Block


def llama(**sizes: int) -> LlamaForCausalLM:
    """Two layers, always with the same weights."""
    torch.manual_seed(0)
    usual = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**(usual | heads | sizes), use_cache=False))


def blocks(width: int = 16, count: int = 3) -> nn.Sequential:
    """Residual blocks without dropout, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, dropout=0.0) for _ in range(count)))


def step() -> tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Three blocks and a loss."""
    return blocks(), torch.ones(32, 16), torch.sum


def regression() -> tuple[nn.Module, list[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """A target with a stream of batches."""
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return model, [torch.randn(4, 64, generator=random) for _ in range(30)], lambda output: output.square().mean()


def ask_for_traffic(path: str) -> dict[str, Any]:
    """``compress-gradients`` on every rank at once: exit code and text of a short measurement."""
    options = ["--methods", "topk:1%", "--steps", "1", "--bandwidth", "10", "--output", path]
    result = CliRunner().invoke(app, ["compress-gradients", "ranks.small_models:regression", *options])
    return {"code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr}
