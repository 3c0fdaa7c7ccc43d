"""Sentinels: samples of dropped tensors. A few elements are kept in forward, and in backward the rebuilt tensors must have the
same bits there.

Recipes run recorded ops on the tensors that a call saved. A call can differ from the recorded call without the guards noticing
(a constant inside a C++ extension, for example). Then the samples differ, and the step stops before the optimizer can use the
gradients. The stride between samples has no common factor with the number of elements, so that samples reach all rows and all
features. Each call samples at another offset.

On a CPU, samples are compared at once. On a GPU, that would make the host wait for the device at each read of a saved tensor.
So each comparison leaves a flag on the device, and all flags of a backward pass are read together at its end, still before the
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
"""How far the sample positions move from one call to the next. It is a prime, so that samples of many calls reach all
positions.
"""

_INTEGERS: dict[torch.dtype, type[ctypes._SimpleCData[int]]] = {
    torch.uint8: ctypes.c_uint8,
    torch.int16: ctypes.c_int16,
    torch.int32: ctypes.c_int32,
    torch.int64: ctypes.c_int64,
}

Sample = tuple["SamplePlaces", int, Any]
"""A sample of one tensor: its `SamplePlaces`, the storage offset where it starts, and its elements as integers.

The elements are a list on a CPU (the cheapest there) and a tensor on other devices.
"""

Failure = Callable[[], None]
"""A function that raises the error for one sample that differs."""


class DeferredChecks:
    """Collects, in one backward pass on a GPU, the results of comparing samples as flags on the device. The flags are read
    together when backward ends.
    """

    def __init__(self) -> None:
        self._flags: list[torch.Tensor] = []
        self._failures: list[Failure] = []
        self._task = -1

    def add(self, flag: torch.Tensor, fail: Failure) -> None:
        """Store a flag on the device; true means that the bits of a sample differ. If the flag is true when backward ends,
        ``fail`` is called and raises the error.
        """
        task = current_graph_task()
        if task != self._task:  # the first flag of this backward; drop the flags of a backward that raised midway
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
    """Data: when the regions (modules that the plan decides about) of one managed model take samples of dropped tensors.

    Calls whose number is a multiple of ``every`` are sampled. ``deferred`` collects the results of comparisons that are read at
    the end of backward.
    """

    every: int = 1
    deferred: DeferredChecks = field(default_factory=DeferredChecks)


class Sampler:
    """Takes samples of tensors that one region drops in forward (sentinels), and compares them with the rebuilt tensors in
    backward.

    Two kinds of values are sampled. One kind comes back from a lossless codec or a link (to host memory or disk). The other
    kind is a sink: a rebuilt value that shows errors of earlier ops too (see ``sample_sinks``). ``like`` is the sampler of
    calls that differ only in numbers.
    """

    def __init__(self, plan: ReplayPlan, policy: SentinelPolicy, like: Sampler | None = None) -> None:
        self._plan = plan
        self._policy = policy
        self._device_type = plan.device_type
        self._sentinels: dict[int, SamplePlaces] = {}
        self._use(sentinel_slots(plan, plan.dropped_slots) if like is None else tuple(like._sentinels))

    def expect(self, read: Sequence[int]) -> None:
        """Limit the sampling to these saved tensors (numbers in the order of saving), because backward reads only these."""
        self._use(sentinel_slots(self._plan, read))

    def _use(self, slots: Iterable[int]) -> None:
        geometries = self._plan.recording.slot_geometries
        places = {slot: self._sentinels.get(slot) or SamplePlaces.of(geometries[slot]) for slot in slots}
        self._sentinels = {slot: found for slot, found in places.items() if found is not None}

    def take(self, tensors: Sequence[torch.Tensor], number: int) -> dict[int, Sample]:
        """Return a sample of each tensor that is to be sampled, taken from the tensors that call number ``number`` of the
        region saved. The key is the tensor's number in the order of saving.

        Elements are taken as integers, because bits are compared and not values. Call this below autograd.
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
        """Call ``fail`` if a rebuilt tensor differs from its sample in any bit. The argument of ``fail`` is the tensor's
        number. On a GPU, ``fail`` is called when backward ends.
        """
        places, offset, sample = taken
        if value.is_cpu and places.peek(offset, value) == sample:
            return
        again = places.at(offset, value)
        if value.is_cpu:
            sample = torch.tensor(sample, dtype=again.dtype, device=again.device)
        elif is_capturing(value.device.type):  # only backward is being captured: the host could not read the flag
            return
        elif must_defer(value.device.type):
            self._policy.deferred.add((sample != again).any(), functools.partial(fail, slot))
            return
        elif torch.equal(sample, again):
            return
        # NaN has many bit patterns, and which of them an op makes is not defined: accept any NaN.
        is_number = value.is_floating_point() or value.is_complex()
        if is_number and same_bits(sample.view(value.dtype), again.clone().view(value.dtype)):
            return
        fail(slot)


