"""Peers that move activations to host memory: TRL's offloading of every saved tensor, and checkpointing that moves inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu

from benchmarks.peers import checkpointing


@contextlib.contextmanager
def apply(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """Move every saved tensor but the head's to pinned host memory, on a stream of its own.

    Source: ``trl.models.activation_offloading`` (TRL 0.20 to 1.16), with its defaults. Needs TRL and a GPU.
    """
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    offloading = get_act_offloading_ctx_manager(model)

    def forward(**batch: Any) -> Any:
        with offloading:
            return model(**batch)

    yield forward


def apply_checkpointed(model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
    """Checkpoint every block and keep its input in pinned host memory, as huggingface/accelerate#4175 does."""
    is_pinned = next(model.parameters()).is_cuda
    return checkpointing.apply(model, around=lambda: save_on_cpu(pin_memory=is_pinned))
