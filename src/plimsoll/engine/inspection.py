"""Inspections: in some calls of a region (a module that the plan decides about), compare all rebuilt tensors with the saved
tensors, bit for bit.

One region is inspected in training calls 2, 4, 8, 16 … of the model and then in every n-th call, each time another region.
Regions that run code without visible torch calls are inspected ten times as often. The tensors that the region drops are
offloaded over a link (to host memory or disk), and in backward each rebuilt tensor is compared with its copy. If they differ,
backward gets the offloaded tensor, so the gradients of the step are correct. The fault is stored and a warning is raised, and
from the next call on the region keeps everything. Values that depend on a lossy codec always differ and are not compared.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from plimsoll.artifacts.fault import Cause, Fault
from plimsoll.engine.capturing import is_capturing
from plimsoll.engine.hooks import Cell
from plimsoll.engine.offload.open import default_link_name, open_link
from plimsoll.engine.offload.protocol import Link, Ticket
from plimsoll.engine.replay import CallReplay
from plimsoll.engine.replay_plan import ReplayPlan
from plimsoll.errors import OffloadFailed
from plimsoll.tracing.recorder.storages import as_integers, same_contents
from plimsoll.units import MIB

OFTEN = 10
"""A factor. A region that runs code whose torch calls are not seen is inspected this many times as often as other regions."""


class Inspector:
    """Chooses the region calls (calls of modules that the plan decides about) to inspect, and collects the faults that
    inspections find.

    It inspects one region in every ``every``-th training call of the model, and in some early calls. If ``every`` is 0, it
    inspects none.
    """

    def __init__(self, every: int, device: torch.device) -> None:
        self.faults: list[Fault] = []
        self.inspected_calls = 0
        self.inspected_tensors = 0
        self._every = every
        self._device = device
        self._regions: Sequence[str] = ()
        self._link: Link | None = None
        self._opaque: list[str] = []
        self._step = 0
        self._turn = 0
        self._opaque_turn = 0
        self._chosen = ""
        self._is_due = False
        self._is_thorough = False

    def watch(self, regions: Sequence[str]) -> None:
        """Set the names of the managed regions. They are inspected one after the other in this order."""
        self._regions = regions
        self._opaque = [name for name in self._opaque if name in regions]

    def suspect(self, region: str) -> None:
        """Inspect this region ten times as often as others, because it runs code whose torch calls are not seen (an extension,
        for example).
        """
        if region not in self._opaque:
            self._opaque.append(region)

    def begin_step(self) -> None:
        """Start a training call of the model. If an inspection is due, choose the region to inspect."""
        self._step += 1
        self._chosen = ""
        if not self._every:
            return
        is_steady = self._step % self._every == 0
        is_early = 1 < self._step < self._every and self._step.bit_count() == 1
        self._is_due |= is_steady or is_early or bool(self._opaque and self._step % max(1, self._every // OFTEN) == 0)
        if self._is_due and self._opaque and not is_steady:
            self._chosen = self._opaque[self._opaque_turn % len(self._opaque)]
            self._opaque_turn += 1
        elif self._is_due and self._regions:
            self._chosen = self._regions[self._turn % len(self._regions)]
            self._turn += 1

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Return a context manager. Inside its block, each call of each region is inspected."""
        self._is_thorough = True
        try:
            yield
        finally:
            self._is_thorough = False

    def inspect(self, plan: ReplayPlan, tensors: Sequence[torch.Tensor]) -> Inspection | None:
        """If this call is to be inspected, copy the tensors that it is about to drop, and return the `Inspection` that will
        compare them with the rebuilt tensors. Otherwise return ``None``.

        Regions whose recipes have collectives are not inspected: finding the cause of a fault runs recipes again on this rank
        only, and the collectives would wait for the other ranks.

        If the link is full, the call is not inspected and a warning is raised; training continues. While a CUDA graph is
        captured no call is inspected: the copies would go over the link.
        """
        if plan.collectives or (not self._is_thorough and plan.name != self._chosen) or is_capturing(plan.device_type):
            return None
        try:
            if self._link is None:
                self._link = open_link(default_link_name(self._device), self._device, host_budget=None, directory=None)
            slots = (*plan.exact_slots, *plan.leaf_slots)
            size = piece_bytes(sum(tensors[slot].numel() * tensors[slot].element_size() for slot in slots))
            copies = {slot: ReferenceCopy(tensors[slot], self._link, size) for slot in slots}
        except OffloadFailed as error:
            warnings.warn(f"plimsoll: region {plan.name!r} could not be inspected: {error.found}", stacklevel=8)
            return None
        self._is_due = False
        self.inspected_calls += 1
        return Inspection(self, copies, self._step)

    def report(self, fault: Fault) -> None:
        self.faults.append(fault)
        warnings.warn(
            f"plimsoll: {fault} Backward got the right tensor; from now on the region keeps all its activations.",
            stacklevel=2,
        )


