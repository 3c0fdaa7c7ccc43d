"""Notices, before it runs, a call of a region that is larger than all calls before it.

Sizes inside a model may follow the data: it drops padding before its blocks, draws more samples, prunes tokens. The shapes of
the batch do not show that. The inputs of the regions do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from plimsoll.tracing.local_tensors import local_of
from plimsoll.tracing.torch_internals import without_torch_function


class Listener(Protocol):
    """Hears what regions notice."""

    def __call__(self, text: str, /, *, is_reordered: bool) -> None:
        """``text`` is a sentence for a warning; ``is_reordered``: regions run in another order than before."""


class LargerCalls:
    """Passes on what regions notice."""

    def __init__(self) -> None:
        self.listener: Listener | None = None

    def say(self, text: str, *, is_reordered: bool = False) -> None:
        """Tell the listener."""
        if self.listener is not None:
            self.listener(text, is_reordered=is_reordered)


class LargestCall:
    """The largest call of one region, in bytes of its inputs, for each state that its modules and parameters were in."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bytes: dict[object, int] = {}

    def note(self, state: object, inputs: Iterable[torch.Tensor], larger: LargerCalls) -> None:
        """A call begins that is unlike those before it; say so if it may save more than any of them."""
        with without_torch_function():  # function modes of the user do not see that sizes are read
            received_bytes = sum(local_of(each).numel() * each.element_size() for each in inputs)
        most_bytes = self._bytes.get(state, -1)
        if received_bytes <= most_bytes:
            return
        if most_bytes >= 0:
            larger.say(f"region {self._name!r} received {received_bytes:,} bytes, and at most {most_bytes:,} before")
        elif self._bytes:
            larger.say(f"the modules of region {self._name!r}, or which of its parameters are trained, have changed")
        self._bytes[state] = received_bytes
