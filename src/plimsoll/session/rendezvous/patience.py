"""A loss that may fail in, one that lets the step come to its end first, out."""

from __future__ import annotations

from typing import Any

import torch

from plimsoll.tracing.recorder.calling import Loss, output_tensors


class Patient:
    """Calls a loss; where that fails, keeps the error for later and returns a number that depends on the whole output.

    Backward of that number runs through the whole model, so collectives in it find the ranks whose loss did not fail.

    Args:
        loss: as the user gave it.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._failure: Exception | None = None
        # The name by which the signature of a step knows its loss.
        self.__qualname__ = getattr(loss, "__qualname__", type(loss).__qualname__)

    def __call__(self, output: Any) -> torch.Tensor:
        try:
            return self._loss(output)
        except Exception as error:  # a user's function may raise anything; it is raised when the step is over
            parts = [t.float().sum() for t in output_tensors(output) if t.requires_grad and t.is_floating_point()]
            if not parts:
                raise
            self._failure = self._failure or error
            return torch.stack(parts).sum()

    def raise_failure(self) -> None:
        """Raise what the loss raised first, if it failed; the next steps start anew."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
