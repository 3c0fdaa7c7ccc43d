"""Matrices of every rank in, the low-rank mean of all on every rank out: torch's own PowerSGD, fed parameter by parameter.

Torch's hook keeps its residuals and factors per DDP bucket, and starts over where buckets are rebuilt. Here it is given
buckets of our own making and the factors that our slots keep, so they belong to parameters; residuals are those of `feedback`.

Source: Vogels et al. 2019, "PowerSGD", algorithm 1. Known weakness: torch's hook waits for the whole device on a GPU.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from plimsoll.distributed.gradient_compression.feedback import Offer, Outcome
from plimsoll.distributed.gradient_compression.places import generator_for
from plimsoll.distributed.gradient_compression.slots import Slot
from plimsoll.distributed.gradient_compression.wire import factors_of

_BUCKET = 0
_FIRST_STEP = 2
"""Torch's state refuses to start earlier, because DDP rebuilds its buckets after the first step; ours are not DDP's."""
_EPSILON = 1e-8
"""Added to the length of columns before dividing by it: a column of zeros stays zero instead of NaN."""
_LETTING_GO_SECONDS = 1.0
"""How long to wait at most for torch's callbacks to be gone; it takes microseconds."""


class _State(PowerSGDState):
    """Torch's state, with a place for weak references."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """What torch's hook reads of a bucket of DDP's."""

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
    """One step of subspace iteration per reduction, warm-started from the factor of the one before; two all-reduces."""

    rank: int
    seed: int

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[Outcome]:
        # Torch lays factors out by shape, in the order in which shapes first come.
        first = {shape: i for i, shape in reversed(list(enumerate(_matrix_of(each.slot) for each in offers)))}
        order = sorted(range(len(offers)), key=lambda i: first[_matrix_of(offers[i].slot)])
        ordered = [offers[i] for i in order]
        flat = torch.cat([each.values.reshape(-1) for each in ordered])
        pieces = flat.split([each.slot.elements for each in ordered])
        matrices = [piece.view(_matrix_of(each.slot)) for piece, each in zip(pieces, ordered, strict=True)]
        factors = [self._right_factor(each.slot, flat.device) for each in ordered]
        state = self._state(ordered, factors, group)
        powerSGD_hook(state, _Bucket(flat, matrices)).wait()
        right_factors = state.q_memory_dict[_BUCKET]
        # The callbacks of torch's hook hold the group, and a thread of the group lets go of them after the result is there.
        # A group that is destroyed meanwhile ends on its own thread, which aborts the process.
        let_go = threading.Event()
        weakref.finalize(state, let_go.set)
        del state
        let_go.wait(_LETTING_GO_SECONDS)
        widths = [factor.numel() for factor in factors]
        outcomes: list[Outcome | None] = [None] * len(offers)
        for i, each, piece, kept in zip(order, ordered, pieces, right_factors.split(widths), strict=True):
            _, columns, rank = factors_of(each.slot.shape, self.rank)
            # As in torch and in the paper, what all agreed on counts as sent: residuals add up over ranks.
            sent = piece.view_as(each.values)
            outcomes[i] = Outcome(mean=piece, sent=sent, kept={"factor": kept.view(columns, rank).clone()})
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

    def _right_factor(self, slot: Slot, device: torch.device) -> torch.Tensor:
        """The factor of the step before; columns that came out as zeros would stay zeros for ever and are drawn anew."""
        _, columns, rank = factors_of(slot.shape, self.rank)
        drawn = torch.randn(columns, rank, generator=generator_for(self.seed, slot)).to(device)
        if slot.factor is None:
            return drawn
        factor = slot.factor.to(device)
        return torch.where((factor == 0).all(dim=0), drawn, factor)


def _matrix_of(slot: Slot) -> tuple[int, int]:
    return slot.shape[0], math.prod(slot.shape[1:])
