"""Averages gradients over ranks: compresses those that are due, reduces the others as torch would, and counts all bytes.

DDP packs parameters into buckets; here a bucket is split into parameters again. The uncompressed part is all-reduced first,
together with flags for gradients that are not finite. If nothing is compressed, the whole bucket is all-reduced in place, with
the same bits as DDP without a hook. Under FSDP2 every rank gets only its own shards of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from plimsoll.distributed.gradient_compression.feedback import Offer, offer, settle, with_velocity
from plimsoll.distributed.gradient_compression.method import CompressionSettings
from plimsoll.distributed.gradient_compression.rounds import Round, reduce_rows
from plimsoll.distributed.gradient_compression.slots import GradientSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counters of this rank since compression began.

    Attributes:
        steps: reductions of the whole model.
        uncompressed_bytes: bytes that this rank would have sent without compression, in rings.
        sent_bytes: bytes that it sent.
        nonfinite_steps: steps with NaN or infinity in a gradient on any rank; such gradients leave no residual.
    """

    steps: int = 0
    uncompressed_bytes: int = 0
    sent_bytes: int = 0
    nonfinite_steps: int = 0

    @property
    def ratio(self) -> float:
        """Uncompressed bytes divided by sent bytes; 1 before anything was sent."""
        return self.uncompressed_bytes / self.sent_bytes if self.sent_bytes else 1.0


class Tally:
    """Counts steps and bytes. Numbers that only the device knows are added there, and copied to the host on ``read``."""

    def __init__(self) -> None:
        self._known = Counters()
        self._nonfinite_steps: torch.Tensor | None = None
        self._last_nonfinite: torch.Tensor | None = None

    def add(
        self, slots: Sequence[GradientSlot], settings: CompressionSettings, is_nonfinite: torch.Tensor, step: int
    ) -> None:
        """Count one reduction of some parameters, here and in their slots.

        ``is_nonfinite`` is a boolean tensor on the device. A step (counted from 0) counts at most once as not finite.
        """
        sent_bytes = sum(slot.sent_bytes(settings) if slot.is_due(settings) else slot.dense_bytes for slot in slots)
        self._known = replace(
            self._known,
            steps=max(self._known.steps, step + 1),
            uncompressed_bytes=self._known.uncompressed_bytes + sum(slot.dense_bytes for slot in slots),
            sent_bytes=self._known.sent_bytes + sent_bytes,
        )
        if self._nonfinite_steps is None or self._last_nonfinite is None:
            self._nonfinite_steps = torch.zeros((), dtype=torch.int64, device=is_nonfinite.device)
            self._last_nonfinite = torch.full_like(self._nonfinite_steps, -1)
        self._nonfinite_steps += is_nonfinite & (self._last_nonfinite < step)
        self._last_nonfinite = torch.where(is_nonfinite, step, self._last_nonfinite)
        for slot in slots:
            slot.reductions += 1

    def read(self) -> Counters:
        """The counts so far."""
        counted = 0 if self._nonfinite_steps is None else int(self._nonfinite_steps)
        return replace(self._known, nonfinite_steps=self._known.nonfinite_steps + counted)

    def restore(self, counters: Counters) -> None:
        """Continue from saved counters."""
        self._known = counters
        self._nonfinite_steps = self._last_nonfinite = None


