"""Finds what a training loop holds when a step begins: a copy of the weights, another optimizer's state, a failed step's graph.

Memory that exists before the first step does not count. From then on, the allocator is read at the beginning of every step.
Only if more is allocated than before, all tensors of the process are searched, which takes as long as a small step. If several
searches in a row find nothing (for instance because a data set is read into memory), the next search waits longer.

Some tensors do not count. Tensors that look like the batch are other batches that wait to be trained on. Tensors that grow by
about as much in two steps in a row are a record that the loop keeps, such as outputs for a metric.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from plimsoll.session.carried import Carried
from plimsoll.session.measured_step import held_tensors
from plimsoll.session.optimizer_watch import fast_weights, state_bytes_of
from plimsoll.session.step_levels import is_more
from plimsoll.tracing.fsdp2 import every_parameter
from plimsoll.tracing.local_tensors import is_wrapper
from plimsoll.tracing.meters.allocated import allocated_bytes
from plimsoll.tracing.meters.memory import live_saved_tensors, storage_bytes, storage_of
from plimsoll.tracing.recorder.calling import output_tensors

_MOST_PATIENCE = 64
"""The most steps that a search waits after searches that found nothing."""
_PATIENT_FROM = 8
"""From this many searches in a row that found nothing, the next one waits.

