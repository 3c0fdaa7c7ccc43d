"""A module tree in, the path of the module that is running now out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


class ModuleStack:
    """Knows which submodule of ``root`` is running, by temporary forward hooks.

    ``path`` is relative to ``root`` (``""`` in the root itself). A module that is reached under several names keeps its first.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []

    @property
    def path(self) -> str:
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def watch(self, root: nn.Module, prefix: str = "") -> Iterator[None]:
        """Follow the modules below ``root`` until the block ends; every hook is removed, also on an error."""
        handles: list[Any] = []
        depth = len(self._stack)
        self._stack.append(prefix)
        try:
            for name, module in root.named_modules():
                if name:
                    path = f"{prefix}.{name}" if prefix else name
                    handles.append(module.register_forward_pre_hook(self._entering(path), prepend=True))
                    handles.append(module.register_forward_hook(self._leaving, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            del self._stack[depth:]

    def _entering(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(path)

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
