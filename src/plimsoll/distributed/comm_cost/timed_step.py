"""Times a data-parallel step that sends nothing, and each method's work on its buckets without a network.

DDP's communication hook returns every bucket at once, which shows when each bucket is full and when backward ends. Transfers
are timed separately, or during the step. A method's hook runs on a process group whose collectives return at once, as if every
rank had the same tensor. The time between two collectives is local work, and their arguments are the payloads. So a method is
measured independently of any link, and for any number of ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from plimsoll.artifacts.traffic import Transfer
from plimsoll.distributed.comm_cost.forecast import BucketProgram
from plimsoll.distributed.gradient_compression.switch import Switch, reduce_bucket
from plimsoll.tracing.meters.timing import Marks, wait_for_device

Hook = Callable[[Any], torch.futures.Future[torch.Tensor]]
"""A hook that takes torch's ``GradBucket``, or an object with the same methods."""


def finished(value: Any, device: torch.device) -> torch.futures.Future[Any]:
    """A completed future with this value."""
    future: torch.futures.Future[Any] = torch.futures.Future(devices=[] if device.type == "cpu" else [device])
    future.set_result(value)
    return future


class CountingGroup(dist.ProcessGroup):
    """A process group of one process that claims to have ``ranks`` ranks; ``now`` is its clock, in seconds."""

    def __init__(self, ranks: int, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg]  # a group without a store: the stub lacks this form
        self._ranks = ranks
        self._now = now
        self._resumed_seconds = 0.0
        self._local_seconds: list[float] = []
        self._transfers: list[tuple[Transfer, int]] = []

    def start(self) -> None:
        self._local_seconds, self._transfers = [], []
        self._resumed_seconds = self._now()

    def stop(self) -> BucketProgram:
        """End the pass and return its local work and transfers."""
        self._local_seconds.append(self._now() - self._resumed_seconds)
        return BucketProgram(tuple(self._local_seconds), tuple(self._transfers))

    def _note(self, kind: Transfer, given: Sequence[torch.Tensor]) -> None:
        self._local_seconds.append(self._now() - self._resumed_seconds)
        self._transfers.append((kind, sum(tensor.numel() * tensor.element_size() for tensor in given)))

    def _done(self, result: list[torch.Tensor]) -> dist.Work:
        work = _Done(result)
        self._resumed_seconds = self._now()
        return work

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "counting"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]  # the form that torch calls
        """Reduce equal tensors: a sum is a multiple of the tensor; averages, minima and maxima do not change it."""
        self._note(Transfer.ALL_REDUCE, tensors)
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._ranks)
        return self._done(tensors)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> dist.Work:
        self._note(Transfer.ALL_GATHER, [given])
        output.view(self._ranks, -1).copy_(given.reshape(1, -1).expand(self._ranks, -1))
        return self._done([output])

    all_gather_single = _allgather_base  # type: ignore[assignment]  # its second name since torch 2.13

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        """Exchange equal tensors: every rank sends what this rank would send to itself, the first part."""
        self._note(Transfer.ALL_TO_ALL, [given])
        assert not input_sizes, "parts are equal"
        assert not output_sizes, "parts are equal"
        first = given.view(self._ranks, -1)[:1]
        output.view(self._ranks, -1).copy_(first.expand(self._ranks, -1))
        return self._done([output])

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # its second name since torch 2.13


class _Done(dist.Work):
    """A collective that is already complete."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return finished(self._result, self._result[0].device)

    def result(self) -> list[torch.Tensor]:
        return self._result


class KeptBucket:
    """A copy of torch's bucket, made inside its hook. It outlives the step and can be filled again.

    It implements the bucket methods that our methods' hooks call.
    """

    def __init__(self, bucket: GradBucket) -> None:
        self._parameters = bucket.parameters()
        self._values = bucket.buffer().detach().clone()
        start = bucket.buffer().storage_offset()
        self._places = [
            (gradient.storage_offset() - start, gradient.shape, gradient.numel()) for gradient in bucket.gradients()
        ]
        self._buffer = self._values.clone()

    @property
    def gradient_bytes(self) -> int:
        return self._values.nbytes

    def fill(self) -> None:
        """Restore the gradients, because a hook may have overwritten them."""
        self._buffer = self._values.clone()

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer."""
        return [self._buffer[start : start + count].view(shape) for start, shape, count in self._places]

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters


def pass_through(hook: Hook, buckets: Sequence[KeptBucket], group: CountingGroup) -> list[BucketProgram]:
    """Run the hook, made for this group, on each bucket of one step; return its local work and transfers."""
    found = []
    for bucket in buckets:
        bucket.fill()
        group.start()
        hook(bucket).wait()
        found.append(group.stop())
    return found


Backward = Callable[[nn.Module], object]
"""Runs forward, loss and backward of a model."""

_SETTLING_STEPS = 2
"""Untimed steps at the start: torch rebuilds its buckets after the first backward."""


