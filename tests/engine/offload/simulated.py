"""A link for tests: copies lie in ordinary memory, transfers fail when they are told to and take the time that a test says."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch

from plimsoll.engine.offload.protocol import Link
from plimsoll.errors import OffloadFailed


class SimulatedLink(Link):
    """Keeps tensors beside themselves; ``fail_…`` are the transfers of a kind that raise, counted from 0.

    ``carry`` is called with the bytes of every transfer when somebody waits for it, once for each way.
    """

    def __init__(
        self,
        *,
        fail_store: Container[int] = (),
        fail_settle: Container[int] = (),
        fail_load: Container[int] = (),
        carry: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self.name = "simulated"
        self.resident_bytes = 0
        """What tickets that are alive have sent out."""
        self.carry = carry
        self._fails = {"store": fail_store, "settle": fail_settle, "load": fail_load}
        self._counts = dict.fromkeys(self._fails, 0)
        self._is_closed = False

    def store(self, tensor: torch.Tensor) -> SimulatedTicket:
        if self._is_closed or self.fails_now("store"):
            raise OffloadFailed("The simulated link is closed or full.", why="a test asked for it", next="nothing")
        self.resident_bytes += tensor.nbytes
        return SimulatedTicket(self, tensor, is_lost=self.fails_now("settle"))

    def close(self) -> None:
        self._is_closed = True

    def fails_now(self, operation: str) -> bool:
        self._counts[operation] += 1
        return self._counts[operation] - 1 in self._fails[operation]


class SimulatedTicket:
    def __init__(self, link: SimulatedLink, tensor: torch.Tensor, *, is_lost: bool) -> None:
        self._link, self._source, self._is_lost = link, tensor, is_lost
        self._copy = tensor.to("cpu", copy=True)
        self._returning: torch.Tensor | None = None

    def settle(self) -> None:
        if self._is_lost:
            raise OffloadFailed("A tensor did not reach the link.", why="a test asked for it", next="nothing")
        if self._source is not None:
            self._link.carry(self._copy.nbytes)
        self._source = None

    def prefetch(self) -> None:
        if self._returning is None and not self._is_lost:
            self.settle()
            self._returning = self._copy.clone()

    def read(self) -> torch.Tensor:
        if self._is_lost:
            return self._source
        self.prefetch()
        self._link.carry(self._copy.nbytes)
        tensor, self._returning = self._returning, None
        if self._link.fails_now("load"):
            raise OffloadFailed("A tensor did not come back.", why="a test asked for it", next="nothing")
        return tensor

    def __del__(self) -> None:
        self._link.resident_bytes -= self._copy.nbytes
