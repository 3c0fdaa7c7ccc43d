"""Saved-tensor hooks of others (activation checkpointing, offloading contexts) in; the same switched off, or watched, out.

``torch.utils.checkpoint``, selective checkpointing, ``save_on_cpu`` and the offloading contexts of trainers all enter a
``torch.autograd.graph.saved_tensors_hooks``; the re-entrant form of checkpointing is an autograd function of its own. Both
are patched for as long as a block runs, and put back at its end. Below torch.compile no hook runs, and nothing is seen.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch.autograd.graph import saved_tensors_hooks

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
    """No hook is entered and nothing is checkpointed: autograd keeps every tensor, as in the plain model."""

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: object, *args: Any) -> Any:
            return function(*args)

    with _patched(lambda self: None, lambda self, *_: None, Plain):
        yield


@contextlib.contextmanager
def watched(wrap: Wrap) -> Iterator[Counter[str]]:
    """Every pair of hooks that is entered is wrapped; the counter says what was entered, and how often."""
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
        torch._C._autograd._push_saved_tensors_default_hooks(*wrap(self.pack_hook, self.unpack_hook))

    def leave(self: saved_tensors_hooks, *_: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()

    with _patched(enter, leave, Counted):
        yield found


def _name_of(hooks: saved_tensors_hooks) -> str:
    kind = type(hooks)
    if kind is saved_tensors_hooks:
        return f"saved-tensor hooks of {getattr(hooks.pack_hook, '__module__', '') or 'the model'}"
    return _KNOWN.get(kind.__name__, f"{kind.__module__}.{kind.__name__}")


@contextlib.contextmanager
def _patched(enter: Callable[..., None], leave: Callable[..., None], function: type) -> Iterator[None]:
    before = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__, checkpointing.CheckpointFunction
    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    saved_tensors_hooks.__exit__ = leave  # type: ignore[method-assign]
    checkpointing.CheckpointFunction = function  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__ = before[:2]  # type: ignore[method-assign]
        checkpointing.CheckpointFunction = before[2]  # type: ignore[misc]
