"""Opens the link of a name, ``disk`` or ``host``, for the tensors of a device."""

from __future__ import annotations

import torch

from plimsoll.engine.offload.device_links import MOST_WAITING_BYTES, BounceLink, PinnedLink
from plimsoll.engine.offload.disk import DiskLink
from plimsoll.engine.offload.protocol import Link
from plimsoll.errors import OffloadFailed

LINK_NAMES = ("disk", "host")


def default_link_name(device: torch.device) -> str:
    """``host`` for CUDA devices, ``disk`` where the tensors are in host memory already."""
    return "host" if device.type == "cuda" else "disk"


def open_link(name: str, device: torch.device, *, host_budget: int | None, directory: str | None) -> Link:
    """Open the link ``name`` for tensors of ``device``.

    Args:
        name: ``disk`` or ``host``.
        device: of the tensors.
        host_budget: bytes of host memory that the link may take; a disk link of CPU tensors takes none.
        directory: where the disk link keeps its file; by default where the system keeps temporary files.

    Raises:
        OffloadFailed: no such link, not for this device, or it cannot be opened.

    Example:
        >>> with open_link("disk", torch.device("cpu"), host_budget=None, directory="/var/tmp") as link:
        ...     link.store(torch.arange(3)).read()
        tensor([0, 1, 2])
    """
    if name == "disk":
        disk = DiskLink(directory)
        if device.type == "cpu":
            return disk
        return BounceLink(disk, device, MOST_WAITING_BYTES if host_budget is None else host_budget)
    if name == "host":
        if device.type == "cuda":
            return PinnedLink(device, host_budget)
        raise OffloadFailed(
            f"The link 'host' cannot take tensors of the device '{device}'.",
            why="it moves tensors from a CUDA device to host memory"
            + (", and there they are already" if device.type == "cpu" else ""),
            next="use the link 'disk'",
        )
    raise OffloadFailed(
        f"There is no link {name!r}.",
        why=f"links are {', '.join(LINK_NAMES)}",
        next="name one of them, or none for the default",
    )
