"""The contract of every link (to host memory or disk): store a tensor elsewhere, and return a ticket that brings it back.

A ticket belongs to one thread at a time (first forward's, then backward's). Several threads may share a link. The steps follow
each other in this order::

    store ──── copy-out ────► settle          the source's memory is free from here on
                                     prefetch ──── copy-in ────► read

Tensors come back flat, with the dtype and length of the stored tensor. Do not write to the returned tensors.
"""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch


class CopyCpuSeconds(NamedTuple):
    """The CPU time in seconds of a link's copies to and from it so far, added up over all threads."""

    out_seconds: float
    in_seconds: float


class Ticket(Protocol):
    """A protocol for tickets: a ticket is one tensor on a link, or on the way there or back. Deleting it frees the space on the
    link.
    """

    def settle(self) -> None:
        """Wait until the copy to the link has finished, and release the original tensor.

        Raises:
            OffloadFailed: the copy failed. The original tensor is still held, and `read` returns it, so its contents are not
                lost.
        """

    def prefetch(self) -> None:
        """Allocate memory for the tensor (in the caller's thread), and begin to copy it back. A second call does nothing.

        The method first waits for the copy to the link. If that copy failed, the method does nothing, because the original
        tensor is still held.
        """

    def read(self) -> torch.Tensor:
        """Wait until the tensor is copied back, and return it. The ticket then no longer holds the tensor: a second read copies
        it back again.

        Raises:
            OffloadFailed: the copy failed, or brought back other bytes than were stored.
        """


class Link(Protocol):
    """A protocol for links: a link stores tensors in another place, on a disk or in pinned host memory."""

    name: str
    """The name of the link: ``disk`` or ``host``."""

    @property
    def copy_cpu_seconds(self) -> CopyCpuSeconds:
        """The CPU time in seconds that the link's copies have taken so far. It is zero by default: only copies to and from a
        disk take CPU time.
        """
        return CopyCpuSeconds(0.0, 0.0)

    def store(self, tensor: torch.Tensor) -> Ticket:
        """Begin to copy ``tensor`` (one dimension, contiguous, detached) to the link, and return a ticket. The ticket holds
        ``tensor`` until it is settled.

        Raises:
            OffloadFailed: the link is full or closed.
        """

    def close(self) -> None:
        """Wait for copies in progress, and free all memory and files. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def flat_bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor with the bytes that a link has to carry.

    Lazy conjugation and negation are resolved, because the bytes of the tensor do not show them.
    """
    assert tensor.dim() == 1, "links carry flat tensors"
    assert tensor.is_contiguous(), "links carry flat tensors"
    return tensor.resolve_conj().resolve_neg()