def sentinel_slots(plan: ReplayPlan, read: Sequence[int]) -> tuple[int, ...]:
    """Return the saved tensors to sample (numbers in the order of saving), if backward reads only the tensors in ``read``.

    For a sampled value (the content of one storage), as many saved tensors are chosen as are needed to cover the whole storage.
    """
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
        """The saved tensors chosen so far for this value, by the storage offset where the tensor starts."""
        for slot in sorted(slots[value], key=lambda each: -math.prod(geometries[each].size)):
            if not covers([geometries[each] for each in parts.values()], plan.geometry_of(value)):
                parts.setdefault(geometries[slot].offset, slot)
        found += parts.values()
    return tuple(found)


def must_defer(device_type: str) -> bool:
    """Return whether comparing a sample at once would make the host wait for this device (a GPU). Then the comparison is read
    when backward ends.
    """
    return device_type != "cpu" and current_graph_task() != -1


@dataclass(frozen=True, slots=True)
class SamplePlaces:
    """The positions of a tensor's sample: up to 16 elements, and how far they can be moved from call to call.

    ``moves`` has a pair for each direction in the tensor: the stride along it, and the number of positions that the sample can
    take.
    """

    size: int
    stride: int
    base: int
    moves: tuple[tuple[int, int], ...]
    integers: torch.dtype
    span: type[ctypes.Array[Any]]
    """A ctypes array type that reaches from the first element of the sample to the last."""

    @staticmethod
    def has_any(geometry: Geometry) -> bool:
        """Return whether the tensor can be sampled: it has elements, and an integer type has the size of an element."""
        return math.prod(geometry.size) > 0 and geometry.dtype.itemsize in INTEGER_OF_SIZE

    @staticmethod
    def of(geometry: Geometry) -> SamplePlaces | None:
        """Return the sample positions for this geometry, or ``None`` if there is nothing to compare.

        In a dense tensor, samples reach from the first to the last element. In other tensors, they are along the longest
        dimension.
        """
        count = math.prod(geometry.size)
        if not SamplePlaces.has_any(geometry):
            return None
        # An expanded dimension (stride 0) shows the same elements again.
        dimensions = [(size, stride) for size, stride in zip(geometry.size, geometry.stride, strict=True) if stride]
        if not dimensions or 1 + sum((size - 1) * stride for size, stride in dimensions) == count:
            dimensions = [(count if dimensions else 1, 1)]
        dimensions.sort(reverse=True)
        length, stride = dimensions[0]
        size = min(SAMPLE_SIZE, length)
        apart = next(step for step in range(max(1, length // size), 0, -1) if math.gcd(step, count) == 1)
        moves = ((stride, length - (size - 1) * apart), *((other, steps) for steps, other in dimensions[1:]))
        integers, stride = INTEGER_OF_SIZE[geometry.dtype.itemsize], stride * apart
        span = _INTEGERS[integers] * ((size - 1) * stride + 1)
        return SamplePlaces(size, stride, geometry.offset, moves, integers, span)

    def offset(self, number: int) -> int:
        """Return the storage offset in elements where the sample of the ``number``-th call starts."""
        offset, left = self.base, number * _STRIDE_OF_CALLS
        for stride, steps in self.moves:
            left, move = divmod(left, steps)
            offset += move * stride
        return offset

    def at(self, offset: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the sampled elements of a tensor, as integers. ``offset`` is the storage offset where the sample
        starts.
        """
        return tensor.view(self.integers).as_strided((self.size,), (self.stride,), offset)

    def peek(self, offset: int, tensor: torch.Tensor) -> list[int]:
        """Return the sampled elements of a CPU tensor as a list of integers. ``offset`` is the storage offset where the sample
        starts.

        This avoids three torch ops, which take longer than everything else in the call of a small region.
        """
        storage, start = tensor.untyped_storage(), offset * self.integers.itemsize
        if start + ctypes.sizeof(self.span) > storage.nbytes():
            return []
        found: list[int] = self.span.from_address(storage.data_ptr() + start)[:: self.stride]
        return found
