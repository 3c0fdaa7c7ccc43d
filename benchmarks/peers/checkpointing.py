"""``torch.utils.checkpoint``, non-reentrant, around every block or around every ``every`` blocks together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.blocks import block_lists


@contextlib.contextmanager
def apply(
    model: nn.Module,
    every: int = 1,
    context_fn: Callable[[], Any] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Iterator[nn.Module]:
    """Checkpoint the model's blocks; the inputs that a checkpoint keeps are saved under the hooks of ``around``."""
    before = list(block_lists(model))
    for parent, name, blocks in before:
        chunks = [list(blocks[i : i + every]) for i in range(0, len(blocks), every)]
        setattr(parent, name, nn.ModuleList(Segment(chunk, context_fn, around) for chunk in chunks))
    try:
        yield model
    finally:
        for parent, name, blocks in before:
            setattr(parent, name, blocks)


class Segment(nn.Module):
    """Blocks that are checkpointed together; the output of one is the first argument of the next.

    Models ask their blocks for attributes; the first block answers.
    """

    def __init__(
        self,
        blocks: list[nn.Module],
        context_fn: Callable[[], Any] | None,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.around = around
        self.blocks = nn.ModuleList(blocks)
        self.options = {} if context_fn is None else {"context_fn": context_fn}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("blocks")[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.around():
            return checkpoint(self._run, *args, use_reentrant=False, **self.options, **kwargs)

    def _run(self, first: Any, *rest: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            output = block(first, *rest, **kwargs)
            first = output[0] if isinstance(output, tuple) else output
        return output
