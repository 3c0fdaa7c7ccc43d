"""Switches off saved-tensor hooks that are not Plimsoll's, or watches them and finds tensors that unpack to other contents.

``torch.utils.checkpoint``, selective checkpointing, ``save_on_cpu`` and the offloading contexts of trainers all enter
``torch.autograd.graph.saved_tensors_hooks``. The re-entrant form of checkpointing is an autograd function instead. Both are
patched while a block runs and restored at its end. Hooks do not run inside torch.compile, so nothing can be watched there.

A checksum of each tensor is taken when it is packed and compared when it is unpacked, so watching needs hardly any memory.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from plimsoll.artifacts.fault import Cause, Fault
from plimsoll.tracing.recorder.calling import ModuleStack
from plimsoll.tracing.recorder.storages import content_fingerprint, is_plain
from plimsoll.tracing.torch_internals import current_autograd_node, pop_saved_hooks, push_saved_hooks, without_modes

Hook = Callable[[Any], Any]
Wrap = Callable[[Hook, Hook], tuple[Hook, Hook]]

_KNOWN = {
    "_checkpoint_hook": "torch.utils.checkpoint",
    "_recomputation_hook": "",
    "save_on_cpu": "torch.autograd.graph.save_on_cpu",
}
REENTRANT = "torch.utils.checkpoint (re-entrant)"


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """A context without saved-tensor hooks and checkpointing: autograd keeps every tensor that it saves."""

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: object, *args: Any) -> Any:
            return function(*args)

    with _patched(lambda self: None, lambda self, *_: None, Plain):
        yield


@contextlib.contextmanager
def watched(wrap: Wrap) -> Iterator[Counter[str]]:
    """A context that passes each pair of saved-tensor hooks through ``wrap`` when code enters the hooks.

    The yielded counter maps each kind of hooks to how often it was entered.
    """
    found: Counter[str] = Counter()
    original = checkpointing.CheckpointFunction

    class Counted:
        @staticmethod
        def apply(*args: Any) -> Any:
            found[REENTRANT] += 1
            return original.apply(*args)

    def enter(self: saved_tensors_hooks) -> None:
        name = _name_of(self)
        if name:
            found[name] += 1
        push_saved_hooks(*wrap(self.pack_hook, self.unpack_hook))

    def leave(self: saved_tensors_hooks, *_: object) -> None:
        pop_saved_hooks()

    with _patched(enter, leave, Counted):
        yield found


def _name_of(hooks: saved_tensors_hooks) -> str:
    kind = type(hooks)
    if kind is saved_tensors_hooks:
        return f"saved-tensor hooks of {getattr(hooks.pack_hook, '__module__', '') or 'the model'}"
    return _KNOWN.get(kind.__name__, f"{kind.__module__}.{kind.__name__}")


@contextlib.contextmanager
def _patched(enter: Callable[..., None], leave: Callable[..., None], function: type) -> Iterator[None]:
    """A context that replaces the methods of saved-tensor hooks by ``enter`` and ``leave``, and re-entrant checkpointing by
    ``function``.

    Plimsoll's own hooks are entered and left as ever. They belong to a plan of another module, such as a teacher in the loss.
    """
    before = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__, checkpointing.CheckpointFunction

    def enter_others(self: saved_tensors_hooks) -> None:
        return (before[0] if _is_of_plimsoll(self) else enter)(self)

    def leave_others(self: saved_tensors_hooks, *error: object) -> None:
        return (before[1] if _is_of_plimsoll(self) else leave)(self, *error)

    saved_tensors_hooks.__enter__ = enter_others  # type: ignore[method-assign]
    saved_tensors_hooks.__exit__ = leave_others  # type: ignore[method-assign]
    checkpointing.CheckpointFunction = function  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = before[:2]  # type: ignore[method-assign]
        checkpointing.CheckpointFunction = before[2]  # type: ignore[misc]


def _is_of_plimsoll(hooks: saved_tensors_hooks) -> bool:
    return (getattr(hooks.pack_hook, "__module__", None) or "").startswith("plimsoll.engine.")


@dataclass(frozen=True, slots=True)
class _Note:
    """Data about one saved tensor, to compare it when it is unpacked: module, index, shape, dtype, checksum and storage."""

    module: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    fingerprint: int
    storage: StorageWeakRef

    @property
    def value(self) -> str:
        """The name of the tensor in a fault (a found difference)."""
        return f"saved tensor {self.index} of {self.shape}"


class SavedTensorWatch:
    """Compares each tensor that hooks unpack with the tensor that they packed.

    Args:
        root: the model; faults name its modules.
        is_unset: returns True if no op has written the memory of a tensor.
    """

    def __init__(self, root: nn.Module, is_unset: Callable[[torch.Tensor], bool] = lambda tensor: False) -> None:
        self.faults: list[Fault] = []
        self.unset: set[tuple[str, str]] = set()
        """Pairs of region (a module that the plan decides about) and value, named as in faults, of tensors whose memory no op
        has written.

        A difference of such a tensor does not say anything.
        """
        self._is_unset = is_unset
        self.compared = 0
        self.stack = ModuleStack()
        self._root = root
        self._counts: dict[str, int] = {}

    def watch_modules(self) -> Any:
        """Return a context that records which module of the model is running, to name it in faults."""
        return self.stack.watch(self._root)

    def wrap(self, pack: Hook, unpack: Hook) -> tuple[Hook, Hook]:
        """Return a pair of saved-tensor hooks that does the same as the given pair and checks it.

        Each unpacked tensor is compared with the packed one.
        """

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
        with without_modes():  # else selective checkpointing would cache the checksum's ops
            checksum = content_fingerprint(tensor)
            storage = StorageWeakRef(tensor.untyped_storage())
        note = _Note(path, index, tuple(tensor.shape), tensor.dtype, checksum, storage)
        if self._is_unset(tensor):
            self.unset.add((path, note.value))
        return note

    def _compare(self, note: _Note, value: torch.Tensor) -> None:
        self.compared += 1
        if not is_plain(value):
            return
        is_alike = tuple(value.shape) == note.shape and value.dtype is note.dtype
        if is_alike and content_fingerprint(value) == note.fingerprint:
            return
        node = current_autograd_node()
        self.faults.append(
            Fault(
                step=1,
                region=note.module,
                value=note.value,
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
