"""Offers of every rank in, their mean on every rank out: the compressed forms of all-reduce.

Each round is blocking, and all its arithmetic on what came in is done in the order of ranks: every rank computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from plimsoll.distributed.gradient_compression.collectives import exchange_rows, gather_rows
from plimsoll.distributed.gradient_compression.encoders import Encoder, encoder_of, narrow
from plimsoll.distributed.gradient_compression.feedback import Offer, Outcome
from plimsoll.distributed.gradient_compression.lowrank import LowRankMean
from plimsoll.distributed.gradient_compression.places import draw_places, generator_for
from plimsoll.distributed.gradient_compression.settings import Settings


class Round(Protocol):
    """One compressed reduction of several parameters."""

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[Outcome]:
        """What came of each offer; the same call on every rank of the group."""
        ...


def mean_round(settings: Settings) -> Round:
    """The compressed all-reduce of a method."""
    method = settings.method
    if method.kind == "powersgd":
        return LowRankMean(method.rank, settings.seed)
    if method.kind == "randomk":
        return SharedPlacesMean(settings)
    if method.kind == "int8":
        return TwoPassMean(encoder_of(method))
    return GatherMean(encoder_of(method))


@dataclass(frozen=True, slots=True)
class GatherMean:
    """Every rank gets everyone's payload, in one all-gather. What a rank sends grows with the number of ranks."""

    encoder: Encoder

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[Outcome]:
        ranks = group.size()
        mine = [self.encoder.encode(each.values.view(1, -1), each.slot.dtype) for each in offers]
        gathered = gather_rows(torch.cat(mine, dim=1), group)
        outcomes = []
        for each, own, theirs in zip(offers, mine, columns_of(gathered, mine), strict=True):
            elements, dtype = each.slot.elements, each.slot.dtype
            mean = average(self.encoder, theirs, elements, dtype, ranks)
            sent = self.encoder.decode(own, elements, dtype).view_as(each.values)
            outcomes.append(Outcome(mean=mean, sent=sent, kept={}))
        return outcomes


@dataclass(frozen=True, slots=True)
class TwoPassMean:
    """Every rank averages one chunk, compressed on the way in and once more on the way out; the second loss has a residual too.

    What a rank sends does not grow with the number of ranks. Source: Tang et al. 2019, "DoubleSqueeze".
    """

    encoder: Encoder

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[Outcome]:
        ranks = group.size()
        rows = [pad_rows(each.values, ranks) for each in offers]
        mine = [self.encoder.encode(each, offered.slot.dtype) for each, offered in zip(rows, offers, strict=True)]
        received = exchange_rows(torch.cat(mine, dim=1), group)
        chunks, owned = [], []
        for each, row, theirs in zip(offers, rows, columns_of(received, mine), strict=True):
            chunk = average(self.encoder, theirs, row.shape[1], each.slot.dtype, ranks)
            waiting = torch.zeros_like(chunk) if each.slot.owned is None else each.slot.owned.to(chunk.device)
            # As for a rank's own gradient: what nobody used now waits, or it would be sent and thrown away.
            is_used = (chunk != 0).any()
            chunks.append(torch.where(is_used, chunk + waiting, 0.0))
            owned.append(torch.where(is_used, chunks[-1], waiting))
        second = [
            self.encoder.encode(chunk.view(1, -1), each.slot.dtype) for each, chunk in zip(offers, chunks, strict=True)
        ]
        gathered = gather_rows(torch.cat(second, dim=1), group)
        outcomes = []
        for i, each in enumerate(offers):
            elements, dtype, width = each.slot.elements, each.slot.dtype, rows[i].shape[1]
            mean = self.encoder.decode(columns_of(gathered, second)[i], width, dtype).flatten()[:elements]
            sent = self.encoder.decode(mine[i], width, dtype).flatten()[:elements].view_as(each.values)
            left = owned[i] - self.encoder.decode(second[i], width, dtype).view(-1)
            outcomes.append(Outcome(mean=mean, sent=sent, kept={"owned": left}))
        return outcomes


@dataclass(frozen=True, slots=True)
class SharedPlacesMean:
    """All ranks send the same places, so a plain all-reduce of the values adds up; the places need not be sent."""

    settings: Settings

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[Outcome]:
        places, values = [], []
        for each in offers:
            slot = each.slot
            sent = self.settings.method.elements_sent(slot.elements)
            drawn = draw_places(generator_for(self.settings.seed, slot), slot.elements, sent).to(each.values.device)
            places.append(drawn)
            values.append(narrow(each.values.view(-1)[drawn], slot.dtype))
        total = torch.cat(values).mul_(1 / group.size())
        dist.all_reduce(total, group=group)
        outcomes = []
        for each, drawn, value, averaged in zip(
            offers, places, values, total.split([len(each) for each in values]), strict=True
        ):
            empty = torch.zeros_like(each.values.view(-1))
            outcomes.append(
                Outcome(
                    mean=empty.index_copy(0, drawn, averaged.float()),
                    sent=empty.index_copy(0, drawn, value.float()).view_as(each.values),
                    kept={},
                )
            )
        return outcomes


def average(encoder: Encoder, payloads: torch.Tensor, elements: int, dtype: torch.dtype, ranks: int) -> torch.Tensor:
    """The mean of one parameter's payloads, added in the order of ranks, one rank decoded at a time."""
    total = encoder.decode(payloads[:1], elements, dtype).view(-1).mul_(1 / ranks)
    for rank in range(1, ranks):
        total.add_(encoder.decode(payloads[rank : rank + 1], elements, dtype).view(-1), alpha=1 / ranks)
    return total


def columns_of(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What was put side by side, apart again."""
    return torch.split(rows, [each.shape[1] for each in like], dim=1)


def pad_rows(values: torch.Tensor, ranks: int) -> torch.Tensor:
    """A parameter's numbers as ``(ranks, chunk)``, the end filled with zeros."""
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % ranks)).view(ranks, -1)
