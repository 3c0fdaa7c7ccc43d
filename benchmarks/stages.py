"""A rank of a pipeline: its stage of a Llama, a schedule of ``torch.distributed.pipelining``, and steps of training it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from plimsoll.distributed.pipelines.pipeline_stages import received_buffers

SCHEDULES = {"pipeline 1f1b": Schedule1F1B, "pipeline zero-bubble": ScheduleInterleavedZeroBubble}
_MICRO_BATCHES_PER_STAGE = 2


class LlamaPart(nn.Module):
    """Blocks ``first`` to ``last`` of a Llama; the part with the first embeds, that with the last has the norm and the head."""

    def __init__(self, config: LlamaConfig, first: int, last: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if first == 0 else None
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleDict({str(i): LlamaDecoderLayer(config, i) for i in range(first, last)})
        is_last = last == config.num_hidden_layers
        self.norm = LlamaRMSNorm(config.hidden_size) if is_last else None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if is_last else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is not None:
            hidden = self.embed_tokens(hidden)
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary_emb(hidden, positions)
        for layer in self.layers.values():
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions)
        if self.norm is not None and self.lm_head is not None:
            hidden = self.lm_head(self.norm(hidden))
        return hidden


class StageTraining:
    """This rank's stage under a schedule, built alike every time."""

    def __init__(self, layout: str, config: LlamaConfig, ids: torch.Tensor) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        blocks = config.num_hidden_layers // ranks
        self.model = LlamaPart(config, rank * blocks, (rank + 1) * blocks)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._is_first, self._is_last = rank == 0, rank == ranks - 1
        micro_batches = _MICRO_BATCHES_PER_STAGE * ranks
        self._ids = ids.repeat(micro_batches, 1)
        self._stage = stage = PipelineStage(self.model, rank, ranks, torch.device("cpu"))
        kind: Any = SCHEDULES[layout]
        self.schedule = kind([stage] if layout == "pipeline zero-bubble" else stage, micro_batches, loss_fn=_loss)

    def there_before(self) -> Iterable[torch.Tensor]:
        """The text, where this rank reads it, and the buffers in which micro-batches arrive."""
        self._stage.clear_runtime_states()
        return [*([self._ids] if self._is_first or self._is_last else []), *received_buffers(self._stage)]

    def step(self) -> None:
        """Every micro-batch forward and backward."""
        self.schedule.step(*([self._ids] if self._is_first else []), **({"target": self._ids} if self._is_last else {}))


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
