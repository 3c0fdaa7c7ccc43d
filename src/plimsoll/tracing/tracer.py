"""Ops of a running step in; ticks, lives of storages and seconds per op out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import OpSpec, Phase
from plimsoll.recording.opkey import op_spec
from plimsoll.recording.recorder import OpRecorder, RecordedOp, RecordedValue, Signature


@dataclass(slots=True)
class OpContext:
    """Where an op ran: its phase and the autograd node that ran it (``-1`` in forward)."""

    phase: Phase
    node: int
    node_name: str


class StepTracer(OpRecorder):
    """Logs a whole step. One recorded op is one tick; between two ops it looks which storages have died."""

    def __init__(self, current_module: Callable[[], str], clock: Clock | None) -> None:
        super().__init__(current_module)
        self.phase = Phase.FORWARD
        self.contexts: list[OpContext] = []
        self.specs: dict[str, OpSpec] = {}
        self.timings: dict[str, list[float]] = {}
        self.born: dict[int, int] = {}
        self.dies: dict[int, int] = {}
        self._alive: list[int] = []
        self._first: dict[int, int] = {}
        self._previous: dict[int, int] = {}
        self._clock = clock

    @property
    def tick(self) -> int:
        """The tick of the op that runs next."""
        return len(self.ops)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Run ops that do not belong to the step."""
        before, self.suspended = self.suspended, True
        try:
            yield
        finally:
            self.suspended = before

    def add_static(self, tensor: torch.Tensor, origin: Origin, name: str) -> int:
        """Something that is there before the step and stays."""
        value = self.add_leaf(tensor, origin, name)
        self.born.setdefault(self.values[value].storage, -1)
        return value

    def execute(self, op: RecordedOp, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature) -> Any:
        self.note_deaths()
        key = op.cost_key
        if self._clock is None:
            out = op.func(*args, **kwargs)
        else:
            out, seconds = self._clock.time(key, lambda: op.func(*args, **kwargs))
            self.timings.setdefault(key, []).append(seconds)
        if key not in self.specs:
            self.specs[key] = op_spec(op.func, args, kwargs, out)
        return out

    def first_value(self, storage: int) -> RecordedValue:
        """The value that a storage had when the tracer met it."""
        return self.values[self._first[storage]]

    def value_at(self, tensor: torch.Tensor, tick: int) -> int:
        """The value that the tensor showed when op ``tick`` had not run yet, ``-1`` if it was not known then."""
        value = self.value_of(tensor)
        if value < 0:
            return -1
        storage = self.values[value].storage
        while value >= 0 and self.values[value].producer >= tick:
            value = self._previous.get(value, -1)
        return value if value >= 0 and self.values[value].storage == storage else -1

    def note_deaths(self) -> None:
        """Write down the storages that died since the last op."""
        tick, is_alive = self.tick, self.table.is_alive
        still: list[int] = []
        for storage in self._alive:
            if is_alive(storage):
                still.append(storage)
            else:
                self.dies[storage] = tick
        self._alive = still

    def _close(
        self, op: RecordedOp, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
    ) -> None:
        before = len(self.ops)
        super()._close(op, out, args, kwargs, signature)
        if len(self.ops) == before:
            return
        node = torch._C._current_autograd_node()
        self.contexts.append(
            OpContext(self.phase, -1, "")
            if node is None
            else OpContext(self.phase, node._sequence_nr(), node.name())
        )
        for storage in op.births:
            self.born[storage] = before
            self._alive.append(storage)

    def _new_version(self, old: RecordedValue, name: str, producer: int) -> int:
        fresh = super()._new_version(old, name, producer)
        self._previous[fresh] = old.id
        return fresh

    def _new_value(self, storage: int, tensor: torch.Tensor, origin: Origin, name: str, producer: int) -> int:
        if origin is Origin.EXTERNAL:
            self.born.setdefault(storage, -1)
            self._alive.append(storage)
        fresh = super()._new_value(storage, tensor, origin, name, producer)
        self._first[storage] = fresh
        return fresh


class Clock:
    """Seconds of one op on the device, and its hidden workspace the first time that its key is seen."""

    def time(self, key: str, run: Callable[[], Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        out = run()
        return out, time.perf_counter() - start


class CudaClock(Clock):
    """Waits for the device around every op: slow, but each op's own seconds."""

    def time(self, key: str, run: Callable[[], Any]) -> tuple[Any, float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        out = run()
        end.record()
        end.synchronize()
        return out, begin.elapsed_time(end) / 1e3