class Averages:
    """Averages gradients over the ranks of a group; ``round_`` is ``None`` if the method is ``none``."""

    def __init__(self, settings: CompressionSettings, round_: Round | None, tally: Tally) -> None:
        self._settings = settings
        self._round = round_
        self._tally = tally

    @torch.no_grad()
    def reduce(
        self,
        slots: Sequence[GradientSlot],
        gradients: Sequence[torch.Tensor],
        flat: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        step: int,
    ) -> None:
        """Replace the gradients by their mean over ranks.

        Slots are in the same order on every rank. ``gradients`` are views of the bucket's memory ``flat``, one per slot.
        ``step`` is the step of training, for the counts.
        """
        pairs = list(zip(slots, gradients, strict=True))
        due = [(slot, each) for slot, each in pairs if slot.is_due(self._settings)]
        plain = [(slot, each) for slot, each in pairs if not slot.is_due(self._settings)]
        if due:
            assert self._round is not None, "some parameter is compressed"
            offers = [offer(slot, each.reshape(-1), self._settings.momentum) for slot, each in due]
            is_void, is_nonfinite = self._plain(plain, offers, flat, group)
            outcomes = self._round.reduce(offers, group)
            for flag, (_, gradient), offered, outcome in zip(is_void, due, offers, outcomes, strict=True):
                gradient.copy_(settle(offered, outcome, flag).view(gradient.shape))
        else:
            average_whole(flat, group)
            is_nonfinite = ~flat.isfinite().all()
        if self._settings.momentum:
            for slot, each in plain:
                each.copy_(self._with_momentum(slot, each.reshape(-1)).view(each.shape))
        self._tally.add(slots, self._settings, is_nonfinite, step)

    @torch.no_grad()
    def scatter(
        self,
        slots: Sequence[GradientSlot],
        output: torch.Tensor,
        rows: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        step: int,
    ) -> None:
        """Write the mean of this rank's row to ``output``; ``rows`` are ``(ranks, elements)``, in the order of the slots."""
        widths = [slot.shape[1] for slot in slots]
        pieces, shards = rows.split(widths, dim=1), output.split(widths)
        due = [i for i, slot in enumerate(slots) if slot.is_due(self._settings)]
        plain = [i for i, slot in enumerate(slots) if not slot.is_due(self._settings)]
        is_nonfinite = torch.zeros((), dtype=torch.bool, device=rows.device)
        if not due:
            # Reduce the memory as a whole: then the bits equal the reduce-scatter's that this replaces.
            reduce_rows(output, rows, group, dist.ReduceOp.AVG)
            is_nonfinite = ~output.isfinite().all()
            for slot, shard in zip(slots, shards, strict=True):
                shard.copy_(self._with_momentum(slot, shard))
        elif plain:
            message = torch.cat([pieces[i] for i in plain], dim=1).mul_(1 / group.size())
            averaged = message.new_empty(message.shape[1])
            reduce_rows(averaged, message, group)
            for i, mean in zip(plain, averaged.split([widths[i] for i in plain]), strict=True):
                shards[i].copy_(self._with_momentum(slots[i], mean))
            is_nonfinite = ~averaged.isfinite().all()
        if due:
            assert self._round is not None, "some parameter is compressed"
            for i in due:
                _spread_velocity(slots[i], group)
            offers = [offer(slots[i], pieces[i], self._settings.momentum) for i in due]
            # Each rank only has its own shard. If a gradient is not finite on one rank, all ranks must know.
            is_void = torch.stack([each.is_not_finite for each in offers])
            dist.all_reduce(is_void, group=group)
            outcomes = self._round.reduce(offers, group)
            for flag, i, each, outcome in zip(is_void, due, offers, outcomes, strict=True):
                shards[i].copy_(settle(each, outcome, flag, group.rank()))
            is_nonfinite = is_nonfinite | (is_void > 0).any()
        self._tally.add(slots, self._settings, is_nonfinite, step)

    def _plain(
        self,
        plain: Sequence[tuple[GradientSlot, torch.Tensor]],
        offers: Sequence[Offer],
        flat: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Average the uncompressed gradients. Return which offers are not finite on some rank, and if anything is not."""
        flags = torch.stack([each.is_not_finite for each in offers]).to(flat.dtype)
        message = torch.cat([*(each.reshape(-1) for _, each in plain), flags])
        average_whole(message, group)
        *averaged, is_void = message.split([*(each.numel() for _, each in plain), len(offers)])
        for (_, each), mean in zip(plain, averaged, strict=True):
            each.copy_(mean.view(each.shape))
        return is_void, (is_void > 0).any() | ~message.isfinite().all()

    def _with_momentum(self, slot: GradientSlot, mean: torch.Tensor) -> torch.Tensor:
        return with_velocity(slot, mean, self._settings.momentum) if self._settings.momentum else mean


def _spread_velocity(slot: GradientSlot, group: dist.ProcessGroup) -> None:
    """After warm-up, turn the momentum of this rank's shard of the mean into momentum of its own gradient with that mean."""
    if slot.velocity is not None and slot.velocity.dim() == 1:
        rows = slot.velocity.new_zeros(slot.shape)
        rows[group.rank()] = slot.velocity * group.size()
        slot.velocity = rows


def average_whole(message: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce like DDP without a hook: first multiply by 1 / ranks, so that the bits are the same."""
    message.mul_(1 / group.size())
    dist.all_reduce(message, group=group)
