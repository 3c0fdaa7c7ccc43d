"""Small models that several scenarios put on ranks, and a target of the command line that knows nothing of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

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
