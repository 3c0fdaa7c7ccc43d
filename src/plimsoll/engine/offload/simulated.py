"""A link that takes as long as its bandwidth and latency say, and fails when it is told to.

Copies are clones in ordinary memory, so they count as RAM: this link is for tests and for studies of plans, it saves
nothing. Each direction carries one transfer after the other, as a wire does; the two directions do not disturb each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch

from plimsoll.engine.offload.protocol import Link
from plimsoll.errors import OffloadFailed

Failures = Container[int] | Callable[[int], bool]
"""Which operations of a kind fail, counted from 0."""


class SimulatedLink(Link):
    """Keeps tensors beside themselves, as if they were far away.

    Args:
        bytes_per_second: of each direction.
        latency_seconds: before the first byte of every transfer.
        fail_store: which calls of `store` raise, as on a full disk.
        fail_settle: which stored tensors fail on their way out, as with an I/O error; `Ticket.settle` raises.
        fail_load: which copies in fail; `Ticket.read` raises.
        clock: seconds now; ``sleep``: waits so many seconds. Tests pass their own.

    Example:
        >>> with SimulatedLink(bytes_per_second=1e9) as link:
        ...     ticket = link.store(torch.arange(3))
        ...     ticket.settle()
        ...     ticket.read()
        tensor([0, 1, 2])
    """

    def __init__(
        self,
        bytes_per_second: float,
        latency_seconds: float = 0.0,
        fail_store: Failures = (),
        fail_load: Failures = (),
        *,
        fail_settle: Failures = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.name = "simulated"
        self.resident_bytes = 0
        """In the link now: what tickets that are alive have sent out."""
        self._fails = {"store": fail_store, "settle": fail_settle, "load": fail_load}
        self._counts = {"store": 0, "settle": 0, "load": 0}
        self._clock = clock
        self._sleep = sleep
        self._out = _Wire(bytes_per_second, latency_seconds)
        self._in = _Wire(bytes_per_second, latency_seconds)
        self._is_closed = False

    def store(self, tensor: torch.Tensor) -> SimulatedTicket:
        if self._is_closed:
            raise _injected("A closed simulated link takes no tensors.", "close() was called")
        if self._fails_now("store"):
            raise _injected(f"The simulated link has no room for {tensor.nbytes:,} bytes.", "a test asked for it")
        arrives_at = self._out.carry(tensor.nbytes, self._clock())
        self.resident_bytes += tensor.nbytes
        return SimulatedTicket(self, tensor, arrives_at, is_lost=self._fails_now("settle"))

    def close(self) -> None:
        self._is_closed = True
        self._wait_until(max(self._out.free_at, self._in.free_at))

    def _fails_now(self, operation: str) -> bool:
        index, failures = self._counts[operation], self._fails[operation]
        self._counts[operation] += 1
        return failures(index) if callable(failures) else index in failures

    def _wait_until(self, moment: float) -> None:
        remaining_seconds = moment - self._clock()
        if remaining_seconds > 0:
            self._sleep(remaining_seconds)


@dataclass(slots=True)
class _Wire:
    """One direction: when a transfer that is asked for now will have arrived."""

    bytes_per_second: float
    latency_seconds: float
    free_at: float = float("-inf")

    def carry(self, nbytes: int, now: float) -> float:
        self.free_at = max(now, self.free_at) + self.latency_seconds + nbytes / self.bytes_per_second
        return self.free_at


class SimulatedTicket:
    """A tensor in a simulated link."""

    def __init__(self, link: SimulatedLink, tensor: torch.Tensor, arrives_at: float, *, is_lost: bool) -> None:
        self._link = link
        self._nbytes = tensor.nbytes
        self._source: torch.Tensor | None = tensor
        self._device = tensor.device
        self._is_lost = is_lost
        self._out_at = arrives_at
        self._in_at = 0.0
        self._returning: torch.Tensor | None = None
        self._copy = tensor.to("cpu", copy=True)

    def settle(self) -> None:
        self._link._wait_until(self._out_at)
        if self._is_lost:
            raise _injected(f"A tensor of {self._nbytes:,} bytes did not reach the link.", "a test asked for it")
        self._source = None

    def prefetch(self) -> None:
        if self._returning is not None or self._is_lost:
            return
        self.settle()
        self._returning = self._copy.to(self._device, copy=True)
        self._in_at = self._link._in.carry(self._nbytes, self._link._clock())

    def read(self) -> torch.Tensor:
        if self._is_lost:
            assert self._source is not None, "a tensor that never left is held"
            return self._source
        self.prefetch()
        self._link._wait_until(self._in_at)
        tensor, self._returning = self._returning, None
        assert tensor is not None, "prefetch makes one"
        if self._link._fails_now("load"):
            raise _injected(f"A tensor of {self._nbytes:,} bytes did not come back.", "a test asked for it")
        return tensor

    def __del__(self) -> None:
        self._link.resident_bytes -= self._nbytes


def _injected(found: str, why: str) -> OffloadFailed:
    return OffloadFailed(found, why=why, next="nothing to do: this link only plays one")
