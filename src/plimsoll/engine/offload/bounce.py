"""A device's tensors in, tickets of a link that takes only ordinary memory out: every tensor passes through host memory.

The way between device and host blocks the host in both directions: simple, right, and slower than a pipeline of pinned
buffers would be. Host copies that have not reached the inner link yet are bounded. Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from types import TracebackType
from typing import Self

import torch

from plimsoll.engine.offload.protocol import Link, Ticket
from plimsoll.errors import OffloadFailed
from plimsoll.units import MIB

MOST_WAITING_BYTES = 256 * MIB


class BounceLink:
    """Brings tensors of ``device`` to ``inner`` and back.

    Args:
        inner: closed together with this.
        device: of the tensors.
        most_waiting_bytes: of host copies on their way out; a single larger tensor goes alone.
    """

    def __init__(self, inner: Link, device: torch.device, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self.name = inner.name
        self.inner = inner
        self.waiting_bytes = 0
        self._device = device
        self._most_waiting_bytes = most_waiting_bytes
        self._waiting: deque[tuple[weakref.ref[Ticket], int]] = deque()

    def store(self, tensor: torch.Tensor) -> BounceTicket:
        self._make_room(tensor.nbytes)
        host = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu").copy_(tensor)
        ticket = self.inner.store(host)
        self._waiting.append((weakref.ref(ticket), host.nbytes))
        self.waiting_bytes += host.nbytes
        return BounceTicket(ticket, tensor, self._device)

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _make_room(self, nbytes: int) -> None:
        while self._waiting and self.waiting_bytes + nbytes > self._most_waiting_bytes:
            reference, waiting_bytes = self._waiting.popleft()
            self.waiting_bytes -= waiting_bytes
            ticket = reference()
            if ticket is not None:
                with contextlib.suppress(OffloadFailed):  # its own user will hear of it, in `settle`
                    ticket.settle()


class BounceTicket:
    """A ticket of the inner link, and the device's tensor until that is settled."""

    def __init__(self, inner: Ticket, source: torch.Tensor, device: torch.device) -> None:
        self._inner = inner
        self._source: torch.Tensor | None = source
        self._device = device

    def settle(self) -> None:
        self._inner.settle()
        self._source = None

    def prefetch(self) -> None:
        self._inner.prefetch()

    def read(self) -> torch.Tensor:
        if self._source is not None:
            try:
                self.settle()
            except OffloadFailed:
                return self._source
        return self._inner.read().to(self._device)
