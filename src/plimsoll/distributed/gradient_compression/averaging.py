"""Averages gradients over ranks: compresses those that are due, reduces the others like torch, and counts all bytes.

A gradient is due if it is compressed and its warm-up is over. DDP and FSDP2 reduce several parameters in one piece of memory.
This module splits that memory into parameters again. Uncompressed gradients travel together, with flags for gradients that are
not finite. If nothing is compressed, the memory is reduced as a whole, with the same bits as torch. Under FSDP2, each rank gets
only its own shards of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from plimsoll.distributed.gradient_compression.feedback import offer, settle, with_velocity
from plimsoll.distributed.gradient_compression.method import CompressionSettings
from plimsoll.distributed.gradient_compression.powersgd import LowRankMean
from plimsoll.distributed.gradient_compression.slots import Form, GradientSlot
from plimsoll.distributed.gradient_compression.topk import TopKMean

_NAMES = vars(dist)
# torch 2.13 renamed it and warns of the old name.
_reduce_scatter = _NAMES["reduce_scatter_single" if "reduce_scatter_single" in _NAMES else "reduce_scatter_tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Data: this rank's counts since compression began.

    Attributes:
        steps: the number of reductions of the whole model.
        uncompressed_bytes: the bytes that this rank would have sent without compression, in ring collectives.
        sent_bytes: the bytes that this rank sent.
        nonfinite_steps: the number of steps with NaN or infinity in a gradient on any rank. Such gradients leave no residual.
    """

    steps: int = 0
    uncompressed_bytes: int = 0
    sent_bytes: int = 0
    nonfinite_steps: int = 0

    @property
    def ratio(self) -> float:
        """Uncompressed bytes divided by sent bytes. Before anything was sent, the ratio is 1."""
        return self.uncompressed_bytes / self.sent_bytes if self.sent_bytes else 1.0


class Tally:
    """Counts bytes and steps while training.

    Only the device knows whether a step is finite; ``read`` copies that to the host.
    """

    def __init__(self, known: Counters = Counters()) -> None:
        self._known = known
        self._in_step: set[int] = set()
        self._nonfinite_before: torch.Tensor | int = 0
        self._is_nonfinite_now: torch.Tensor | bool = False

    def begin(self, slots: Sequence[GradientSlot]) -> None:
        """Note that these parameters are reduced now. A step ends when one of its parameters is reduced again."""
        numbers = {slot.number for slot in slots}
        if not self._in_step or self._in_step & numbers:
            self._in_step = set()
            self._nonfinite_before = self._nonfinite_before + self._is_nonfinite_now
            self._is_nonfinite_now = False
            self._known = replace(self._known, steps=self._known.steps + 1)
        self._in_step |= numbers

    def add(self, slots: Sequence[GradientSlot], settings: CompressionSettings, is_nonfinite: torch.Tensor) -> None:
        """Count one reduction of some parameters, here and in the parameters' records (slots).

        ``is_nonfinite`` is a boolean tensor on the device. A step counts at most once as not finite.
        """
        self._is_nonfinite_now = is_nonfinite | self._is_nonfinite_now
        self._known = replace(
            self._known,
            uncompressed_bytes=self._known.uncompressed_bytes + sum(slot.dense_bytes for slot in slots),
            sent_bytes=self._known.sent_bytes
            + sum(slot.sent_bytes(settings) if slot.is_due(settings) else slot.dense_bytes for slot in slots),
        )
        for slot in slots:
            slot.reductions += 1

    def read(self) -> Counters:
        """Return the counts of bytes and steps so far. On a GPU, this waits for the device."""
        counted = int(self._nonfinite_before) + int(self._is_nonfinite_now)
        return replace(self._known, nonfinite_steps=self._known.nonfinite_steps + counted)


@dataclass(frozen=True, slots=True)
class SplitGradients:
    """Data: the gradients of one rank and the memory for their mean, each as a whole and split into parameters.

    ``rows`` are ``(1, elements)`` if each rank gets the whole mean, or ``(ranks, elements of a shard)`` if it gets its shard
    only.
    """

    rows: torch.Tensor
    mean: torch.Tensor
    split_rows: Sequence[torch.Tensor]
    split_mean: Sequence[torch.Tensor]

    @classmethod
    def of_mean(cls, flat: torch.Tensor, gradients: Sequence[torch.Tensor]) -> SplitGradients:
        """Describe gradients that are replaced by their mean, as under DDP. The gradients are views of the memory ``flat``."""
        return cls(flat.view(1, -1), flat, [each.reshape(1, -1) for each in gradients], gradients)

    @classmethod
    def of_shard(cls, rows: torch.Tensor, mean: torch.Tensor, slots: Sequence[GradientSlot]) -> SplitGradients:
        """Describe gradients as under FSDP2, where each rank gets only its own part of the mean. ``rows`` has one row per rank,
        and the mean of this rank's row is stored in ``mean``.
        """
        widths = [slot.shape[1] for slot in slots]
        return cls(rows, mean, rows.split(widths, dim=1), mean.split(widths))


