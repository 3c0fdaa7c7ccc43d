"""Elements of a dropped slot from forward and from its rebuilt value in; an error if any bit differs out.

On a CPU they are compared on the spot. A comparison on a GPU would make the host wait for the device at every slot, so
there each one leaves a flag on the device, and all flags of a backward pass are read once, when it ends: still before the
optimizer can step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from plimsoll.tracing.recorder.storages import INTEGER_OF_SIZE, Geometry

SAMPLE_SIZE = 16

Failure = Callable[[], None]
"""Raises the error that belongs to one comparison."""


class DeferredChecks:
    """Flags of one backward pass, read together when it ends."""

    def __init__(self) -> None:
        self._flags: list[torch.Tensor] = []
        self._failures: list[Failure] = []
        self._task = -1

    def add(self, flag: torch.Tensor, fail: Failure) -> None:
        """Note a flag (true: the bits differ); ``fail`` raises if it turns out to be set."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._flags, self._failures, self._task = [], [], task
            torch.autograd.Variable._execution_engine.queue_callback(self._settle)
        self._flags.append(flag)
        self._failures.append(fail)

    def _settle(self) -> None:
        flags, failures = self._flags, self._failures
        self._flags, self._failures, self._task = [], [], -1
        if not flags or not bool(torch.stack(flags).any()):
            return
        next(fail for flag, fail in zip(flags, failures, strict=True) if bool(flag))()


@dataclass(frozen=True, slots=True)
class SentinelPolicy:
    """What the regions of one managed model share: check in every ``every``-th call, and the checks still to be read."""

    every: int = 1
    deferred: DeferredChecks = field(default_factory=DeferredChecks)


def must_defer(device_type: str) -> bool:
    """Whether comparing on the spot would make the host wait for the device."""
    return device_type != "cpu" and torch._C._current_graph_task_id() != -1


def sample_geometry(geometry: Geometry) -> tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype] | None:
    """Size, stride, offset and integer type of up to 16 elements of a tensor, spread over it where it is dense."""
    count = math.prod(geometry.size)
    if count == 0 or geometry.dtype.itemsize not in INTEGER_OF_SIZE or geometry.dtype.is_complex:
        return None
    integers = INTEGER_OF_SIZE[geometry.dtype.itemsize]
    span = 1 + sum((size - 1) * stride for size, stride in zip(geometry.size, geometry.stride, strict=True))
    if span == count:
        return (min(SAMPLE_SIZE, count),), (max(1, count // SAMPLE_SIZE),), geometry.offset, integers
    size, stride = max(zip(geometry.size, geometry.stride, strict=True))
    return (min(SAMPLE_SIZE, size),), (stride,), geometry.offset, integers
