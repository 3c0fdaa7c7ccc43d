"""The unsharded gradients of one FSDP2 module in, this rank's shards of their mean out: a compressed reduce-scatter.

The input is ``(ranks, elements)`` in memory: row i is what rank i gets, a parameter is some neighbouring columns. Each row is
compressed on its own and goes to its rank alone. What is not sent stays, unsharded, with the rank that did not send it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from plimsoll.distributed.gradient_compression.collectives import exchange_rows, reduce_rows
from plimsoll.distributed.gradient_compression.counters import Tally
from plimsoll.distributed.gradient_compression.encoders import Encoder, encoder_of, narrow
from plimsoll.distributed.gradient_compression.feedback import Offer, Outcome, offer, settle, with_velocity
from plimsoll.distributed.gradient_compression.places import draw_places, generator_for
from plimsoll.distributed.gradient_compression.rounds import average, columns_of
from plimsoll.distributed.gradient_compression.settings import Settings
from plimsoll.distributed.gradient_compression.slots import Slot


class ScatterRound(Protocol):
    """One compressed reduce-scatter of several parameters."""

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[Outcome]:
        """What came of each offer; the mean is that of this rank's row."""
        ...


def scatter_round(settings: Settings) -> ScatterRound:
    """The compressed reduce-scatter of a method."""
    if settings.method.kind == "randomk":
        return _SharedPlacesScatter(settings)
    return _PayloadScatter(encoder_of(settings.method))


@dataclass(frozen=True, slots=True)
class _PayloadScatter:
    """Every row goes to its rank as a payload; the rank decodes all that came and averages."""

    encoder: Encoder

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[Outcome]:
        mine = [self.encoder.encode(each.values, each.slot.dtype) for each in offers]
        received = exchange_rows(torch.cat(mine, dim=1), group)
        outcomes = []
        for each, own, theirs in zip(offers, mine, columns_of(received, mine), strict=True):
            ranks, chunk = each.slot.shape
            mean = average(self.encoder, theirs, chunk, each.slot.dtype, ranks)
            outcomes.append(Outcome(mean=mean, sent=self.encoder.decode(own, chunk, each.slot.dtype), kept={}))
        return outcomes


@dataclass(frozen=True, slots=True)
class _SharedPlacesScatter:
    """All ranks send the same places of a row, so a plain reduce-scatter of the values adds up."""

    settings: Settings

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[Outcome]:
        places, values = [], []
        for each in offers:
            ranks, chunk = each.slot.shape
            sent = self.settings.method.elements_sent(chunk)
            drawn = torch.stack(
                [draw_places(generator_for(self.settings.seed, each.slot, row), chunk, sent) for row in range(ranks)]
            )
            places.append(drawn.to(each.values.device))
            values.append(narrow(each.values.gather(1, places[-1]), each.slot.dtype))
        rows = torch.cat(values, dim=1).mul_(1 / group.size())
        total = rows.new_empty(rows.shape[1])
        reduce_rows(total, rows, group)
        own, outcomes = group.rank(), []
        for each, drawn, value, averaged in zip(
            offers, places, values, total.split([each.shape[1] for each in values]), strict=True
        ):
            empty = torch.zeros_like(each.values)
            outcomes.append(
                Outcome(
                    mean=empty[own].index_copy(0, drawn[own], averaged.float()),
                    sent=empty.scatter(1, drawn, value.float()),
                    kept={},
                )
            )
        return outcomes


class Scatter:
    """Averages the unsharded gradients of a module and gives every rank its shards."""

    def __init__(self, settings: Settings, round_: ScatterRound | None, tally: Tally) -> None:
        self._settings = settings
        self._round = round_
        self._tally = tally

    @torch.no_grad()
    def reduce(
        self, slots: Sequence[Slot], output: torch.Tensor, rows: torch.Tensor, *, group: dist.ProcessGroup, step: int
    ) -> None:
        """Put the mean of this rank's row into ``output``.

        Args:
            slots: of the module's parameters, in the order of their columns.
            output: ``(elements of a row,)``.
            rows: ``(ranks, elements of a row)``.
            group: whose ranks take part.
            step: which step of training this belongs to, for the counts.
        """
        widths = [slot.shape[1] for slot in slots]
        pieces, shards = rows.split(widths, dim=1), output.split(widths)
        due = [i for i, slot in enumerate(slots) if slot.is_due(self._settings)]
        plain = [i for i, slot in enumerate(slots) if not slot.is_due(self._settings)]
        is_nonfinite = torch.zeros((), dtype=torch.bool, device=rows.device)
        if len(plain) == len(slots):
            # As it lies in memory: the bits are those of the reduce-scatter that this stands in for.
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
        if due and self._round is not None:
            for i in due:
                _spread_velocity(slots[i], group)
            offers = [offer(slots[i], pieces[i], self._settings.momentum) for i in due]
            # Each rank has its own shard only: what is void somewhere has to be void everywhere.
            is_void = torch.stack([each.is_not_finite for each in offers])
            dist.all_reduce(is_void, group=group)
            outcomes = self._round.reduce(offers, group)
            for flag, i, each, outcome in zip(is_void, due, offers, outcomes, strict=True):
                shards[i].copy_(settle(each, outcome, flag, group.rank()))
            is_nonfinite = is_nonfinite | (is_void > 0).any()
        self._tally.add(slots, self._settings, is_nonfinite, step)
        for slot in slots:
            slot.reductions += 1

    def _with_momentum(self, slot: Slot, mean: torch.Tensor) -> torch.Tensor:
        return with_velocity(slot, mean, self._settings.momentum) if self._settings.momentum else mean


def _spread_velocity(slot: Slot, group: dist.ProcessGroup) -> None:
    """After warm-up: momentum of this rank's shard of the mean becomes momentum of its own gradients, of the same mean."""
    if slot.velocity is not None and slot.velocity.dim() == 1:
        rows = slot.velocity.new_zeros(slot.shape)
        rows[group.rank()] = slot.velocity * group.size()
        slot.velocity = rows
