"""The contract of every link: store a tensor elsewhere, and return a ticket that brings it back.

A ticket belongs to one thread at a time (forward's, then backward's); several threads may share a link. Time runs::

    store ──── copy-out ────► settle          the source's memory is free from here on
                                     prefetch ──── copy-in ────► read

Results come back flat, with the dtype and length of the stored tensor. Do not write to them.
"""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch


class CopyCpuSeconds(NamedTuple):
    """CPU time that a link's copies have taken so far, on all threads."""

    out_seconds: float
    in_seconds: float


class Ticket(Protocol):
    """One stored tensor: being copied out, stored, or being copied in. Deleting the ticket frees its space on the link."""

    def settle(self) -> None:
        """Wait until the copy-out has finished, and release the source.

        Raises:
            OffloadFailed: the copy-out failed. The source is still held, and `read` returns it, so nothing is lost.
        """

    def prefetch(self) -> None:
        """Allocate memory for the tensor (in the caller's thread) and begin the copy-in. Settles first; a second call does
        nothing.

        Does nothing if the copy-out failed: the source is still held.
        """

    def read(self) -> torch.Tensor:
        """Wait for the copy-in and return the tensor. The ticket then no longer holds it: a second read copies it in again.

        Raises:
            OffloadFailed: the copy-in failed, or brought back other bytes than were stored.
        """


class Link(Protocol):
    """Another place to store tensors: a disk, or pinned host memory."""

    name: str
    """``disk`` or ``host``."""

    @property
    def copy_cpu_seconds(self) -> CopyCpuSeconds:
        """Zero by default: only copies to and from a disk take CPU time."""
        return CopyCpuSeconds(0.0, 0.0)

    def store(self, tensor: torch.Tensor) -> Ticket:
        """Begin to copy ``tensor`` (one dimension, contiguous, detached) out; hold it until the ticket is settled.

        Raises:
            OffloadFailed: the link is full or closed.
        """

    def close(self) -> None:
        """Wait for copies in progress and free everything. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def flat_bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that a link has to carry. Lazy conjugation and negation are resolved, because the bytes lack
    them.
    """
    assert tensor.dim() == 1, "links carry flat tensors"
    assert tensor.is_contiguous(), "links carry flat tensors"
    return tensor.resolve_conj().resolve_neg()
