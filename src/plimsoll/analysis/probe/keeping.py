"""A model in; the same model after whatever trained it: parameters, buffers, gradients, flags and random state come back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from plimsoll.analysis.probe.randomness import own_randomness
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.recorder.untouched import untouched


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters (of sharded ones this rank's shards) and buffers on the host."""

    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]


def take_weights(model: nn.Module) -> Weights:
    """A copy of all parameters and buffers."""
    return Weights(
        [parameter.detach().to("cpu", copy=True) for parameter in _parameters(model)],
        [buffer.detach().to("cpu", copy=True) for buffer in model.buffers()],
    )


def put_weights(model: nn.Module, weights: Weights) -> None:
    """Write parameters and buffers into the model's own tensors."""
    _put(_parameters(model), model, weights)


def _put(parameters: Sequence[torch.Tensor], model: nn.Module, weights: Weights) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, weights.parameters, strict=True):
            parameter.copy_(value)
        for buffer, value in zip(model.buffers(), weights.buffers, strict=True):
            buffer.copy_(value)


@contextlib.contextmanager
def trainable_copy(model: nn.Module) -> Iterator[Weights]:
    """Let the block train the model; afterwards everything is as it was, the version counters of its tensors as well.

    What the model held is kept on the host, so that the device has room for one set of weights only.
    """
    # Now, while all are there: a step of a sharded model that fails may leave gathered ones in their places.
    parameters = _parameters(model)
    tensors = [*parameters, *model.buffers()]
    with own_randomness(), _unsafe_preserve_version_counter(tuple(tensors)), untouched(model):
        original = take_weights(model)
        try:
            yield original
        finally:
            _put(parameters, model, original)


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return [part for parameter in model.parameters() for part in dense_parts(parameter)]
