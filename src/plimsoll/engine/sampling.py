"""Sentinels: a few elements of dropped tensors are kept, and the rebuilt tensors must have the same bits there.

Recipes run recorded ops on what a call saved. Where a call has done something else than the recorded one and the guards have
not seen it (a constant inside a C++ extension, say), the samples differ, and the step stops before the optimizer can use the
gradients. Samples lie a stride apart that no dimension divides, so they meet all rows and all features, and elsewhere in
every call.

On a CPU they are compared on the spot. A comparison on a GPU would make the host wait for the device at every slot, so
there each one leaves a flag on the device, and all flags of a backward pass are read once, when it ends: still before the
optimizer can step. No samples are taken while a CUDA graph is captured: the host could not read the flags of its replays.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plimsoll.artifacts.region import Origin
from plimsoll.engine.capturing import is_capturing
from plimsoll.engine.replay_plan import ReplayPlan
from plimsoll.engine.sample_sinks import covers, sinks
from plimsoll.tracing.recorder.storages import INTEGER_OF_SIZE, Geometry, same_bits
from plimsoll.tracing.torch_internals import at_end_of_backward, current_graph_task

SAMPLE_SIZE = 16
_STRIDE_OF_CALLS = 2654435761
"""A prime: samples of consecutive calls lie far apart, and come everywhere."""

_INTEGERS: dict[torch.dtype, type[ctypes._SimpleCData[int]]] = {
    torch.uint8: ctypes.c_uint8,
    torch.int16: ctypes.c_int16,
    torch.int32: ctypes.c_int32,
    torch.int64: ctypes.c_int64,
}

Sample = tuple["SamplePlaces", int, Any]
"""Its places, where it starts, and its elements as integers: a list on a CPU, where that is the cheapest, a tensor on other
devices.
"""

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
        task = current_graph_task()
        if task != self._task:  # the first of this backward; flags of one that failed half-way are forgotten
            self._flags, self._failures, self._task = [], [], task
            at_end_of_backward(self._settle)
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


class Sampler:
    """Takes and compares the sentinels of one region: values that are packed exactly, and the sinks of those that recipes make
    (see ``sample_sinks``).

    ``like`` samples calls with other numbers.
    """

    def __init__(self, plan: ReplayPlan, policy: SentinelPolicy, like: Sampler | None = None) -> None:
        self._plan = plan
        self._policy = policy
        self._device_type = plan.device_type
        self._sentinels: dict[int, SamplePlaces] = {}
        self._use(sentinel_slots(plan, plan.dropped_slots) if like is None else tuple(like._sentinels))

    def expect(self, read: Sequence[int]) -> None:
        """Backward reads these slots and no others: what shows in another one is not compared with it."""
        self._use(sentinel_slots(self._plan, read))

    def _use(self, slots: Iterable[int]) -> None:
        geometries = self._plan.recording.slot_geometries
        places = {slot: self._sentinels.get(slot) or SamplePlaces.of(geometries[slot]) for slot in slots}
        self._sentinels = {slot: found for slot, found in places.items() if found is not None}

    def take(self, tensors: Sequence[torch.Tensor], number: int) -> dict[int, Sample]:
        """Elements of the sentinel slots of the ``number``-th call, as integers: bits are compared, not values. Called
        below autograd.
        """
        if not self._sentinels or number % self._policy.every or is_capturing(self._device_type):
            return {}
        samples: dict[int, Sample] = {}
        for slot, places in self._sentinels.items():
            offset, tensor = places.offset(number), tensors[slot]
            samples[slot] = (
                places,
                offset,
                places.peek(offset, tensor) if tensor.is_cpu else places.at(offset, tensor).clone(),
            )
        return samples

    def check(self, slot: int, taken: Sample, value: torch.Tensor, fail: Callable[[int], None]) -> None:
        """Call ``fail`` with the slot if a rebuilt tensor differs from its sample in any bit (on a GPU: when backward ends)."""
        places, offset, sample = taken
        if value.is_cpu and places.peek(offset, value) == sample:
            return
        again = places.at(offset, value)
        if value.is_cpu:
            sample = torch.tensor(sample, dtype=again.dtype, device=again.device)
        elif is_capturing(value.device.type):  # of backward alone: the flag could not be read
            return
        elif must_defer(value.device.type):
            self._policy.deferred.add((sample != again).any(), functools.partial(fail, slot))
            return
        elif torch.equal(sample, again):
            return
        # NaN has many bit patterns, and which one an op makes is not defined: any NaN is as good as another.
        is_number = value.is_floating_point() or value.is_complex()
        if is_number and same_bits(sample.view(value.dtype), again.clone().view(value.dtype)):
            return
        fail(slot)


def sentinel_slots(plan: ReplayPlan, read: Sequence[int]) -> tuple[int, ...]:
    """The slots to sample if backward reads these ones: of each value that is to be sampled as many as show all of it."""
    graph, geometries = plan.graph, plan.recording.slot_geometries
    slots: dict[int, list[int]] = {}
    for slot in sorted(set(plan.exact_slots).intersection(read)):
        if SamplePlaces.has_any(geometries[slot]):
            slots.setdefault(graph.slots[slot].value, []).append(slot)
    packed = plan.codecs.keys() & slots.keys()
    made = {value for value in slots.keys() - packed if graph.values[value].origin is Origin.OP}
    chosen = sinks(graph, plan.recording, plan.ops_for(read), made, plan.filled)
    found: list[int] = []
    for value in sorted(chosen | packed):
        parts: dict[int, int] = {}
        """By the place where it starts the slot that shows it."""
        for slot in sorted(slots[value], key=lambda each: -math.prod(geometries[each].size)):
            if not covers([geometries[each] for each in parts.values()], plan.geometry_of(value)):
                parts.setdefault(geometries[slot].offset, slot)
        found += parts.values()
    return tuple(found)


def must_defer(device_type: str) -> bool:
    """Whether comparing on the spot would make the host wait for the device."""
    return device_type != "cpu" and current_graph_task() != -1


@dataclass(frozen=True, slots=True)
class SamplePlaces:
    """Where the elements of a tensor lie that may be its sample: up to 16 of them, and how far they can be moved.

    ``moves`` has the stride of each direction in which they move, and how many places there are along it.
    """

    size: int
    stride: int
    base: int
    moves: tuple[tuple[int, int], ...]
    integers: torch.dtype
    span: type[ctypes.Array[Any]]
    """The memory from the first element to the last."""

    @staticmethod
    def has_any(geometry: Geometry) -> bool:
        """Whether there are bits to compare: elements, of a size that some integer has."""
        return math.prod(geometry.size) > 0 and geometry.dtype.itemsize in INTEGER_OF_SIZE

    @staticmethod
    def of(geometry: Geometry) -> SamplePlaces | None:
        """Along the whole of a dense tensor, along the longest dimension of others; ``None`` where there are no bits to
        compare.
        """
        count = math.prod(geometry.size)
        if not SamplePlaces.has_any(geometry):
            return None
        dimensions = list(zip(geometry.size, geometry.stride, strict=True))
        if 1 + sum((size - 1) * stride for size, stride in dimensions) == count:
            dimensions = [(count, 1)]
        dimensions.sort(reverse=True)
        length, stride = dimensions[0]
        size = min(SAMPLE_SIZE, length)
        apart = next(step for step in range(max(1, length // size), 0, -1) if math.gcd(step, count) == 1)
        moves = ((stride, length - (size - 1) * apart), *((other, steps) for steps, other in dimensions[1:]))
        integers, stride = INTEGER_OF_SIZE[geometry.dtype.itemsize], stride * apart
        span = _INTEGERS[integers] * ((size - 1) * stride + 1)
        return SamplePlaces(size, stride, geometry.offset, moves, integers, span)

    def offset(self, number: int) -> int:
        """Where the sample of the ``number``-th call starts."""
        offset, left = self.base, number * _STRIDE_OF_CALLS
        for stride, steps in self.moves:
            left, move = divmod(left, steps)
            offset += move * stride
        return offset

    def at(self, offset: int, tensor: torch.Tensor) -> torch.Tensor:
        """The sample that starts there, a view."""
        return tensor.view(self.integers).as_strided((self.size,), (self.stride,), offset)

    def peek(self, offset: int, tensor: torch.Tensor) -> list[int]:
        """The same as a list, of a tensor on the host: the three torch ops for it take longer than all else that a small
        region's call does.
        """
        storage, start = tensor.untyped_storage(), offset * self.integers.itemsize
        if start + ctypes.sizeof(self.span) > storage.nbytes():
            return []
        found: list[int] = self.span.from_address(storage.data_ptr() + start)[:: self.stride]
        return found
