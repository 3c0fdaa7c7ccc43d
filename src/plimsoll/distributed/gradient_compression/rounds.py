"""Compressed forms of all-reduce and reduce-scatter: every rank offers a gradient and gets the mean, or its shard of it.

PowerSGD is torch's own. ``randomk`` draws its places from a seed that all ranks share, so the places need not be sent.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from plimsoll.distributed.gradient_compression.encoders import Encoder, encoder_of, narrow
from plimsoll.distributed.gradient_compression.feedback import FeedbackOutcome, Offer
from plimsoll.distributed.gradient_compression.method import CompressionSettings
from plimsoll.distributed.gradient_compression.slots import Form, GradientSlot, factors_of

_NAMES = vars(dist)
# torch 2.13 renamed both and warns of the old names; 2.9 has only these.
_all_gather = _NAMES["all_gather_single" if "all_gather_single" in _NAMES else "all_gather_into_tensor"]
_reduce_scatter = _NAMES["reduce_scatter_single" if "reduce_scatter_single" in _NAMES else "reduce_scatter_tensor"]


def gather_rows(payload: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather: ``(1, bytes)`` of every rank becomes ``(ranks, bytes)``."""
    gathered = payload.new_empty(group.size(), payload.shape[1])
    _all_gather(gathered, payload, group=group)
    return gathered


