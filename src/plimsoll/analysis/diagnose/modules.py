"""A model in; while a block runs, every call of its modules is a named range of the profiler, recomputed calls included."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

PREFIX = "plimsoll.module: "


@contextlib.contextmanager
def named_calls(model: nn.Module) -> Iterator[None]:
    """Mark forward calls through hooks, which are removed at the end of the block.

    Ranges are closed in the order in which they were opened even if a forward raises, as recomputation that stops early
    does.
    """
    opened: list[record_function] = []
    handles: list[RemovableHandle] = []
    try:
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(_opening(PREFIX + name, opened), prepend=True))
                handles.append(module.register_forward_hook(_closing(opened), always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _opening(name: str, opened: list[record_function]) -> Callable[[nn.Module, Any], None]:
    def open_range(module: nn.Module, args: Any) -> None:
        mark = record_function(name)
        mark.__enter__()
        opened.append(mark)

    return open_range


def _closing(opened: list[record_function]) -> Callable[[nn.Module, Any, Any], None]:
    def close_range(module: nn.Module, args: Any, output: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    return close_range
