"""``torch.compile`` of the whole model or block by block, and what is used inside of it to save memory.

That is torch's own activation memory budget, a share of the saved bytes of each graph, and checkpointing of every block,
whole or selective. All are compiled for fixed sizes. Every memory budget has a backend object of its own, so that Dynamo's
caches never mix two of them in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch._functorch.config
from torch import nn

from benchmarks.blocks import repeated_blocks
from benchmarks.peers import checkpointing, selective

WHOLE, BLOCK = "whole", "block"


@contextlib.contextmanager
def apply(model: nn.Module, how: str = WHOLE, memory_budget: float = 1.0) -> Iterator[nn.Module]:
    """Compile the model, or each of its repeated blocks."""
    parts = [model] if how == WHOLE else repeated_blocks(model)
    backend = "inductor" if memory_budget == 1.0 else _budgeted(memory_budget)
    for part in parts:
        part.compile(backend=backend, dynamic=False)
    try:
        yield model
    finally:
        for part in parts:
            part._compiled_call_impl = None


@contextlib.contextmanager
def apply_checkpointed(model: nn.Module, how: str = WHOLE, *, is_selective: bool = False) -> Iterator[nn.Module]:
    """Compile what checkpoints every block; ``is_selective``: it saves what matrix products and attention return."""
    wrap = selective.apply_save_list if is_selective else checkpointing.apply
    with wrap(model) as checkpointed, apply(checkpointed, how) as compiled:
        yield compiled


def _budgeted(memory_budget: float) -> Callable[[Any, Any], Any]:
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, example_inputs: Any) -> Any:
        settings = {"activation_memory_budget": memory_budget, "enable_autograd_cache": False}
        with torch._functorch.config.patch(settings):
            return compile_fx(graph, example_inputs)

    return backend


BUDGETS = (0.7, 0.5, 0.3, 0.0)
PEERS: dict[str, dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[nn.Module]]]] = {
    how: {f"memory budget {share}": partial(apply, how=how, memory_budget=share) for share in BUDGETS}
    | {
        "SAC, save matmul + sdpa": partial(apply_checkpointed, how=how, is_selective=True),
        "checkpoint every block": partial(apply_checkpointed, how=how),
    }
    for how in (WHOLE, BLOCK)
}
"""Who saves memory under torch.compile, by how it is called."""