def start_transfer(kind: Transfer, payload: torch.Tensor) -> dist.Work:
    """Start a transfer on the default group.

    ``payload`` is this rank's input: one-dimensional, its length a multiple of the number of ranks.
    """
    ranks = dist.get_world_size()
    work: dist.Work | None
    if kind is Transfer.ALL_REDUCE:
        work = dist.all_reduce(payload, async_op=True)
    elif kind is Transfer.ALL_GATHER:
        work = dist.all_gather(list(payload.new_empty(ranks, len(payload))), payload, async_op=True)
    else:
        assert kind is Transfer.ALL_TO_ALL, "the hook of no method does anything else"
        work = dist.all_to_all_single(torch.empty_like(payload), payload, async_op=True)
    assert work is not None
    return work


def payload_of(payload_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeros in float32 of at least ``payload_bytes``, rounded up so that every rank gets equally many."""
    ranks = dist.get_world_size()
    return torch.zeros(max(1, -(-payload_bytes // 4 // ranks)) * ranks, device=device)


def time_transfer(kind: Transfer, payload_bytes: int, device: torch.device) -> float:
    """Seconds of one transfer on this rank, after an untimed one; all ranks have to call it."""
    payload = payload_of(payload_bytes, device)
    for _ in range(2):
        seconds = time_call(lambda: start_transfer(kind, payload).wait(), device)
    return seconds


def time_step(wrapped: nn.Module, backward: Backward, device: torch.device) -> float:
    """Seconds of one step without earlier gradients on this rank, measured from when all ranks are ready."""
    wrapped.zero_grad(set_to_none=True)
    return time_call(lambda: backward(wrapped), device)


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call on this rank, measured from when all ranks are ready."""
    wait_for_all(device)
    begin_seconds = time.perf_counter()
    call()
    wait_for_device(device)
    return time.perf_counter() - begin_seconds


def wait_for_all(device: torch.device) -> None:
    """Wait until every rank is here and this rank's device is idle."""
    wait_for_device(device)
    dist.barrier()
    wait_for_device(device)


class SilentParallel:
    """The model in DDP, with a hook that sends nothing.

    Creating it copies the first rank's parameters and buffers to all ranks' models, as data-parallel training does.
    ``bucket_bytes`` sets DDP's ``bucket_cap_mb``; ``None`` for its default.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int | None, backward: Backward) -> None:
        self.device = next(model.parameters()).device
        self._model = model
        self._backward = backward
        self._wrapped = wrap(model, bucket_bytes)
        # DDP's reducer keeps the switch alive where the garbage collector cannot see it: its answer must not hold the wrapper.
        self._switch = Switch(self._wrapped.process_group)
        self._wrapped.register_comm_hook(self._switch, reduce_bucket)
        for _ in range(_SETTLING_STEPS):
            self.step()

    def step(self) -> list[float]:
        """Run one step without earlier gradients, on all ranks at once; seconds until each bucket is full, and to the end."""
        clock = Marks(self.device)

        def note(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            clock.mark()
            return finished(bucket.buffer(), bucket.buffer().device)

        self._model.zero_grad(set_to_none=True)
        self._switch.answer = note
        wait_for_all(self.device)
        clock.mark()
        self._backward(self._wrapped)
        clock.mark()
        return clock.seconds()

    def buckets(self) -> list[KeptBucket]:
        """The buckets of one step with this rank's own gradients, in the order of backward."""
        found = []

        def keep(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            found.append(KeptBucket(bucket))
            return finished(bucket.buffer(), bucket.buffer().device)

        self._model.zero_grad(set_to_none=True)
        self._switch.answer = keep
        self._backward(self._wrapped)
        return found

    def step_beside(self, payload_bytes: int, transfers: int) -> tuple[float, float]:
        """Run a step of the unwrapped model while ``transfers`` all-reduces run one after the other.

        Returns:
            Seconds of the step, and of step and transfers together; both start at the same time.
        """
        payloads = [payload_of(payload_bytes, self.device) for _ in range(transfers)]
        self._model.zero_grad(set_to_none=True)
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
        return compute_seconds, time.perf_counter() - begin_seconds


def wrap(model: nn.Module, bucket_bytes: int | None) -> DistributedDataParallel:
    """The model in DDP, with buckets of this size (``None``: DDP's default)."""
    return DistributedDataParallel(model, bucket_cap_mb=None if bucket_bytes is None else bucket_bytes / 2**20)


def _send_beside(payloads: Sequence[torch.Tensor], device: torch.device) -> Callable[[], None]:
    """Start all-reduces in the background; the returned function waits for all of them."""
    if device.type == "cuda":
        works = [start_transfer(Transfer.ALL_REDUCE, payload) for payload in payloads]

        def wait() -> None:
            for work in works:
                work.wait()
            wait_for_device(device)

        return wait

    def send() -> None:
        for payload in payloads:
            start_transfer(Transfer.ALL_REDUCE, payload).wait()

    sender = threading.Thread(target=send, name="transfers")
    sender.start()
    return sender.join
