"""Notice, before it runs, a call of a region that is larger than all calls before it.

Sizes inside a model may depend on the data: a model drops padding before its blocks, draws more samples, prunes tokens. The
shapes of the batch do not show that, but the inputs of the regions do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from plimsoll.tracing.local_tensors import local_of
from plimsoll.tracing.torch_internals import without_torch_function


class Listener(Protocol):
    """Is called when a region notices a larger call or a new order."""

    def __call__(self, text: str, /, *, is_reordered: bool) -> None:
        """``text`` is a sentence for a warning; ``is_reordered``: regions run in another order than before."""


class LargerCalls:
    """Passes the regions' notices on to the listener."""

    def __init__(self) -> None:
        self.listener: Listener | None = None

    def say(self, text: str, *, is_reordered: bool = False) -> None:
        """Call the listener, if one is set."""
        if self.listener is not None:
            self.listener(text, is_reordered=is_reordered)


class LargestCall:
    """The largest call of one region in bytes of its inputs, for each state of its modules and parameters."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bytes: dict[object, int] = {}

    def note(self, state: object, inputs: Iterable[torch.Tensor], larger: LargerCalls) -> None:
        """Note the inputs of a call that differs from those before it, and report it if it may save more than any of them."""
        with without_torch_function():  # the user's function modes do not see that sizes are read
            received_bytes = sum(local_of(each).numel() * each.element_size() for each in inputs)
        most_bytes = self._bytes.get(state, -1)
        if received_bytes <= most_bytes:
            return
        if most_bytes >= 0:
            larger.say(
                f"region {self._name!r} received {received_bytes:,} bytes of inputs, and at most {most_bytes:,} before"
            )
        elif self._bytes:
            larger.say(f"region {self._name!r} has other modules or other trainable parameters than before")
        self._bytes[state] = received_bytes
