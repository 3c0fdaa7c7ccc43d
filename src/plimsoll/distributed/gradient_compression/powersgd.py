"""PowerSGD: one low-rank mean of all ranks' gradients, computed by torch's own communication hook.

torch's hook does the arithmetic. Its state belongs to buckets, and DDP rebuilds its buckets after the first step. So this
module keeps the factors in the slots, one per parameter, does the error feedback itself, and passes its own buckets to the
hook.

Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD". Known weakness: on a GPU torch's hook waits for the whole device.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from plimsoll.distributed.gradient_compression.feedback import FeedbackOutcome, Offer
from plimsoll.distributed.gradient_compression.slots import GradientSlot, factors_of

_BUCKET = 0
_FIRST_STEP = 2
"""The step number that torch's hook sees. torch does not allow an earlier one, because DDP rebuilds its buckets after the first
step. Our own buckets do not change.
"""
_EPSILON = 1e-8
"""To normalize a column, it is divided by its length plus this number, so that a column of zeros stays zero instead of NaN."""
_FREEING_SECONDS = 1.0
"""The longest wait in seconds until torch frees its callbacks. Usually this takes microseconds."""


class _State(PowerSGDState):
    """The state object of torch's PowerSGD hook, in a subclass that allows weak references to its instances."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One of our matrices in the shape of a DDP bucket. It has the part of the bucket interface that torch's hook uses."""

    matrices: list[torch.Tensor]

    def index(self) -> int:
        return _BUCKET

    def buffer(self) -> torch.Tensor:
        return self.matrices[0].view(-1)

    def gradients(self) -> list[torch.Tensor]:
        return self.matrices

    def is_last(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class LowRankMean:
    """Computes low-rank means: one step of subspace iteration per reduction, with two all-reduces.

    A reduction starts from the right factor of the previous reduction.
    """

    rank: int
    seed: int

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[FeedbackOutcome]:
        # torch orders factors by shape, in the order of each shape's first occurrence.
        shapes = [factors_of(each.slot.shape, self.rank)[:2] for each in offers]
        order = sorted(range(len(offers)), key=lambda i: shapes.index(shapes[i]))
        # torch's hook overwrites the matrices by their mean. Each has memory of its own: aligned, so that a run repeats to the
        # bit in buckets of another composition.
        matrices = [offers[i].values.view(shapes[i]) for i in order]
        factors = [self._right_factor(offers[i].slot, matrices[0].device) for i in order]
        state = self._state(group, factors, [shapes[i][0] for i in order])
        powerSGD_hook(state, _Bucket(matrices)).wait()  # type: ignore[arg-type]  # _Bucket has all that the hook uses
        right_factors = state.q_memory_dict[_BUCKET].split([factor.numel() for factor in factors])
        # The callbacks of torch's hook hold the group, and a thread of the group frees them after the result is there. If the
        # group is destroyed before that, its last reference is dropped on its own thread, which aborts the process.
        freed = threading.Event()
        weakref.finalize(state, freed.set)
        del state
        freed.wait(_FREEING_SECONDS)
        kept = {i: each.view_as(factor) for i, each, factor in zip(order, right_factors, factors, strict=True)}
        return [
            # As in torch and in the paper, the agreed mean counts as sent: residuals add up over ranks.
            FeedbackOutcome(mean=each.values.view(-1), sent=each.values, factor=kept[i].clone())
            for i, each in enumerate(offers)
        ]

    def _state(self, group: dist.ProcessGroup, factors: Sequence[torch.Tensor], rows: Sequence[int]) -> _State:
        state = _State(
            process_group=group,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=_FIRST_STEP,
            min_compression_rate=0,
            use_error_feedback=False,
            warm_start=True,
            orthogonalization_epsilon=_EPSILON,
        )
        state.iter = _FIRST_STEP
        left = sum(count * factor.shape[1] for count, factor in zip(rows, factors, strict=True))
        state.p_memory_dict[_BUCKET] = factors[0].new_empty(left)
        state.q_memory_dict[_BUCKET] = torch.cat([factor.reshape(-1) for factor in factors])
        return state

    def _right_factor(self, slot: GradientSlot, device: torch.device) -> torch.Tensor:
        """Return the factor to start from: the right factor of this parameter's last step. Columns of zeros would stay zero for
        ever, so they are drawn at random again.

        In the first step, all columns are drawn.
        """
        _, columns, rank = factors_of(slot.shape, self.rank)
        # The generator depends on the seed, the parameter and its number of reductions, so all ranks draw the same.
        digest = hashlib.blake2b(struct.pack("<qqq", self.seed, slot.number, slot.reductions), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.randn(columns, rank, generator=generator).to(device)
        if slot.factor is None:
            return drawn
        factor = slot.factor.to(device)
        return torch.where((factor == 0).all(dim=0), drawn, factor)