class Inspection:
    """One inspected call of one region. It holds copies of the tensors that the call dropped."""

    __slots__ = ("_copies", "_has_reported", "_inspector", "_step")

    def __init__(self, inspector: Inspector, copies: dict[int, ReferenceCopy], step: int) -> None:
        self._inspector = inspector
        self._copies = copies
        self._step = step
        self._has_reported = False

    def examine(self, replay: CallReplay, cell: Cell, value: torch.Tensor) -> torch.Tensor:
        """Compare a rebuilt tensor with the copy of the tensor that forward saved. ``slot`` is its number in the order of
        saving. Return the tensor for backward: forward's if the two differ, otherwise the rebuilt one.
        """
        copy = self._copies.get(cell.index)
        if copy is None:
            return value
        self._inspector.inspected_tensors += 1
        difference = copy.compare(value)
        if difference is None:
            return value
        replay.recipes.distrust()
        if not self._has_reported:
            self._has_reported = True
            self._inspector.report(self._fault(replay, cell.index, difference))
        return copy.bring_back()

    def _fault(self, replay: CallReplay, slot: int, difference: Difference) -> Fault:
        """Return a `Fault` (the description of a wrong rebuilt tensor) for the earliest wrong value of the region, not for the
        value that was found first.

        Backward reads the last wrong value first. So the search begins at the start of the region and ends at the earliest
        wrong value.
        """
        plan = replay.recipes.plan
        graph = plan.graph
        order = sorted(plan.exact_slots, key=lambda other: graph.values[graph.slots[other].value].producer)
        for earlier in order[: order.index(slot)]:
            again = replay.rebuild(earlier)
            found = None if again is None else self._copies[earlier].compare(again)
            if found is not None:
                slot, difference = earlier, found
                break
        value = graph.values[graph.slots[slot].value]
        return Fault(
            step=self._step,
            region=plan.name,
            call=plan.call,
            value=value.name,
            op=graph.ops[value.producer].name if value.producer >= 0 else value.origin,
            cause=self._cause(replay, slot, difference),
            elements=difference.elements,
            differing_elements=difference.differing_elements,
            max_absolute_difference=difference.max_absolute,
        )

    def _cause(self, replay: CallReplay, slot: int, difference: Difference) -> Cause:
        """Return, as text, why a rebuilt tensor differs from forward's.

        First look at the tensors that the call held, then run the recipe (the ops that rebuild the tensor) twice more and
        compare.
        """
        plan = replay.recipes.plan
        if not difference.differing_elements:
            return Cause.CHANGED_LAYOUT
        if plan.graph.slots[slot].value in plan.choice.packed:
            return Cause.TRANSFER
        if self._has_changed_leaf(replay, slot):
            return Cause.IN_PLACE_WRITE
        first, second = replay.rebuild(slot), replay.rebuild(slot)
        if first is not None and second is not None and not same_contents(first, second):
            return Cause.NON_DETERMINISTIC
        if any(plan.graph.ops[op].is_random for op in plan.recipe_of(slot)):
            return Cause.RANDOM_STATE
        return Cause.UNKNOWN

    def _has_changed_leaf(self, replay: CallReplay, slot: int) -> bool:
        """Return whether a kept tensor was written in a way that autograd does not see (``.data``, numpy). Only the kept
        tensors that the recipe (the ops that rebuild a tensor) starts from are compared.
        """
        leaves = replay.leaves_of(slot) or ()
        kept = (leaf for leaf in leaves if isinstance(leaf, Cell) and leaf.index in self._copies)
        return any(self._copies[leaf.index].compare(leaf.read()) is not None for leaf in kept)


