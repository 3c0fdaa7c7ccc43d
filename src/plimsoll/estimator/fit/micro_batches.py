"""A sample batch, or a function that makes one, in; batches of any micro-batch size and sequence out.

Of a sample, examples are repeated or left out along the first dimension of every tensor that has as many entries there as the
first one; with tokens (a two-dimensional tensor of integers) so are positions along the second one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from plimsoll.errors import InvalidBatch, InvalidOption
from plimsoll.estimator.fit.point import Shape
from plimsoll.session.request import split_detached
from plimsoll.tracing.recorder.calling import call_tensors

MakeBatch = Callable[[int, int], Any]


class MicroBatches:
    """Makes batches. ``items_name`` is what their size counts: ``tokens`` or ``examples``."""

    def __init__(self, batch: Any, sequences: tuple[int, ...] | None) -> None:
        self._make: MakeBatch | None = None
        if callable(batch) and not isinstance(batch, torch.Tensor):
            self._make = batch
            self.sequences = sequences or (1,)
            self.items_name = "tokens" if sequences else "examples"
            return
        self._sample = batch
        args, kwargs = split_detached(batch)
        tokens = _tokens(args, kwargs)
        first = next((tensor for tensor in call_tensors(args, kwargs) if tensor.dim() > 0), None)
        if first is None or not first.shape[0]:
            raise InvalidBatch(
                "The batch has no tensor with examples in it."
                if first is None
                else f"The batch's first tensor, of shape {tuple(first.shape)}, has no examples in it.",
                why="its size is what is to be found",
                next="pass tensors with the examples along their first dimension, or batch=lambda size, sequence: ...",
            )
        self._examples = first.shape[0]
        self._positions = 0 if tokens is None else tokens.shape[1]
        self.items_name = "examples" if tokens is None else "tokens"
        if tokens is None and sequences:
            raise InvalidOption(
                "sequences= has no effect on this batch.",
                why="it has no two-dimensional tensor of token ids whose length could be varied",
                next="leave it out, or pass batch=lambda size, sequence: ...",
            )
        self.sequences = sequences or (self._positions or 1,)

    def of(self, shape: Shape) -> Any:
        """A batch of this shape."""
        if self._make is not None:
            return self._make(shape.batch, shape.sequence)
        return tree_map_only(torch.Tensor, lambda tensor: self._resized(tensor, shape), self._sample)

    def _resized(self, tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != self._examples:
            return tensor
        resized = tensor.detach().index_select(0, _cycle(shape.batch, self._examples, tensor.device))
        if self._positions and tensor.dim() > 1 and tensor.shape[1] == self._positions:
            resized = resized.index_select(1, _cycle(shape.sequence, self._positions, tensor.device))
        return resized.requires_grad_(tensor.requires_grad)


def _cycle(count: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device="cpu").remainder(length).to(device)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The token ids of a batch."""
    named = kwargs.get("input_ids")
    if isinstance(named, torch.Tensor) and named.dim() == 2:
        return named
    found = (tensor for tensor in call_tensors(args, kwargs) if tensor.dim() == 2)
    return next((tensor for tensor in found if not tensor.is_floating_point()), None)
