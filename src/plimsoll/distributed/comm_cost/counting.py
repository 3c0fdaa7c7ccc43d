"""Runs a method's hook without a network, to time what it does to each bucket and count what it would send.

The hook runs on a process group whose collectives come back at once, as if every rank had the same tensor. What passes
between two of them is local work; what they were given are payloads. So a method is measured apart from any link, and for
any number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

Hook = Callable[[Any], torch.futures.Future[torch.Tensor]]
"""Takes torch's ``GradBucket``, or what can be asked the same questions."""


def finished(value: Any, device: torch.device) -> torch.futures.Future[Any]:
    """A future that has its value already."""
    future: torch.futures.Future[Any] = torch.futures.Future(devices=[] if device.type == "cpu" else [device])
    future.set_result(value)
    return future


@dataclass(frozen=True, slots=True)
class Pass:
    """One bucket's way through a hook: local work and transfers in turns. ``transfers`` are names and payloads in bytes."""

    local_seconds: tuple[float, ...]
    transfers: tuple[tuple[str, int], ...]


class CountingGroup(dist.ProcessGroup):
    """A process group of one process that claims to have so many; ``now`` is its clock, in seconds."""

    def __init__(self, ranks: int, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg]  # a group without a store: the stub lacks this form
        self._ranks = ranks
        self._now = now
        self._resumed_seconds = 0.0
        self._local_seconds: list[float] = []
        self._transfers: list[tuple[str, int]] = []

    def start(self) -> None:
        self._local_seconds, self._transfers = [], []
        self._resumed_seconds = self._now()

    def stop(self) -> Pass:
        """End the pass, and tell what happened in it."""
        self._local_seconds.append(self._now() - self._resumed_seconds)
        return Pass(tuple(self._local_seconds), tuple(self._transfers))

    def _note(self, kind: str, given: Sequence[torch.Tensor]) -> None:
        self._local_seconds.append(self._now() - self._resumed_seconds)
        self._transfers.append((kind, sum(tensor.numel() * tensor.element_size() for tensor in given)))

    def _done(self, result: list[torch.Tensor]) -> dist.Work:
        work = _Done(result)
        self._resumed_seconds = self._now()
        return work

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "counting"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]  # the form that torch calls
        """Sums of equal tensors are multiples; averages, minima and maxima are what they were."""
        self._note("all_reduce", tensors)
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._ranks)
        return self._done(tensors)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> dist.Work:
        self._note("all_gather", [given])
        output.view(self._ranks, -1).copy_(given.reshape(1, -1).expand(self._ranks, -1))
        return self._done([output])

    all_gather_single = _allgather_base  # type: ignore[assignment]  # another name of it since torch 2.13

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        """Every rank sends what this one would send to itself: the first part."""
        self._note("all_to_all", [given])
        assert not input_sizes, "parts are equal"
        assert not output_sizes, "parts are equal"
        first = given.view(self._ranks, -1)[:1]
        output.view(self._ranks, -1).copy_(first.expand(self._ranks, -1))
        return self._done([output])

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # the same


class _Done(dist.Work):
    """A collective that is over."""

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
    """A copy of torch's bucket, taken inside of its hook. It outlives the step, and can be filled again.

    It has those of torch's methods that the hooks of our methods call.
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
        """Put the gradients in anew: a hook may have written to them."""
        self._buffer = self._values.clone()

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer."""
        return [self._buffer[start : start + count].view(shape) for start, shape, count in self._places]

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters


def pass_through(hook: Hook, buckets: Sequence[KeptBucket], group: CountingGroup) -> list[Pass]:
    """What the hook, made for this group, does to each bucket of one step."""
    found = []
    for bucket in buckets:
        bucket.fill()
        group.start()
        hook(bucket).wait()
        found.append(group.stop())
    return found