def exchange_rows(payloads: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-to-all: row i of ``(ranks, bytes)`` goes to rank i; return the rows received from every rank."""
    received = torch.empty_like(payloads)
    dist.all_to_all_single(received, payloads, group=group)
    return received


def reduce_rows(
    output: torch.Tensor,
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce-scatter: rank i's output gets row i of the sum over ranks of ``(ranks, elements)``."""
    _reduce_scatter(output, rows.view(-1), op=op, group=group)


_STATE_BYTES = 8


def generator_for(seed: int, slot: GradientSlot, row: int = 0) -> torch.Generator:
    """A generator that depends on the seed, the parameter, its number of reductions and the row, and on nothing else."""
    text = struct.pack("<qqqq", seed, slot.number, slot.reductions, row)
    digest = hashlib.blake2b(text, digest_size=_STATE_BYTES).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_places(generator: torch.Generator, elements: int, sent: int) -> torch.Tensor:
    """Draw ``sent`` different places below ``elements``, ascending: one from each of ``sent`` equal stretches.

    Every place is equally likely (except for rounding, if the stretches are not whole). Compared with a free draw, two
    neighbours are rarely drawn together, and no shuffle is needed.

    Example:
        >>> draw_places(torch.Generator().manual_seed(0), 4, 4)
        tensor([0, 1, 2, 3])
    """
    starts = torch.arange(sent + 1) * elements // sent
    widths = starts[1:] - starts[:-1]
    steps = (torch.rand(sent, generator=generator, dtype=torch.float64) * widths).long()
    return starts[:-1] + torch.minimum(steps, widths - 1)


def round_of(settings: CompressionSettings, form: Form) -> Round | None:
    """The compressed reduction of a method; ``None`` for the method ``none``."""
    method = settings.method
    if method.kind == "none":
        return None
    if method.kind == "powersgd":
        return LowRankMean(method.rank, settings.seed)
    if method.kind == "randomk":
        return SharedPlaces(settings, form)
    if method.kind == "int8" and form == "mean":
        return TwoPassMean(encoder_of(method))
    return Payloads(encoder_of(method), form)


def _rows_of(values: torch.Tensor, form: Form) -> torch.Tensor:
    """One row per rank if each rank gets its own part of the mean, else a single row."""
    return values if form == "shard" else values.view(1, -1)


@dataclass(frozen=True, slots=True)
class Payloads:
    """Every rank gets all ranks' payloads for the rows that it averages.

    For the whole mean this is one all-gather, and the bytes that a rank sends grow with the number of ranks. For shards it
    is one all-to-all.
    """

    encoder: Encoder
    form: Form

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[FeedbackOutcome]:
        rows = [_rows_of(each.values, self.form) for each in offers]
        mine = [self.encoder.encode(row, each.slot.dtype) for row, each in zip(rows, offers, strict=True)]
        pass_on = exchange_rows if self.form == "shard" else gather_rows
        received = columns_of(pass_on(torch.cat(mine, dim=1), group), mine)
        outcomes = []
        for each, row, own, theirs in zip(offers, rows, mine, received, strict=True):
            elements, dtype = row.shape[1], each.slot.dtype
            mean = average(self.encoder, theirs, elements, dtype, group.size())
            sent = self.encoder.decode(own, elements, dtype).view_as(each.values)
            outcomes.append(FeedbackOutcome(mean=mean, sent=sent, kept={}))
        return outcomes


@dataclass(frozen=True, slots=True)
class TwoPassMean:
    """Every rank averages one chunk; gradients are compressed before the average, and chunks once more after it.

    The loss of the second compression has its own residual. The bytes that a rank sends do not grow with the number of
    ranks. Source: Tang et al. 2019, "DoubleSqueeze".
    """

    encoder: Encoder

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[FeedbackOutcome]:
        ranks = group.size()
        rows = [pad_rows(each.values, ranks) for each in offers]
        mine = [self.encoder.encode(each, offered.slot.dtype) for each, offered in zip(rows, offers, strict=True)]
        received = exchange_rows(torch.cat(mine, dim=1), group)
        chunks, owned = [], []
        for each, row, theirs in zip(offers, rows, columns_of(received, mine), strict=True):
            chunk = average(self.encoder, theirs, row.shape[1], each.slot.dtype, ranks)
            waiting = torch.zeros_like(chunk) if each.slot.owned is None else each.slot.owned.to(chunk.device)
            # If no rank used the parameter now, the residual has to wait: DDP would throw away what is sent.
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
            outcomes.append(FeedbackOutcome(mean=mean, sent=sent, kept={"owned": left}))
        return outcomes


@dataclass(frozen=True, slots=True)
class SharedPlaces:
    """All ranks send the same places of a row, so a plain reduction adds the values up, and the places need not be sent."""

    settings: CompressionSettings
    form: Form

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[FeedbackOutcome]:
        offered, places, values = [_rows_of(each.values, self.form) for each in offers], [], []
        for each, rows in zip(offers, offered, strict=True):
            count, elements = rows.shape
            sent = self.settings.method.elements_sent(elements)
            generators = [generator_for(self.settings.seed, each.slot, row) for row in range(count)]
            drawn = torch.stack([draw_places(generator, elements, sent) for generator in generators])
            places.append(drawn.to(rows.device))
            values.append(narrow(rows.gather(1, places[-1]), each.slot.dtype))
        message = torch.cat(values, dim=1).mul_(1 / group.size())
        own, total = 0, message.view(-1)
        if self.form == "shard":
            own, total = group.rank(), message.new_empty(message.shape[1])
            reduce_rows(total, message, group)
        else:
            dist.all_reduce(total, group=group)
        outcomes = []
        widths = [each.shape[1] for each in values]
        for each, rows, drawn, value, averaged in zip(
            offers, offered, places, values, total.split(widths), strict=True
        ):
            empty = torch.zeros_like(rows)
            mean = empty[own].index_copy(0, drawn[own], averaged.float())
            sent_values = empty.scatter(1, drawn, value.float()).view_as(each.values)
            outcomes.append(FeedbackOutcome(mean=mean, sent=sent_values, kept={}))
        return outcomes


def average(encoder: Encoder, payloads: torch.Tensor, elements: int, dtype: torch.dtype, ranks: int) -> torch.Tensor:
    """The mean of one parameter's payloads, added in the order of ranks; decodes one rank at a time."""
    total = encoder.decode(payloads[:1], elements, dtype).view(-1).mul_(1 / ranks)
    for rank in range(1, ranks):
        total.add_(encoder.decode(payloads[rank : rank + 1], elements, dtype).view(-1), alpha=1 / ranks)
    return total


def columns_of(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Split concatenated rows into pieces with the widths of ``like``."""
    return torch.split(rows, [each.shape[1] for each in like], dim=1)


def pad_rows(values: torch.Tensor, ranks: int) -> torch.Tensor:
    """A parameter's elements as ``(ranks, chunk)``, padded with zeros at the end."""
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % ranks)).view(ranks, -1)


