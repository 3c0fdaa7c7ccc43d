"""Notice a call of a region (a module that the plan decides about) with larger inputs than in all its earlier calls, before the
region runs.

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
    """A function that is called when a region gets larger inputs than before, or when regions run in a new order."""

    def __call__(self, text: str, /, *, is_reordered: bool) -> None:
        """Handle a report of a larger call or another order of regions.

        ``text`` is a sentence for a warning. ``is_reordered`` says whether regions run in another order than before.
        """


class LargerCalls:
    """Reports calls of regions with larger inputs than before, or in another order, to a function (the listener).

    `plimsoll.session` sets the listener to measure such steps. Without a listener nothing is reported.
    """

    def __init__(self) -> None:
        self.listener: Listener | None = None

    def say(self, text: str, *, is_reordered: bool = False) -> None:
        """Pass a sentence to the listener, if one is set. The sentence describes a larger call or a new order of regions."""
        if self.listener is not None:
            self.listener(text, is_reordered=is_reordered)


class LargestCall:
    """Remembers the largest call of one region so far, measured by the bytes of its inputs.

    The largest bytes are stored separately for each state of the region's modules and parameters (such as training mode).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._bytes: dict[object, int] = {}

    def note(self, state: object, inputs: Iterable[torch.Tensor], larger: LargerCalls) -> None:
        """Note the inputs of a call of the region. Report the call if it may save more bytes than all calls before it.

        ``state`` is hashable and identifies the state of the region's modules and parameters.
        """
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
