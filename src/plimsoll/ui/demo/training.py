"""The small Llama and its training step that the demo runs twice, with and without a plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plimsoll.ui.demo.corpus import VOCABULARY

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSetup:
    """What is trained: a Llama of the real architecture in a size that a laptop trains in a minute or two."""

    hidden_size: int = 256
    intermediate_size: int = 688
    layers: int = 8
    heads: int = 4
    batch: int = 4
    sequence: int = 512
    steps: int = 30
    seed: int = 0
    learning_rate: float = 1e-3


@dataclass(slots=True)
class Run:
    """The losses and step times of one training."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def fastest_seconds(self) -> float:
        """The fastest step: the one that other programs on the machine disturbed least."""
        return min(self.step_seconds)


def make_model(setup: DemoSetup) -> torch.nn.Module:
    """A transformers Llama with random weights, the same for the same seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(setup.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=setup.hidden_size,
        intermediate_size=setup.intermediate_size,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.heads,
        num_key_value_heads=setup.heads,
        max_position_embeddings=setup.sequence,
        use_cache=False,
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model.train()


def make_optimizer(model: torch.nn.Module, setup: DemoSetup) -> torch.optim.Optimizer:
    """AdamW, as such models are trained."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=setup.learning_rate)


def take_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], run: Run
) -> None:
    """An ordinary training step, appended to ``run``. It knows nothing of Plimsoll, and that is the point."""
    started_seconds = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    run.losses.append(loss.item())
    run.step_seconds.append(time.perf_counter() - started_seconds)
