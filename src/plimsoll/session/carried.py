"""Finds the tensors that a training loop keeps from step to step."""

from __future__ import annotations

import time
import weakref
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from plimsoll.session.optimizer_watch import state_tensors
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.meters.memory import instances_of, live_saved_tensors, live_tensors, storage_of
from plimsoll.tracing.recorder.calling import output_tensors


class _Found(NamedTuple):
    """What a search has found, as data: tensors that the loop keeps, and all optimizers of the process."""

    tensors: list[weakref.ref[torch.Tensor]]
    optimizers: list[weakref.ref[Optimizer]]


class Carried:
    """Finds tensors that a loop keeps from step to step outside of model and optimizer, such as a list of perturbed weights.

    A tensor counts if its storage did not exist at ``note_before``. Tensors that look like the batch do not count: they are
    other batches that wait to be trained on. If an autograd graph has saved such a tensor, it counts: it is an activation.
    """

    def __init__(self) -> None:
        self._before: dict[int, StorageWeakRef] = {}
        self._found: _Found | None = None
        self.seconds = 0.0
        """The time that all searches have taken so far."""

    def note_before(self, device: torch.device) -> None:
        """Remember all storages that exist now. They do not count later: either they are not the loop's, or the user subtracts
        them from the budget.
        """
        live = live_tensors(device.type)
        self._before = {storage_of(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in live}

    def found(self, device: torch.device, batch: Any) -> list[torch.Tensor]:
        """Return the tensors that the loop keeps: those whose storage was made since `note_before`, without optimizer state and
        without tensors that look like the batch.

        A storage's address identifies it, because the weak references in `_before` prevent that its address is used again.
        """
        return [tensor for each in self._search(device, batch).tensors if (tensor := each()) is not None]

    def optimizers(self, device: torch.device, batch: Any) -> list[Optimizer]:
        """Return all optimizers of the process."""
        return [optimizer for each in self._search(device, batch).optimizers if (optimizer := each()) is not None]

    def forget(self) -> None:
        """Discard the result of the last search for tensors. The next question searches again, and later questions use its
        result.
        """
        self._found = None

    def _search(self, device: torch.device, batch: Any) -> _Found:
        if self._found is None:
            begun = time.perf_counter()
            things = instances_of(torch.Tensor, Optimizer)
            optimizers = [each for each in things if isinstance(each, Optimizer) and "param_groups" in vars(each)]
            tensors = self._among(
                [each for each in things if not isinstance(each, Optimizer)], optimizers, device, batch
            )
            self._found = _Found(list(map(weakref.ref, tensors)), list(map(weakref.ref, optimizers)))
            self.seconds += time.perf_counter() - begun
        return self._found

    def _among(
        self, known_tensors: list[torch.Tensor], optimizers: list[Optimizer], device: torch.device, batch: Any
    ) -> list[torch.Tensor]:
        # Optimizer state is counted elsewhere.
        states = (state_tensors(each) for each in optimizers if "state" in vars(each))
        known = {storage_of(part) for tensors in states for tensor in tensors for part in dense_parts(tensor)}
        looks = {(tensor.shape, tensor.dtype) for tensor in output_tensors(batch)}
        saved = {storage_of(tensor) for tensor in live_saved_tensors(device.type, known_tensors)}
        return [
            tensor
            for tensor in live_tensors(device.type, known_tensors)
            if storage_of(tensor) not in self._before
            and storage_of(tensor) not in known
            and ((tensor.shape, tensor.dtype) not in looks or storage_of(tensor) in saved)
        ]
