"""Copies of saved tensors at the other end of a link, to compare rebuilt tensors with.

The bits travel in pieces, so that neither taking nor comparing them needs more memory than one piece: a step that is
inspected keeps to its budget like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from plimsoll.engine.offload.protocol import Link, Ticket
from plimsoll.tracing.recorder.storages import as_integers
from plimsoll.units import MIB

PIECE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is from what it should be. Zero elements and a difference: its layout is another one."""

    differing_elements: int
    elements: int
    max_absolute: float | None


class ReferenceCopy:
    """What one saved tensor (strided, not held) was, over the link.

    Raises:
        OffloadFailed: the link has no room.
    """

    def __init__(self, tensor: torch.Tensor, link: Link) -> None:
        self._like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._device = tensor.device
        self._tickets: list[Ticket] = []
        for piece in pieces(tensor.detach()):
            ticket = link.store(piece.contiguous().view(-1))
            ticket.settle()
            self._tickets.append(ticket)

    def compare(self, value: torch.Tensor) -> Difference | None:
        """How ``value`` differs in its bits; ``None`` if it does not. NaN equals NaN."""
        like, elements = self._like, self._like.numel()
        if value.shape != like.shape or value.dtype is not like.dtype or value.stride() != like.stride():
            return Difference(0, elements, None)
        differing, furthest = 0, 0.0
        for ticket, piece in zip(self._tickets, pieces(value.detach()), strict=True):
            expected, found = ticket.read(), piece.contiguous().view(-1)
            if torch.equal(as_integers(expected), as_integers(found)):
                continue
            apart = (as_integers(expected) != as_integers(found)).view(expected.numel(), -1).any(1)
            if expected.dtype.is_floating_point:
                apart &= ~(expected.isnan() & found.isnan())
            if apart.any():
                differing += int(apart.sum())
                furthest = max(furthest, _furthest(expected[apart], found[apart]))
        return Difference(differing, elements, furthest if math.isfinite(furthest) else None) if differing else None

    def bring_back(self) -> torch.Tensor:
        """The tensor as forward saved it."""
        like = self._like
        overlaps = any(stride == 0 and size > 1 for size, stride in zip(like.shape, like.stride(), strict=True))
        stride = torch.empty(like.shape, device="meta").stride() if overlaps else like.stride()
        value = torch.empty_strided(like.shape, stride, dtype=like.dtype, device=self._device)
        for ticket, piece in zip(self._tickets, pieces(value), strict=True):
            piece.copy_(ticket.read().view(piece.shape))
        return value


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views that make up the tensor, cut along its largest dimension, each of about ``PIECE_BYTES`` at most."""
    count = -(-tensor.numel() * tensor.element_size() // PIECE_BYTES)
    if count <= 1 or tensor.dim() == 0:
        yield tensor
        return
    largest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    yield from tensor.split(max(1, tensor.shape[largest] // count), largest)


def _furthest(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.is_complex():
        return float((expected - found).abs().max())
    return float((expected.double() - found.double()).abs().nan_to_num(nan=math.inf).max())
