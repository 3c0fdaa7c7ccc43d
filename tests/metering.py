"""Counts live storages from outside, exactly and without torch's profiler: the user's view of a budget."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.torch_internals import has_storage


class LiveStorages(TorchDispatchMode):
    """Bytes of all storages that ops made since it was entered, and the most that were alive at once in each step.

    Make the model and everything else inside. A step lasts from one training call of a watched model to the next; what
    happens in between its hooks (tracing, trial runs) is no part of it. Kernels' workspaces are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peaks: list[int] = []
        self._depth = 0
        self._is_counting = True
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def watch(self, model: nn.Module) -> None:
        """Begin a step at every training call, after whatever hooks are there already."""
        model.register_forward_pre_hook(lambda *_: self._enter(1), prepend=True)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(lambda *_: self._enter(-1), always_call=True)

    def _enter(self, change: int) -> None:
        self._depth += change
        self._is_counting = not self._depth

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._depth == 1:
            self._is_counting = True
            if torch.is_grad_enabled() and module.training:
                self.peaks.append(self.bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in output_tensors(made):
            if has_storage(tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "cpu" or self._alive.get(storage._cdata, lambda: None)() is storage:
            return
        key, size = storage._cdata, storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self._let_go(size))
        self.bytes += size
        if self.peaks and self._is_counting:
            self.peaks[-1] = max(self.peaks[-1], self.bytes)

    def _let_go(self, size: int) -> None:
        self.bytes -= size
