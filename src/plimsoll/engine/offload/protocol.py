"""What every link can do, whatever it is made of: take a tensor away, and give a ticket that brings it back.

A ticket belongs to one thread at a time (forward's, then backward's); a link may be shared by several. Time runs::

    store ──── copy-out ────► settle          the source's memory is free from here on
                                     prefetch ──── copy-in ────► read

Results come back flat, with the dtype and the length that they went out with. They are not to be written to.
"""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, Protocol, Self

import torch


class CopyCpuSeconds(NamedTuple):
    """CPU time that a link's copies have taken so far, on whatever thread."""

    out_seconds: float
    in_seconds: float


class Ticket(Protocol):
    """One tensor on its way out, away, or on its way back. Letting go of the ticket gives back its space on the link."""

    def settle(self) -> None:
        """Wait until the copy-out has finished, and let go of the source.

        Raises:
            OffloadFailed: the copy-out failed. The source is still held, and `read` returns it, so nothing is lost.
        """

    def prefetch(self) -> None:
        """Make room for the tensor (in the caller's thread) and begin the copy-in. Settles first; a second call is idle.

        Does nothing where the copy-out failed: the source is still here.
        """

    def read(self) -> torch.Tensor:
        """The tensor, once it has arrived. The ticket then no longer holds it: a second read copies it in again.

        Raises:
            OffloadFailed: the copy-in failed, or brought back other bytes than went out.
        """


class Link(Protocol):
    """Somewhere else to keep bytes."""

    name: str
    """``disk`` or ``host``."""

    @property
    def copy_cpu_seconds(self) -> CopyCpuSeconds:
        """None of it by default: only copies to and from a disk take a CPU's time."""
        return CopyCpuSeconds(0.0, 0.0)

    def store(self, tensor: torch.Tensor) -> Ticket:
        """Begin to copy ``tensor`` (one dimension, contiguous, detached) out; hold it until the ticket is settled.

        Raises:
            OffloadFailed: the link has no room for it, or is closed.
        """

    def close(self) -> None:
        """Wait for what is under way and free everything. A second call is idle."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def flat_bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a link has to carry of a tensor: a conjugation that is still to be done is not in the bytes."""
    assert tensor.dim() == 1, "links carry flat tensors"
    assert tensor.is_contiguous(), "links carry flat tensors"
    return tensor.resolve_conj().resolve_neg()
