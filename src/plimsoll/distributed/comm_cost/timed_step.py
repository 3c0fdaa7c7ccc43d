"""Times a step of data-parallel training that sends nothing: when each bucket is full, and when backward ends.

The wrapper's communication hook gives every bucket back at once. Transfers are timed apart, or beside the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from plimsoll.distributed.comm_cost.counting import Hook, KeptBucket, finished
from plimsoll.distributed.gradient_compression.switch import Switch, reduce_bucket


def start_transfer(kind: str, payload: torch.Tensor) -> dist.Work:
    """Begin a transfer on the default group.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``broadcast``.
        payload: what this rank gives: of one dimension, its length a multiple of the number of ranks.
    """
    ranks = dist.get_world_size()
    work: dist.Work | None
    if kind == "all_reduce":
        work = dist.all_reduce(payload, async_op=True)
    elif kind == "all_gather":
        work = dist.all_gather(list(payload.new_empty(ranks, len(payload))), payload, async_op=True)
    elif kind == "reduce_scatter":
        work = dist.reduce_scatter(payload.new_empty(len(payload) // ranks), list(payload.chunk(ranks)), async_op=True)
    elif kind == "all_to_all":
        work = dist.all_to_all_single(torch.empty_like(payload), payload, async_op=True)
    else:
        assert kind == "broadcast", kind
        work = dist.broadcast(payload, src=0, async_op=True)
    assert work is not None
    return work


def payload_of(payload_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeros in float32, of so many bytes or a little more: every rank gets as many."""
    ranks = dist.get_world_size()
    return torch.zeros(max(1, -(-payload_bytes // 4 // ranks)) * ranks, device=device)


def time_transfers(kind: str, payload_bytes: int, device: torch.device, *, repetitions: int) -> list[float]:
    """Seconds of each repetition on this rank; all ranks call it alike. One more, not timed, comes first."""
    payload = payload_of(payload_bytes, device)
    found = []
    for _ in range(repetitions + 1):
        wait_for_all(device)
        begin_seconds = time.perf_counter()
        start_transfer(kind, payload).wait()
        wait_for_device(device)
        found.append(time.perf_counter() - begin_seconds)
    return found[1:]


def wait_for_all(device: torch.device) -> None:
    """Until every rank is here and this one's device is idle."""
    wait_for_device(device)
    dist.barrier()
    wait_for_device(device)


def wait_for_device(device: torch.device) -> None:
    """Until nothing is under way on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Backward = Callable[[nn.Module], object]
"""Takes a model through forward, loss and backward."""

_SETTLING_STEPS = 2
"""Torch deals the buckets out anew after the first backward."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step, in seconds from its start: each bucket full, and the end of backward."""

    ready_seconds: tuple[float, ...]
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class BesideSample:
    """One step of the bare model with transfers beside it: its seconds, and those of all transfers, which began with it."""

    compute_seconds: float
    transfers_seconds: float


class SilentParallel:
    """The model in torch's wrapper, sending nothing.

    Making one writes the first rank's parameters and buffers into all ranks' models, as data-parallel training does.

    Args:
        model: the same on all ranks.
        bucket_bytes: as ``bucket_cap_mb`` of torch's wrapper; ``None`` for its default.
        backward: the step.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int | None, backward: Backward) -> None:
        self.device = next(model.parameters()).device
        self._hook = _HookOfTheMoment(_give_back)
        self._model = model
        self._backward = backward
        self._wrapped = wrap(model, bucket_bytes)
        switch = Switch(self._wrapped.process_group)
        switch.answer = self._hook
        self._wrapped.register_comm_hook(switch, reduce_bucket)
        for _ in range(_SETTLING_STEPS):
            self.step()

    def step(self) -> StepSample:
        """One step from empty gradients, begun by all ranks together."""
        clock = _Clock(self.device)

        def note(bucket: Any) -> torch.futures.Future[torch.Tensor]:
            clock.mark()
            return _give_back(bucket)

        empty_gradients(self._model)
        self._hook.reduce = note
        wait_for_all(self.device)
        clock.mark()
        self._backward(self._wrapped)
        clock.mark()
        *ready_seconds, compute_seconds = clock.seconds()
        return StepSample(tuple(ready_seconds), compute_seconds)

    def buckets(self) -> list[KeptBucket]:
        """The buckets of a step with this rank's own gradients, in the order in which backward fills them."""
        found = []

        def keep(bucket: Any) -> torch.futures.Future[torch.Tensor]:
            found.append(KeptBucket(bucket))
            return _give_back(bucket)

        empty_gradients(self._model)
        self._hook.reduce = keep
        self._backward(self._wrapped)
        return found

    def step_beside(self, payload_bytes: int, transfers: int) -> BesideSample:
        """A step of the model without its wrapper, while all-reduces are under way, one after the other.

        Args:
            payload_bytes: of each all-reduce.
            transfers: how many: enough to last as long as the step, or none.
        """
        payloads = [payload_of(payload_bytes, self.device) for _ in range(transfers)]
        empty_gradients(self._model)
        wait_for_all(self.device)
        begin_seconds = time.perf_counter()
        finish = _send_beside(payloads, self.device)
        try:
            self._backward(self._model)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            compute_seconds = time.perf_counter() - begin_seconds
        finally:
            finish()
        return BesideSample(compute_seconds, time.perf_counter() - begin_seconds)


class _HookOfTheMoment:
    """Answers for the buckets. Torch's reducer holds it where no garbage collector sees it, so it knows no wrapper."""

    def __init__(self, hook: Hook) -> None:
        self.reduce = hook


def _give_back(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return finished(bucket.buffer(), [bucket.buffer().device])


def wrap(model: nn.Module, bucket_bytes: int | None) -> DistributedDataParallel:
    """Torch's wrapper with buckets of so many bytes (``None``: its default)."""
    return DistributedDataParallel(model, bucket_cap_mb=None if bucket_bytes is None else bucket_bytes / 2**20)


def time_step(wrapped: nn.Module, backward: Backward, device: torch.device) -> float:
    """The seconds of one step from empty gradients on this rank, from when all are ready for it."""
    empty_gradients(wrapped)
    return time_call(lambda: backward(wrapped), device)


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """The seconds of anything on this rank, from when all are ready for it."""
    wait_for_all(device)
    begin_seconds = time.perf_counter()
    call()
    wait_for_device(device)
    return time.perf_counter() - begin_seconds


def empty_gradients(model: nn.Module) -> None:
    """No parameter has a gradient."""
    for parameter in model.parameters():
        parameter.grad = None


def _send_beside(payloads: Sequence[torch.Tensor], device: torch.device) -> Callable[[], None]:
    """Begin all-reduces beside what comes next; what is returned waits for all of them."""
    if device.type == "cuda":
        works = [start_transfer("all_reduce", payload) for payload in payloads]

        def wait() -> None:
            for work in works:
                work.wait()
            wait_for_device(device)

        return wait

    def send() -> None:
        for payload in payloads:
            start_transfer("all_reduce", payload).wait()

    sender = threading.Thread(target=send, name="transfers")
    sender.start()
    return sender.join


class _Clock:
    """Marks in time: on a GPU they are set on its stream, and read when it has come by."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._seconds.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From the first mark to each of the others."""
        if self._events:
            self._events[-1].synchronize()
            return [self._events[0].elapsed_time(event) / 1e3 for event in self._events[1:]]
        return [each - self._seconds[0] for each in self._seconds[1:]]
