"""``torch.compile`` of the whole model with its own activation memory budget, a share of the saved bytes of each graph.

Every use compiles with a backend object of its own, so that Dynamo's caches never mix two budgets in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from benchmarks.peers import checkpointing


@contextlib.contextmanager
def apply(model: nn.Module, memory_budget: float = 1.0) -> Iterator[Callable[..., Any]]:
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, example_inputs: Any) -> Any:
        settings = {"activation_memory_budget": memory_budget, "enable_autograd_cache": False}
        with torch._functorch.config.patch(settings):
            return compile_fx(graph, example_inputs)

    yield torch.compile(model, backend=backend)


@contextlib.contextmanager
def apply_checkpointed(model: nn.Module) -> Iterator[Callable[..., Any]]:
    with checkpointing.apply(model) as checkpointed, apply(checkpointed) as compiled:
        yield compiled
