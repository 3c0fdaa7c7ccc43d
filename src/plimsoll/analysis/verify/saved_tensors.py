"""The saved-tensor hooks of a model in; every tensor that backward gets back as something else than forward saved, out.

A checksum of each tensor is taken when it is packed and compared when it is unpacked, so watching needs hardly any memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from plimsoll.analysis.verify.saved_hooks import Hook
from plimsoll.artifacts.fault import Cause, Fault
from plimsoll.tracing.recorder.calling import ModuleStack
from plimsoll.tracing.recorder.storages import content_fingerprint, is_plain


@dataclass(frozen=True, slots=True)
class _Note:
    """What one saved tensor was."""

    module: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    fingerprint: int
    storage: StorageWeakRef


class SavedTensorWatch:
    """Compares what hooks give back with what they were given.

    Args:
        root: the model; its modules name the places.
    """

    def __init__(self, root: nn.Module) -> None:
        self.faults: list[Fault] = []
        self.compared = 0
        self.stack = ModuleStack()
        self._root = root
        self._counts: dict[str, int] = {}

    def watch_modules(self) -> Any:
        """A context in which the running module is known."""
        return self.stack.watch(self._root)

    def wrap(self, pack: Hook, unpack: Hook) -> tuple[Hook, Hook]:
        """The same pair of hooks, watched."""

        def watching_pack(tensor: torch.Tensor) -> tuple[Any, _Note | None]:
            note = self._note(tensor)
            return pack(tensor), note

        def watching_unpack(parcel: tuple[Any, _Note | None]) -> torch.Tensor:
            packed, note = parcel
            value: torch.Tensor = unpack(packed)
            if note is not None:
                self._compare(note, value)
            return value

        return watching_pack, watching_unpack

    def _note(self, tensor: torch.Tensor) -> _Note | None:
        if not is_plain(tensor):
            return None
        path = self.stack.path
        index = self._counts[path] = self._counts.get(path, -1) + 1
        with _disable_current_modes():  # selective checkpointing would cache the checksum's ops
            checksum = content_fingerprint(tensor)
            storage = StorageWeakRef(tensor.untyped_storage())
        return _Note(path, index, tuple(tensor.shape), tensor.dtype, checksum, storage)

    def _compare(self, note: _Note, value: torch.Tensor) -> None:
        self.compared += 1
        if not is_plain(value):
            return
        is_alike = tuple(value.shape) == note.shape and value.dtype is note.dtype
        if is_alike and content_fingerprint(value) == note.fingerprint:
            return
        node = torch._C._current_autograd_node()
        self.faults.append(
            Fault(
                step=1,
                region=note.module,
                value=f"saved tensor {note.index} of {tuple(note.shape)}",
                op="unknown" if node is None else node.name(),
                cause=self._cause(note, value, is_alike=is_alike),
                elements=value.numel(),
                differing_elements=value.numel() if is_alike else 0,
                detail=""
                if is_alike
                else f"{tuple(note.shape)} {note.dtype} became {tuple(value.shape)} {value.dtype}",
            )
        )

    def _cause(self, note: _Note, value: torch.Tensor, *, is_alike: bool) -> Cause:
        if not is_alike:
            return Cause.CHANGED_LAYOUT
        is_same_memory = not note.storage.expired() and note.storage.cdata == value.untyped_storage()._cdata
        return Cause.IN_PLACE_WRITE if is_same_memory else Cause.TRANSFER