PIECE_BYTES = 4 * MIB
"""The smallest size in bytes of one piece. Reference copies of dropped tensors go over the link piece by piece."""
_MOST_PIECES = 64
"""The largest number of pieces for the reference copies of one region. It is limited because the program waits for each piece.

With pieces of 4 MiB, a region of 1.5 GiB would have 375.
"""


def piece_bytes(total_bytes: int) -> int:
    """Return the size in bytes of one piece of a reference copy, for a region whose dropped tensors take ``total_bytes``.

    A piece is a small share of the dropped tensors, so that an inspected step stays within its budget.
    """
    return max(PIECE_BYTES, -(-total_bytes // _MOST_PIECES))


@dataclass(frozen=True, slots=True)
class Difference:
    """Data: how a tensor differs from the expected tensor. If ``differing_elements`` is 0, the layout differs.

    ``max_absolute`` is the largest absolute difference of two elements, or ``None`` if it is not finite or not known.
    """

    differing_elements: int
    elements: int
    max_absolute: float | None


class ReferenceCopy:
    """A copy of one saved tensor (strided) on a link: in host memory or on disk. The rebuilt tensor is compared with it.

    The copy goes over the link in pieces, so that inspected steps stay within the budget too.

    Raises:
        OffloadFailed: the link is full.
    """

    def __init__(self, tensor: torch.Tensor, link: Link, most_bytes: int = PIECE_BYTES) -> None:
        self._like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._device = tensor.device
        self._most_bytes = most_bytes
        self._tickets: list[Ticket] = []
        for piece in pieces(tensor.detach(), most_bytes):
            ticket = link.store(piece.contiguous().view(-1))
            ticket.settle()
            self._tickets.append(ticket)

    def compare(self, value: torch.Tensor) -> Difference | None:
        """Return how ``value`` differs from the copy in its bits, or ``None`` if it does not differ. NaN equals NaN."""
        like, elements = self._like, self._like.numel()
        if value.shape != like.shape or value.dtype is not like.dtype or value.stride() != like.stride():
            return Difference(0, elements, None)
        differing, furthest = 0, 0.0
        for ticket, piece in zip(self._tickets, pieces(value.detach(), self._most_bytes), strict=True):
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
        """Return the tensor that forward saved, brought back from the other end of the link."""
        like = self._like
        overlaps = any(stride == 0 and size > 1 for size, stride in zip(like.shape, like.stride(), strict=True))
        stride = torch.empty(like.shape, device="meta").stride() if overlaps else like.stride()
        value = torch.empty_strided(like.shape, stride, dtype=like.dtype, device=self._device)
        for ticket, piece in zip(self._tickets, pieces(value, self._most_bytes), strict=True):
            piece.copy_(ticket.read().view(piece.shape))
        return value


def pieces(tensor: torch.Tensor, most_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
    """Yield views that make up the tensor. It is cut along its largest dimension, and a view has at most about ``most_bytes``
    bytes.
    """
    count = -(-tensor.numel() * tensor.element_size() // most_bytes)
    if count <= 1 or tensor.dim() == 0:
        yield tensor
        return
    largest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    yield from tensor.split(max(1, tensor.shape[largest] // count), largest)


def _furthest(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.is_complex():
        return float((expected - found).abs().max())
    return float((expected.double() - found.double()).abs().nan_to_num(nan=math.inf).max())