_BUCKET = 0
_FIRST_STEP = 2
"""torch's state does not allow an earlier start, because DDP rebuilds its buckets after the first step; our buckets stay."""
_EPSILON = 1e-8
"""Added to the length of columns before dividing by it, so that a column of zeros stays zero instead of NaN."""
_LETTING_GO_SECONDS = 1.0
"""The longest wait until torch frees its callbacks; usually it takes microseconds."""


class _State(PowerSGDState):
    """torch's state in a class of our own, whose instances allow weak references."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The part of DDP's bucket interface that torch's hook uses."""

    flat: torch.Tensor
    matrices: list[torch.Tensor]

    def index(self) -> int:
        return _BUCKET

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return self.matrices

    def is_last(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class LowRankMean:
    """One step of subspace iteration per reduction, starting from the factor of the previous one; two all-reduces.

    torch's hook does the arithmetic, but its state is per bucket, and DDP rebuilds its buckets after the first step. So the
    factors are kept in the slots, per parameter, and the hook gets buckets of our own.
    """

    rank: int
    seed: int

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[FeedbackOutcome]:
        # torch orders factors by shape, in the order of each shape's first occurrence.
        first = {shape: i for i, shape in reversed(list(enumerate(_matrix_of(each.slot) for each in offers)))}
        order = sorted(range(len(offers)), key=lambda i: first[_matrix_of(offers[i].slot)])
        ordered = [offers[i] for i in order]
        flat = torch.cat([each.values.reshape(-1) for each in ordered])
        pieces = flat.split([each.slot.elements for each in ordered])
        matrices = [piece.view(_matrix_of(each.slot)) for piece, each in zip(pieces, ordered, strict=True)]
        factors = [self._right_factor(each.slot, flat.device) for each in ordered]
        state = self._state(ordered, factors, group)
        powerSGD_hook(state, _Bucket(flat, matrices)).wait()  # type: ignore[arg-type]  # _Bucket has all that the hook uses
        right_factors = state.q_memory_dict[_BUCKET]
        # The callbacks of torch's hook hold the group. A thread of the group frees them after the result is there. If the
        # group is destroyed before that, its last reference is dropped on its own thread, which aborts the process.
        let_go = threading.Event()
        weakref.finalize(state, let_go.set)
        del state
        let_go.wait(_LETTING_GO_SECONDS)
        widths = [factor.numel() for factor in factors]
        outcomes: list[FeedbackOutcome | None] = [None] * len(offers)
        for i, each, piece, kept in zip(order, ordered, pieces, right_factors.split(widths), strict=True):
            _, columns, rank = factors_of(each.slot.shape, self.rank)
            # As in torch and in the paper, the agreed mean counts as sent: residuals add up over ranks.
            sent = piece.view_as(each.values)
            outcomes[i] = FeedbackOutcome(mean=piece, sent=sent, kept={"factor": kept.view(columns, rank).clone()})
        return [outcome for outcome in outcomes if outcome is not None]

    def _state(self, offers: Sequence[Offer], factors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> _State:
        state = _State(
            process_group=group,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=_FIRST_STEP,
            min_compression_rate=0,
            use_error_feedback=False,
            warm_start=True,
            orthogonalization_epsilon=_EPSILON,
            batch_tensors_with_same_shape=True,
        )
        state.iter = _FIRST_STEP
        rows = [math.prod(factors_of(each.slot.shape, self.rank)[::2]) for each in offers]
        state.p_memory_dict[_BUCKET] = factors[0].new_empty(sum(rows))
        state.q_memory_dict[_BUCKET] = torch.cat([factor.reshape(-1) for factor in factors])
        return state

    def _right_factor(self, slot: GradientSlot, device: torch.device) -> torch.Tensor:
        """The factor of the last step. Columns of zeros would stay zero for ever, so they are drawn again."""
        _, columns, rank = factors_of(slot.shape, self.rank)
        drawn = torch.randn(columns, rank, generator=generator_for(self.seed, slot)).to(device)
        if slot.factor is None:
            return drawn
        factor = slot.factor.to(device)
        return torch.where((factor == 0).all(dim=0), drawn, factor)


def _matrix_of(slot: GradientSlot) -> tuple[int, int]:
    return slot.shape[0], math.prod(slot.shape[1:])


Round: TypeAlias = LowRankMean | SharedPlaces | TwoPassMean | Payloads
"""One compressed reduction of several parameters; every rank of a group has to call ``reduce`` alike."""
