"""Averages the gradients of one bucket over ranks: some compressed, the others in one plain all-reduce.

DDP puts parameters into buckets as it likes; here a bucket is taken apart again. The plain part, which also carries which
gradients are not finite, is all-reduced first. Where nothing is compressed, that is one all-reduce of the bucket as it lies
in memory, and its bits are those of DDP without a hook.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from plimsoll.distributed.gradient_compression.counters import Tally
from plimsoll.distributed.gradient_compression.feedback import Offer, offer, settle, with_velocity
from plimsoll.distributed.gradient_compression.method import CompressionSettings
from plimsoll.distributed.gradient_compression.rounds import Round
from plimsoll.distributed.gradient_compression.slots import GradientSlot


class BucketMean:
    """Averages gradients over the ranks of a group."""

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
        """Put the mean over ranks in the place of the gradients.

        Args:
            slots: of the parameters, in the same order on every rank.
            gradients: views of ``flat``, one per slot.
            flat: the bucket's memory.
            group: whose ranks are averaged over.
            step: which step of training this belongs to, for the counts.
        """
        due = [(slot, each) for slot, each in zip(slots, gradients, strict=True) if slot.is_due(self._settings)]
        plain = [(slot, each) for slot, each in zip(slots, gradients, strict=True) if not slot.is_due(self._settings)]
        if due:
            offers = [offer(slot, each.reshape(-1), self._settings.momentum) for slot, each in due]
            is_void, is_nonfinite = self._plain(plain, offers, flat, group)
            self._compressed(due, offers, is_void, group)
        else:
            average_whole(flat, group)
            is_nonfinite = ~flat.isfinite().all()
        if self._settings.momentum:
            for slot, each in plain:
                velocity = with_velocity(slot, each.reshape(-1), self._settings.momentum)
                each.copy_(velocity.view(each.shape))
        self._tally.add(slots, self._settings, is_nonfinite, step)
        for slot in slots:
            slot.reductions += 1

    def _plain(
        self,
        plain: Sequence[tuple[GradientSlot, torch.Tensor]],
        offers: Sequence[Offer],
        flat: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Average what is not compressed; which offers are void on some rank, and whether anything is not finite."""
        flags = torch.stack([each.is_not_finite for each in offers]).to(flat.dtype)
        message = torch.cat([*(each.reshape(-1) for _, each in plain), flags])
        average_whole(message, group)
        *averaged, is_void = message.split([*(each.numel() for _, each in plain), len(offers)])
        for (_, each), mean in zip(plain, averaged, strict=True):
            each.copy_(mean.view(each.shape))
        return is_void, (is_void > 0).any() | ~message.isfinite().all()

    def _compressed(
        self,
        due: Sequence[tuple[GradientSlot, torch.Tensor]],
        offers: Sequence[Offer],
        is_void: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        assert self._round is not None, "some parameter is compressed"
        outcomes = self._round.reduce(offers, group)
        for i, ((_, gradient), offered, outcome) in enumerate(zip(due, offers, outcomes, strict=True)):
            gradient.copy_(settle(offered, outcome, is_void[i]).view(gradient.shape))


def average_whole(message: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce as DDP does without a hook: divided first, by multiplication, so that the bits are the same."""
    message.mul_(1 / group.size())
    dist.all_reduce(message, group=group)
