"""Saved-tensor hooks for tracing: every slot is noted and dropped, backward gets a placeholder.

So a traced step never holds more than one region's temporaries, whatever the model's saved activations would take, and
the life of a storage that the tracer sees is its life *without* what autograd saves. Floating-point placeholders are
zeros: nobody uses the gradients of a traced step. Of integers and booleans (indices, masks) a copy is kept, because backward
formulas index with them; the tracer does not see it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.tracing.local_tensors import Shell, unwrapped
from plimsoll.tracing.recorder.graph import SlotRecord
from plimsoll.tracing.recorder.storages import Geometry, is_plain
from plimsoll.tracing.tracer import StepTracer


class SlotBook:
    """The slots of one region call, or of all that lies outside of regions."""

    def __init__(
        self, tracer: StepTracer, is_parameter: Callable[[torch.Tensor], bool], *, holds_all: bool = False
    ) -> None:
        self.records: list[SlotRecord] = []
        self.order: list[int] = []
        self.is_parameter_slot: list[bool] = []
        self._tracer = tracer
        self._is_parameter = is_parameter
        self._holds_all = holds_all

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Note what autograd saves; pushed past ``saved_tensors_hooks``, which may be switched off for the model's own."""
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
        try:
            yield
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def pack(self, tensor: torch.Tensor) -> _Placeholder:
        """Note the slot; hold the tensor only if a placeholder could not stand for it. Of a DTensor: the local shard."""
        tracer = self._tracer
        tensor, shell = unwrapped(tensor)
        if shell is not None:
            shell.let_go()
        is_parameter = self._is_parameter(tensor)
        value = -1 if is_parameter else tracer.value_of(tensor)
        storage = tracer.table.find(tensor) if is_plain(tensor) else -1
        self.records.append(SlotRecord(value=value, storage=storage, packed=tracer.tick))
        self.is_parameter_slot.append(is_parameter)
        with tracer.unseen():
            is_value = tensor.dtype.is_floating_point and is_plain(tensor) and not is_parameter
            can_stand_in = is_value and not self._holds_all
            held = None if can_stand_in else tensor.detach()
            if held is not None and value >= 0 and not self._holds_all and is_plain(tensor):
                held = _copy(held)
        return _Placeholder(self, len(self.records) - 1, Geometry.of(tensor), tensor.device, held, shell)

    def unpack(self, placeholder: Any) -> torch.Tensor:
        """Note the reading and hand out something of the right shape."""
        record = self.records[placeholder.index]
        if record.unpacked < 0:
            record.unpacked = self._tracer.tick
            self.order.append(placeholder.index)
        stand_in: torch.Tensor = placeholder.stand_in(self._tracer)
        if placeholder.shell is None:
            return stand_in
        with self._tracer.unseen():
            shown: torch.Tensor = placeholder.shell.around(stand_in)
        return shown

    def released(self, index: int) -> None:
        self.records[index].released = self._tracer.tick


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same geometry on memory of its own; the tensor itself where elements share memory."""
    copy = tensor.clone()
    return copy if copy.stride() == tensor.stride() else tensor


class _Placeholder:
    """What autograd holds instead of the tensor; its end of life is the slot's release."""

    __slots__ = ("_book", "_device", "_geometry", "_held", "index", "shell")

    def __init__(
        self,
        book: SlotBook,
        index: int,
        geometry: Geometry,
        device: torch.device,
        held: torch.Tensor | None,
        shell: Shell | None,
    ) -> None:
        self._book = book
        self.index = index
        self.shell = shell
        self._geometry = geometry
        self._device = device
        self._held = held

    def stand_in(self, tracer: StepTracer) -> torch.Tensor:
        if self._held is not None:
            if tracer.table.find(self._held) < 0:
                tracer.add_stand_in(self._held)
            return self._held
        geometry = self._geometry
        with tracer.unseen():
            tensor = torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype, device=self._device)
            if not isinstance(tensor, FakeTensor):  # which has nothing to set to zero
                tensor.zero_()
        tracer.add_stand_in(tensor)
        return tensor

    def __del__(self) -> None:
        self._book.released(self.index)
