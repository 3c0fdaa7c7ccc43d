"""Open a link by its name, ``disk`` or ``host``, for tensors of a device. A GPU's tensors go to a disk through host memory."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque

import torch

from plimsoll.artifacts.plan import LINK_NAMES
from plimsoll.engine.offload.device_links import PinnedLink
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.engine.offload.protocol import CopyCpuSeconds, Link, Ticket
from plimsoll.errors import OffloadFailed
from plimsoll.units import MIB

_MOST_WAITING_BYTES = 256 * MIB


def default_link_name(device: torch.device) -> str:
    """Return ``host`` for CUDA devices, and ``disk`` for devices whose tensors are in host memory already."""
    return "host" if device.type == "cuda" else "disk"


def open_link(name: str, device: torch.device, *, host_budget: int | None, directory: str | None) -> Link:
    """Open the link ``name`` for tensors of ``device``, and return the link.

    Args:
        name: the name of the link, ``disk`` or ``host``.
        device: the device of the tensors.
        host_budget: the most bytes of host memory that the link may use. A disk link of CPU tensors does not use any.
        directory: the directory of the disk link's file. The default is the system's directory for temporary files.

    Raises:
        OffloadFailed: the name is unknown, the link does not suit this device, or it cannot be opened.

    Example:
        >>> with open_link("disk", torch.device("cpu"), host_budget=None, directory="/var/tmp") as link:
        ...     link.store(torch.arange(3)).read()
        tensor([0, 1, 2])
    """
    if name == "disk":
        disk = DiskLink(directory)
        if device.type == "cpu":
            return disk
        return BounceLink(disk, device, _MOST_WAITING_BYTES if host_budget is None else host_budget)
    if name == "host":
        if device.type == "cuda":
            return PinnedLink(device, host_budget)
        raise OffloadFailed(
            f"The link 'host' cannot offload tensors from the device '{device}'.",
            why="it moves tensors from a CUDA device to host memory"
            + (", and these tensors are already there" if device.type == "cpu" else ""),
            next="use the link 'disk'",
        )
    raise OffloadFailed(
        f"link={name!r} is not known.",
        why=f"the links are {', '.join(LINK_NAMES)}",
        next="use one of them, or leave link= out for the default",
    )


class BounceLink(Link):
    """A link that stores tensors of ``device`` on ``inner``, a link for CPU tensors. They go through ordinary host memory.

    Copies between device and host block the host in both directions. This is simple and correct, but slower than a pipeline of
    pinned buffers would be. The bytes of host copies that have not reached the inner link yet are limited.

    Args:
        inner: the link for CPU tensors. It is closed together with this link.
        device: the device of the tensors.
        most_waiting_bytes: the most bytes of host copies that are being stored. A larger tensor waits until it is the only one.
    """

    def __init__(self, inner: Link, device: torch.device, most_waiting_bytes: int = _MOST_WAITING_BYTES) -> None:
        self.name = inner.name
        self.inner = inner
        self.waiting_bytes = 0
        self._device = device
        self._most_waiting_bytes = most_waiting_bytes
        self._waiting: deque[tuple[weakref.ref[Ticket], int]] = deque()

    @property
    def copy_cpu_seconds(self) -> CopyCpuSeconds:
        return self.inner.copy_cpu_seconds

    def store(self, tensor: torch.Tensor) -> BounceTicket:
        self._make_room(tensor.nbytes)
        host = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu").copy_(tensor)
        ticket = self.inner.store(host)
        self._waiting.append((weakref.ref(ticket), host.nbytes))
        self.waiting_bytes += host.nbytes
        return BounceTicket(ticket, tensor, self._device)

    def close(self) -> None:
        self.inner.close()

    def _make_room(self, nbytes: int) -> None:
        while self._waiting and self.waiting_bytes + nbytes > self._most_waiting_bytes:
            reference, waiting_bytes = self._waiting.popleft()
            self.waiting_bytes -= waiting_bytes
            ticket = reference()
            if ticket is not None:
                with contextlib.suppress(OffloadFailed):  # the ticket's own user gets this error in `settle`
                    ticket.settle()


class BounceTicket:
    """A ticket for one offloaded tensor of a device. It holds a ticket of the inner link (to host memory or disk), and the
    device's tensor until the copy to the inner link has finished.
    """

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
