"""A device in Python: streams that run late and in any order that events allow, memory that is used again at once.

Work is queued, and run only when somebody waits; which stream goes next is drawn by chance. Memory goes back to the arena of
its stream when the last reference to its tensor dies, and the next tensor of that stream gets it, whatever is queued. So a
link that forgets to wait moves the wrong bytes.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable

import torch

ARENA_BYTES = 1 << 20
ALIGNMENT_BYTES = 64


class FakeEvent:
    def __init__(self, stream: FakeStream, position: int) -> None:
        self.stream = stream
        self.position = position

    def query(self) -> bool:
        self.stream.device.run_some()
        return self.has_passed()

    def has_passed(self) -> bool:
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        self.stream.device.run_until(self.has_passed)


class FakeStream:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.queue: deque[FakeEvent | Callable[[], None]] = deque()
        self.queued = 0
        self.done = 0
        device.streams.append(self)

    def enqueue(self, work: FakeEvent | Callable[[], None]) -> None:
        self.queue.append(work)
        self.queued += 1

    def record_event(self) -> FakeEvent:
        self.device.calls.append(f"{self.name} records")
        return FakeEvent(self, self.queued)

    def wait_event(self, event: FakeEvent) -> None:
        self.device.calls.append(f"{self.name} waits for {event.stream.name}")
        if self.device.keeps_order:
            self.enqueue(event)

    def synchronize(self) -> None:
        self.device.run_until(lambda: not self.queue)

    def is_ready(self) -> bool:
        return bool(self.queue) and (not isinstance(self.queue[0], FakeEvent) or self.queue[0].has_passed())

    def run_one(self) -> None:
        work = self.queue.popleft()
        if not isinstance(work, FakeEvent):
            work()
        self.done += 1


class Arena:
    """Memory in which the block that was freed last is used first."""

    def __init__(self) -> None:
        self.memory = torch.zeros(ARENA_BYTES, dtype=torch.uint8)
        self.end = 0
        self.free: list[tuple[int, int, tuple[FakeEvent, ...]]] = []
        self.live_bytes = 0
        self.users: dict[int, list[FakeStream]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        size = max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        offset = self._free_block(size)
        tensor = self.memory[offset : offset + nbytes]
        self.live_bytes += nbytes
        return tensor

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Free the block when this very tensor dies; an empty one has none."""
        if not tensor.nbytes:
            return tensor
        offset = tensor.data_ptr() - self.memory.data_ptr()
        size = max(1, -(-tensor.nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        weakref.finalize(tensor, self._give_back, offset, size, tensor.nbytes)
        return tensor

    def _free_block(self, size: int) -> int:
        for index in reversed(range(len(self.free))):
            offset, free_size, events = self.free[index]
            if free_size == size and all(event.has_passed() for event in events):
                del self.free[index]
                return offset
        self.end += size
        assert self.end <= ARENA_BYTES, "the fake device is full"
        return self.end - size

    def _give_back(self, offset: int, size: int, nbytes: int) -> None:
        self.live_bytes -= nbytes
        events = tuple(FakeEvent(stream, stream.queued) for stream in self.users.pop(offset, ()))
        self.free.append((offset, size, events))


class FakeDevice:
    """Stands where `CudaCalls` would."""

    def __init__(self, seed: int = 0, *, keeps_order: bool = True) -> None:
        self.random = random.Random(seed)
        self.keeps_order = keeps_order
        """Without, waits for events are ignored: what a link that forgot them would get."""
        self.calls: list[str] = []
        self.streams: list[FakeStream] = []
        self.program = FakeStream(self, "program")
        self.out_stream = FakeStream(self, "out")
        self.in_stream = FakeStream(self, "in")
        self.arenas: dict[FakeStream, Arena] = {}
        self.pinned_bytes = 0
        self.pinned_cached_bytes = 0

    def current_stream(self) -> FakeStream:
        """``program``, unless a test puts another one there."""
        return self.program

    def pinned(self, size_bytes: int) -> torch.Tensor:
        memory = torch.full((size_bytes,), 0xEE, dtype=torch.uint8)
        self.pinned_bytes += size_bytes
        weakref.finalize(memory, self._cache, size_bytes)
        return memory

    def _cache(self, size_bytes: int) -> None:
        self.pinned_cached_bytes += size_bytes

    def release_pinned(self) -> None:
        self.pinned_bytes -= self.pinned_cached_bytes
        self.pinned_cached_bytes = 0

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        arena = self.arenas.setdefault(self.program, Arena())
        return arena.watch(arena.take(length * dtype.itemsize).view(dtype))

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        self.calls.append(f"{stream.name} copies")
        to, of = destination.view(torch.uint8), source.view(torch.uint8)
        stream.enqueue(lambda: to.copy_(of))

    def used_on(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.calls.append(f"used on {stream.name}")
        for arena in self.arenas.values():
            if tensor.untyped_storage().data_ptr() == arena.memory.data_ptr():
                arena.users.setdefault(tensor.data_ptr() - arena.memory.data_ptr(), []).append(stream)

    @property
    def live_bytes(self) -> int:
        return sum(arena.live_bytes for arena in self.arenas.values())

    def run_some(self) -> None:
        """What a real device would have done meanwhile: anything from nothing to all."""
        for _ in range(self.random.choice((0, 0, 1, 5, 20))):
            if not self._run_one():
                return

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            assert self._run_one(), "streams wait for each other"

    def finish(self) -> None:
        self.run_until(lambda: not any(stream.queue for stream in self.streams))

    def _run_one(self) -> bool:
        ready = [stream for stream in self.streams if stream.is_ready()]
        if ready:
            self.random.choice(ready).run_one()
        return bool(ready)


class SleepyDevice(FakeDevice):
    """Does nothing before somebody waits for it."""

    def run_some(self) -> None:
        pass


class Program:
    """Kernels of a training program on one of the device's streams, and what they saw."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.mistakes = 0

    def make(self, expected: torch.Tensor) -> torch.Tensor:
        """A tensor on the device that a queued kernel will fill with ``expected``."""
        tensor = self.device.empty(expected.numel(), expected.dtype)
        target = tensor.view(torch.uint8)
        self.device.current_stream().enqueue(lambda: target.copy_(expected.view(torch.uint8)))
        return tensor

    def use(self, tensor: torch.Tensor, expected: torch.Tensor) -> None:
        """A queued kernel that reads ``tensor``."""
        seen = tensor.view(torch.uint8)

        def kernel() -> None:
            self.mistakes += not torch.equal(seen, expected.view(torch.uint8))

        self.device.current_stream().enqueue(kernel)
