"""Counts live storages from outside, exactly and without torch's profiler: the user's view of a budget."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.artifacts.trace import Trace
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_none
from plimsoll.session import step_snapshot
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing import trace as tracing
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.tracing.recorder.calling import output_tensors, split_batch
from plimsoll.tracing.torch_internals import has_storage


def warm_peak(model: nn.Module, batch: Any) -> int:
    """The peak of a second step without an optimizer, by the product's own meter; it leaves no gradients."""
    model.zero_grad(set_to_none=True)
    step = TrainingStep(model, *split_batch(batch))
    step.measure_peak()
    found = step.measure_peak().peak_bytes
    model.zero_grad(set_to_none=True)
    return found


def loss_of(output: Any) -> torch.Tensor:
    """What the step calls backward on."""
    return getattr(output, "loss", output)


def transient_peak(model: nn.Module, *inputs: Any, **named: Any) -> int:
    """The measured peak of a warm step without an optimizer, above what was there before it."""
    gc.collect()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with PeakMeter() as meter:
            loss_of(model(*inputs, **named)).backward()
    return meter.window("start").peak_bytes


def simulated_transient_peak(step: Trace, device: str = "H100") -> int:
    """The same of a traced step, as it is simulated for a device."""
    index = StepIndex(step, roofline_costs(step, find_device(device)))
    before = sum(storage.bytes for storage in step.storages if storage.born < 0)
    return run_choices(index, choose_none(index, "")).peak_bytes - before


class LiveStorages(TorchDispatchMode):
    """Bytes of all storages that ops made since it was entered, and the most that were alive at once in each step.

    Make the model and everything else inside. A step lasts from one training call of a watched model to the next; what
    happens in between its hooks (tracing, trial runs) is no part of it. Kernels' workspaces are not seen. The random states
    that checkpointing holds are, which no op makes.
    """

    __module__ = "plimsoll.metering"  # to see both runs of every recorded op: modes of the user see one

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peaks: list[int] = []
        self._depth = 0
        self._is_counting = True
        self._is_loading = False
        self._loaded: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        """Of living storages: FSDP2 empties some and fills them again."""
        self.is_aside: Callable[[], bool] = lambda: False
        """Whether what runs now is no part of the step, where hooks of a model cannot tell."""

    def begin(self) -> None:
        """Begin a step."""
        self.peaks.append(self.bytes)

    def watch(self, model: nn.Module) -> None:
        """Begin a step at every training call, after whatever hooks are there already."""
        model.register_forward_pre_hook(lambda *_: self._enter(1), prepend=True)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(lambda *_: self._enter(-1), always_call=True)

    def _enter(self, change: int) -> None:
        self._depth += change
        self._is_counting = not self._depth

    def _begin(self, module: nn.Module, *batch: Any) -> None:
        if self._depth == 1:
            self._is_counting = True
            if torch.is_grad_enabled() and module.training:
                self.begin()
                given = {storage._cdata for storage in _storages(batch)}
                for storage in self._loaded:
                    self._count(storage._cdata, storage.nbytes() if storage._cdata in given else 0)

    def loading(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``collate``, each of whose batches counts in the call that takes it: others wait meanwhile, which are no step's."""

        def collated(rows: Any) -> Any:
            self._is_loading = True
            try:
                return collate(rows)
            finally:
                self._is_loading = False

        return collated

    def wait(self, batches: Any) -> None:
        """Know batches that were made outside: each counts in the call that takes it."""
        self._is_loading = True
        for storage in _storages(batches):
            self._note(storage)
        self._is_loading = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            self._note(storage)
        return made

    def __enter__(self) -> Self:
        resize = self._noting(torch.UntypedStorage.resize_)
        self._patches = (
            mock.patch.object(torch.UntypedStorage, "resize_", resize),
            mock.patch.object(torch, "get_rng_state", self._noting_state(torch.get_rng_state)),
        )
        for each in self._patches:
            each.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for each in self._patches:
            each.stop()
        super().__exit__(*error)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A watched model is copied with its hooks."""
        return self

    def _noting_state(self, get_state: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def noted() -> torch.Tensor:
            state = get_state()
            self._note(state.untyped_storage())
            return state

        return noted

    def _noting(self, resize: Any) -> Any:
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            made = resize(storage, size)
            if self._knows(storage):
                self._count(storage._cdata, size)
            return made

        return resized

    def _knows(self, storage: torch.UntypedStorage) -> bool:
        return self._alive.get(storage._cdata, lambda: None)() is storage

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "cpu" or self._knows(storage):
            return
        key = storage._cdata
        self._sizes.pop(key, None)
        self._alive[key] = weakref.ref(storage, lambda dead: self._let_go(key, dead))
        if self._is_loading:
            self._loaded.add(storage)
        self._count(key, 0 if self._is_loading else storage.nbytes())

    def _count(self, key: int, size: int) -> None:
        self.bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        if self.peaks and self._is_counting and not self.is_aside():
            self.peaks[-1] = max(self.peaks[-1], self.bytes)

    def _let_go(self, key: int, dead: Any) -> None:
        if self._alive.get(key) is dead:
            self.bytes -= self._sizes.pop(key)
            del self._alive[key]


def _storages(made: Any) -> list[torch.UntypedStorage]:
    """Those of the tensors in ``made``; a DTensor itself has one of the global size, which nobody allocates."""
    parts = [part for tensor in output_tensors(made) for part in dense_parts(tensor)]
    return [part.untyped_storage() for part in parts if has_storage(part)]


class Device(LiveStorages):
    """A device with so many bytes: raises what an allocator raises where ops would hold more, also at the op ``fails_at``.

    An op that allocates nothing does not fail for want of room. Copies that are kept of a step lie in host memory, which on
    a CPU has no other name.
    """

    def __init__(self, limit_bytes: int | None = None, *, fails_at: int = 0) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.fails_at = fails_at
        self.ops = 0
        self.failures = 0
        self._is_host = False

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[Device]:
        """The device of whatever runs in the block: Plimsoll asks it for free memory, and keeps copies beside it."""

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            self._is_host = True
            try:
                return copy(tensor)
            finally:
                self._is_host = False

        copy = step_snapshot.kept_copy
        with (
            mock.patch.object(step_snapshot, "kept_copy", kept),
            mock.patch.object(tracing, "free_bytes", self._free_bytes),
            self,
        ):
            yield self

    def _free_bytes(self, device: torch.device) -> int:
        return 2**40 if self.limit_bytes is None else self.limit_bytes - self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_host:
            return func(*args, **(kwargs or {}))
        self.ops += 1
        if self.ops == self.fails_at:
            self.failures += 1
            raise torch.OutOfMemoryError(f"injected at op {self.ops}")
        before_bytes = self.bytes
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if self.limit_bytes is not None and self.bytes > max(self.limit_bytes, before_bytes):
            self.failures += 1
            raise torch.OutOfMemoryError(f"{self.bytes} bytes of {self.limit_bytes}")
        return made
