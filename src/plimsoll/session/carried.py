"""Finds the tensors that a training loop keeps from step to step."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from plimsoll.session.optimizer_watch import state_tensors
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.meters.memory import instances_of, live_saved_tensors, live_tensors, storage_of
from plimsoll.tracing.recorder.calling import output_tensors


class Carried:
    """Finds tensors that a loop keeps from step to step outside of model and optimizer, such as a list of perturbed weights.

    A tensor counts if its storage did not exist at ``note_before``. Tensors that look like the batch do not count: they are
    other batches that wait to be trained on. If an autograd graph has saved such a tensor, it counts: it is an activation.
    """

    def __init__(self) -> None:
        self._before: dict[int, StorageWeakRef] = {}

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
        # Optimizer state is counted elsewhere.
        states = (state_tensors(each) for each in instances_of(Optimizer) if "state" in vars(each))
        known = {storage_of(part) for tensors in states for tensor in tensors for part in dense_parts(tensor)}
        looks = {(tensor.shape, tensor.dtype) for tensor in output_tensors(batch)}
        saved = {storage_of(tensor) for tensor in live_saved_tensors(device.type)}
        return [
            tensor
            for tensor in live_tensors(device.type)
            if storage_of(tensor) not in self._before
            and storage_of(tensor) not in known
            and ((tensor.shape, tensor.dtype) not in looks or storage_of(tensor) in saved)
        ]
