"""Puts a model and a batch back as they were after a step that does not count: gradients, buffers, flags, random state.

Planning, attaching and verifying run steps on the user's own model. What they leave behind is decided here: nothing.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from plimsoll.errors import PlimsollError
from plimsoll.tracing.fsdp2 import KeptShards, sharded_parameters
from plimsoll.tracing.local_tensors import local_of
from plimsoll.tracing.recorder.storages import is_plain, same_contents


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Leave the model as it was: gradients, buffers, training flags and the random state are put back at the end.

    A model under ``fully_shard`` is ready for its next step, also where this one failed on the way. Hooks on parameters (an
    optimizer that steps in backward) and reductions that are not torch's own do not run in the block. Gradients that exist
    are replaced by zeros of their shape while the block runs (so that accumulating into them costs what it will cost), and
    are never written.
    """
    parameters = list(dict.fromkeys([*model.parameters(), *sharded_parameters(model)]))
    gradients = [parameter.grad for parameter in parameters]
    buffers = KeptBuffers(model)
    shards = KeptShards(model)
    hooks = [(table, dict(table)) for table in filter(None, map(_hooks_of, parameters))]
    flags = [(module, module.training) for module in model.modules()]
    devices = sorted({parameter.device.index or 0 for parameter in parameters if parameter.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            for table, _ in hooks:
                table.clear()
            for parameter in parameters:
                parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
            yield
        except PlimsollError as error:
            # Before 2.13 torch.utils.checkpoint lets go of its hooks only when the frame that failed goes.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            shards.put_back()
            for table, entries in hooks:
                table.update(entries)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for module, flag in flags:
                module.training = flag
            buffers.put_back()


def _hooks_of(parameter: torch.Tensor) -> dict[int, Any] | None:
    """What runs when the gradient is complete: torch 2.9 to 2.13 hold it in this dict, which handles know too."""
    found: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return found


class KeptBuffers:
    """What a model's buffers are and hold now, to be put back later: also where a step binds new tensors in their places."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module._buffers, name, buffer, buffer.detach().clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def put_back(self) -> None:
        """The same tensors in their places, with the contents that they had; those that nobody wrote are not touched."""
        with torch.no_grad():
            for holder, name, buffer, copy, version in self._kept:
                if holder.get(name) is not buffer:
                    holder[name] = buffer
                # A write that no version counter shows (batch norm's) must not go unnoticed.
                if buffer._version != version or not (
                    buffer.is_meta or same_contents(local_of(buffer), local_of(copy))
                ):
                    buffer.copy_(copy)


@contextlib.contextmanager
def forwards_kept(model: nn.Module) -> Iterator[None]:
    """Put back every ``forward`` that a call exchanges: a trainer's redirection lasts for one call, and that is the user's."""
    before = [(module.__dict__, module.__dict__.get("forward")) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, forward in before:
            if forward is not None:
                attributes["forward"] = forward
            else:
                attributes.pop("forward", None)


def private_copy(batch: Any) -> Any:
    """The batch on storages of its own, so that a model may write to its inputs; what shared a storage still does."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if not is_plain(tensor) or tensor.is_meta or not tensor.is_leaf:
            return tensor
        source = tensor.untyped_storage()
        if source._cdata not in storages:
            storages[source._cdata] = source.clone()
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        fresh.set_(storages[source._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
        return fresh.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, copy, batch)