class Averages:
    """Averages gradients over the ranks of a group, with the compression that the settings choose. The hooks of DDP and FSDP2
    call it.
    """

    def __init__(self, settings: CompressionSettings, form: Form) -> None:
        self.tally = Tally()
        self._settings = settings
        self._form = form
        method = settings.method
        self._compressor = (
            LowRankMean(method.rank, settings.seed) if method.kind == "powersgd" else TopKMean(method, form)
        )

    @torch.no_grad()
    def average(self, gradients: SplitGradients, slots: Sequence[GradientSlot], group: dist.ProcessGroup) -> None:
        """Average the gradients over ranks, in place. ``slots`` are the records of their parameters, in the same order on all
        ranks.
        """
        self.tally.begin(slots)
        rows, outputs = gradients.split_rows, gradients.split_mean
        due = [i for i, slot in enumerate(slots) if slot.is_due(self._settings)]
        plain = [i for i, slot in enumerate(slots) if not slot.is_due(self._settings)]
        if due:
            count, own_row = len(gradients.rows), group.rank() if self._form == "shard" else 0
            for i in due:
                _spread_velocity(slots[i], count, own_row)
            offers = [offer(slots[i], rows[i], self._settings.momentum) for i in due]
            flags = torch.stack([each.is_not_finite for each in offers]).to(gradients.rows.dtype)
            # All ranks must know if a gradient is not finite on one of them, so every row carries the flags. They are sent with
            # the uncompressed gradients, not before them, so that nothing waits for them.
            message = torch.cat([*(rows[i] for i in plain), flags.expand(count, -1)], dim=1)
            averaged = message.new_empty(message.shape[1]) if self._form == "shard" else message.view(-1)
            self._average_rows(message, averaged, group)
            *means, is_void = averaged.split([*(rows[i].shape[1] for i in plain), len(due)])
            outcomes = self._compressor.reduce(offers, group)
            for i, mean in zip(plain, means, strict=True):
                outputs[i].copy_(mean.view(outputs[i].shape))
            for i, each, outcome, flag in zip(due, offers, outcomes, is_void, strict=True):
                outputs[i].copy_(settle(each, outcome, flag, own_row).view(outputs[i].shape))
            is_nonfinite = (is_void > 0).any() | ~averaged.isfinite().all()
        else:
            self._average_rows(gradients.rows, gradients.mean, group)
            is_nonfinite = ~gradients.mean.isfinite().all()
        if self._settings.momentum:
            for i in plain:
                mean = with_velocity(slots[i], outputs[i].reshape(1, -1), self._settings.momentum)
                outputs[i].copy_(mean.view(outputs[i].shape))
        self.tally.add(slots, self._settings, is_nonfinite)

    def _average_rows(self, rows: torch.Tensor, mean: torch.Tensor, group: dist.ProcessGroup) -> None:
        if self._form == "shard":
            scatter_rows(rows, mean, group, dist.ReduceOp.AVG)
        else:
            average_whole(mean, group)


def _spread_velocity(slot: GradientSlot, rows: int, own_row: int) -> None:
    """Called after warm-up, under FSDP2. Turn the momentum of this rank's shard of the mean into the momentum of this rank's
    whole gradient.

    The new momentum is such that its mean over ranks is the old momentum.
    """
    if slot.velocity is not None and len(slot.velocity) < rows:
        spread = slot.velocity.new_zeros(slot.shape)
        spread[own_row] = slot.velocity * slot.ranks
        slot.velocity = spread


def average_whole(message: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace a piece of memory by its average over ranks, with an all-reduce.

    As in DDP without a hook, it is first multiplied by 1 / ranks, so the bits are equal.
    """
    message.mul_(1 / group.size())
    dist.all_reduce(message, group=group)


def scatter_rows(
    rows: torch.Tensor, output: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp | dist.ReduceOp.RedOpType
) -> None:
    """Reduce-scatter ``(ranks, elements)``: the output of rank i is row i of the sum (or mean) over ranks."""
    _reduce_scatter(output, rows.view(-1), op=op, group=group)