Planning allocates memory that is not in tensors, so searches in the first steps of each kind found nothing. When searches
waited after that, they missed a copy of the state for up to three micro-batches. Those exceeded the budget by 15% without a
message.
"""
_MOST_LEVELS = 8
_ALIKE = 4
"""Growth in two consecutive steps that differs by at most this factor is the growth of a record: batches vary in size."""


class _Level(NamedTuple):
    """What was read at the beginning of a step, as data: the allocated bytes, and the bytes that the loop held then."""

    reading: int
    bytes: int


class HeldByLoop:
    """Finds how many bytes the training loop holds at the beginning of a step, without parameters, gradients, buffers,
    optimizer state and the batch.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.carried = Carried()
        self.bytes = 0
        self.state_bytes = 0
        """Bytes of state of the optimizers that train the model, as the last search found them."""
        self.batch_bytes = 0
        """Bytes that the batch's storages have in addition to the batch's tensors: a slice keeps the whole storage alive."""
        self._model, self._device = model, device
        self._levels: dict[bool, list[_Level]] = {}
        """Readings at the beginning of earlier steps, the latest last. Steps that begin without gradients (False) and with
        gradients (True) have separate lists.
        """
        self._patience = self._waited = self._vain = 0
        self._fast_bytes = 0
        """The part of ``bytes`` (what the loop holds) in fast weights (tensors that replace parameters in a call)."""
        self._record_bytes = self._run_bytes = self._more_bytes = 0
        """Three numbers: the bytes of records (tensors that the loop collects, such as outputs for a metric), the bytes that
        the last steps in a row have added to them, and the bytes that the last of these steps has added.
        """

    def begin(
        self,
        reading: int | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        accumulates: bool,
        peak_bytes: int,
    ) -> None:
        """Called at the beginning of a step whose peak is about ``peak_bytes``. Find what the loop holds, and update
        ``bytes``.
        """
        self.carried.forget()
        self.batch_bytes = _hidden_in_batch(output_tensors((args, kwargs)), self._device)
        if reading is None:
            return
        if not self._levels:
            # Plans and the first measurement count the fast weights of this step. Those of later steps are other tensors.
            fast = fast_weights(self._model)
            self.bytes = self._fast_bytes = storage_bytes(self._with_saved(fast), self._device)
            self.carried.note_before(self._device)
        if accumulates not in self._levels:
            self._levels[accumulates] = [self._first_level(reading, accumulates=accumulates)]
        levels = self._levels[accumulates]
        last = levels[-1]
        # A loop may alternate between levels, for instance with a second pass at perturbed weights.
        level = next((each for each in reversed(levels) if _is_at(reading, each, peak_bytes)), None)
        if level is None and reading > last.reading:
            self._waited += 1
            if self._waited < self._patience:
                return
            # Collect garbage first. Copies of the model, which a loop makes and drops in every step, form reference cycles.
            # They piled up, and the step exceeded its budget by 0.5%.
            gc.collect()
            reading = allocated_bytes(self._device) or reading
            before_bytes = self.bytes + self.state_bytes
            if not _is_at(reading, last, peak_bytes):
                self._look(args, kwargs)
            has_found = self.bytes + self.state_bytes > before_bytes
            self._vain = 0 if has_found else self._vain + 1
            is_patient = self._vain >= _PATIENT_FROM
            self._patience = min(_MOST_PATIENCE, 2 * self._patience + 1) if is_patient else 0
            self._waited = 0
            level = _Level(reading, self.bytes)
        else:
            self._run_bytes = self._more_bytes = 0
            if level is None:
                self.bytes = last.bytes
                if last.bytes:
                    # The reading alone does not show whose memory was freed: a profiler's records were taken for a copy of
                    # the weights.
                    self._look(args, kwargs)
                level = _Level(reading, self.bytes)
                # Less is allocated than before. Forget higher levels at which the loop held nothing: other memory was freed.
                levels[:] = [each for each in levels if each.bytes or each.reading < reading]
        self.bytes = level.bytes
        if level in levels:
            levels.remove(level)
        levels.append(level)
        del levels[:-_MOST_LEVELS]

    def _first_level(self, reading: int, *, accumulates: bool) -> _Level:
        """Return the reading to compare with in the first step that begins with gradients, or the first that begins without. It
        is derived from the last step of the other kind.

        If less is allocated than that step and the gradients explain, the loop has freed what it held. Without this, a budget
        above the unmanaged (without a plan) peak of a learned loss was refused.
        """
        held_bytes = self.bytes
        if held_bytes and self._levels:
            (levels,) = self._levels.values()
            trained = [each for each in every_parameter(self._model) if each.requires_grad]
            gradient_bytes = storage_bytes(trained, self._device)  # gradients are as large as their parameters
            without_bytes = reading - gradient_bytes if accumulates else reading + gradient_bytes
            held_bytes = max(0, held_bytes - max(0, levels[-1].reading - without_bytes))
        return _Level(reading, held_bytes)

    def planned(self, added_bytes: int) -> None:
        """Note that making plans has allocated ``added_bytes`` since ``begin``, so that these bytes do not count as held by the
        loop.
        """
        if added_bytes:
            for levels in self._levels.values():
                levels[:] = [each._replace(reading=each.reading + added_bytes) for each in levels]

    def state_has_moved(self) -> None:
        """Note that optimizer state was offloaded or brought back. The size of it that was found before is not valid
        any more.
        """
        self.state_bytes = 0

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fast = fast_weights(self._model)
        made, places = self._with_saved(fast), frozenset(map(id, fast))
        counted = [each for each in held_tensors(self._model, args, kwargs) if id(each) not in places]
        carried = self.carried.found(self._device, (args, kwargs))
        fast_bytes = self._bytes_beside(made, counted)
        visible_bytes = self._bytes_beside([*made, *carried], counted) - fast_bytes
        was_visible_bytes, self._fast_bytes = self.bytes - self._fast_bytes, fast_bytes
        # Fast weights are not a record, even if a loop exchanges more of them from step to step.
        self.bytes = fast_bytes + self._without_records(max(0, visible_bytes - self._record_bytes), was_visible_bytes)
        self.state_bytes = state_bytes_of(self._model, self.carried.optimizers(self._device, (args, kwargs)))

    def _with_saved(self, fast: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return fast weights (tensors that replace parameters) together with the tensors that the graphs of fast weights have
        saved.
        """
        return [*fast, *live_saved_tensors(self._device.type, fast)]

    def _bytes_beside(self, tensors: Sequence[torch.Tensor], counted: Sequence[torch.Tensor]) -> int:
        """Return the bytes of the storages of ``tensors`` that are not storages of ``counted``."""
        return storage_bytes([*counted, *tensors], self._device) - storage_bytes(counted, self._device)

    def _without_records(self, visible_bytes: int, was_visible_bytes: int) -> int:
        """Subtract the bytes of records from ``visible_bytes``, and return the rest. Records are tensors that have grown by
        about as much in two consecutive steps.
        """
        more_bytes, before_bytes = max(0, visible_bytes - was_visible_bytes), self._more_bytes
        self._more_bytes = more_bytes
        # A copy of the weights and then a number that the loop keeps do not count as a record. Before, the whole copy did.
        is_record = more_bytes > 0 and before_bytes / _ALIKE <= more_bytes <= before_bytes * _ALIKE
        self._run_bytes = self._run_bytes + more_bytes if is_record else more_bytes
        if not is_record:
            return visible_bytes
        record_bytes = min(visible_bytes, self._run_bytes)
        self._record_bytes += record_bytes
        return visible_bytes - record_bytes


def _hidden_in_batch(batch: Iterable[torch.Tensor], device: torch.device) -> int:
    """Return the bytes of the batch's storages minus the bytes of its tensors on this device."""
    plain = [tensor for tensor in batch if tensor.layout is torch.strided and not is_wrapper(tensor)]
    shown: dict[int, int] = {}
    for tensor in plain:
        storage = storage_of(tensor)
        shown[storage] = shown.get(storage, 0) + tensor.numel() * tensor.element_size()
    sizes = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in plain if tensor.device == device}
    return sum(max(0, size - shown[storage]) for storage, size in sizes.items())


def _is_at(reading: int, level: _Level, scale_bytes: int) -> bool:
    return not is_more(max(reading, level.reading), min(reading, level.reading), scale_bytes)
