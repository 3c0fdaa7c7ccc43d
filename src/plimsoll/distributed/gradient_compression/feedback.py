"""Error feedback: what a step could not send is kept and added to the next step's gradient.

With gradient g, residual r and momentum m, each of one parameter on one rank, all in float32::

    u ← m·u + g          velocity, only with momentum; otherwise u is g
    v ← r + u            offered
    r ← v - sent(v)      what the compressor left
    u ← 0 where sent     momentum factor masking

A rank whose gradient of a parameter is zero throughout, because its part of the batch did not use it, offers nothing and
keeps what it has: what it sent would be lost where no rank used the parameter, since DDP leaves such gradients alone. A
gradient that is not finite offers zeros, is reported, and leaves residual and velocity as they were.

What waits can make a mean too large for float16, of gradients that all fit. It is cut to the largest float16, and what was cut
off waits on: the mean of all residuals is still what was never sent.

Source: Seide et al. 2014; Stich et al. 2018, algorithm 1; Lin et al. 2018, algorithm 1 and section 3.2 (momentum).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plimsoll.distributed.gradient_compression.slots import GradientSlot

_MOST_FLOAT16 = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a rank has to send for a parameter in one step: ``values``, zeros where it offers nothing.

    ``values`` are float32, of the gradient's shape. ``waiting`` is the same, or the residual where the rank offers nothing.
    ``is_not_finite`` is one number, above 0 where the local gradient has NaN or infinity.
    """

    slot: GradientSlot
    values: torch.Tensor
    waiting: torch.Tensor
    velocity: torch.Tensor | None
    is_not_finite: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackOutcome:
    """What came of an offer.

    Attributes:
        mean: of what all ranks sent, flat; sharded, of this rank's shard.
        sent: what this rank sent, of the offer's shape.
        kept: other state of the slot, by the name of its field, as it is from now on.
    """

    mean: torch.Tensor
    sent: torch.Tensor
    kept: dict[str, torch.Tensor]


def offer(slot: GradientSlot, gradient: torch.Tensor, momentum: float) -> Offer:
    """Add what waits to a gradient of any shape and dtype; ``momentum`` is 0 for none."""
    local = gradient.float()
    is_finite = local.isfinite().all()
    is_used = (local != 0).any() & is_finite
    residual = _or_zeros(slot.residual, local)
    if momentum:
        before = _or_zeros(slot.velocity, local)
        velocity = torch.where(is_used, before.mul(momentum).add_(local), before)
        values = torch.where(is_used, residual + velocity, 0.0)
    else:
        velocity = None
        values = torch.where(is_used, residual + local, 0.0)
    return Offer(
        slot=slot,
        values=values,
        waiting=torch.where(is_used, values, residual),
        velocity=velocity,
        is_not_finite=(~is_finite).float(),
    )


def settle(
    offered: Offer, outcome: FeedbackOutcome, is_not_finite: torch.Tensor, row: int | None = None
) -> torch.Tensor:
    """Keep what was not sent, and return the mean: NaN where any rank's gradient was not finite.

    ``is_not_finite`` is one number, above 0 where any rank's gradient was not; nothing is changed then. ``row`` is that of
    this rank's shard, which the mean is of; ``None`` where every rank has the whole mean.
    """
    slot = offered.slot
    is_void = is_not_finite > 0
    residual = offered.waiting - outcome.sent
    mean = outcome.mean
    if slot.dtype is torch.float16:
        mean = mean.clamp(-_MOST_FLOAT16, _MOST_FLOAT16)
        beyond = outcome.mean - mean
        if row is None:
            residual += beyond.view_as(residual)
        else:
            residual[row] += beyond * slot.ranks  # it waits on this rank alone
    slot.residual = torch.where(is_void, _or_zeros(slot.residual, residual), residual)
    if offered.velocity is not None:
        masked = torch.where(outcome.sent != 0, 0.0, offered.velocity)
        slot.velocity = torch.where(is_void, _or_zeros(slot.velocity, masked), masked)
    for kind, kept in outcome.kept.items():
        setattr(slot, kind, torch.where(is_void, _or_zeros(getattr(slot, kind), kept), kept))
    return torch.where(is_void, torch.nan, mean)


def with_velocity(slot: GradientSlot, mean: torch.Tensor, momentum: float) -> torch.Tensor:
    """The mean of a parameter that is not compressed, with the momentum that the others have: the optimizer has none then."""
    before = _or_zeros(slot.velocity, mean.to(torch.promote_types(mean.dtype, torch.float32)))
    velocity = before.mul(momentum).add_(mean)
    slot.velocity = torch.where(velocity.isfinite().all(), velocity, before)
    return velocity.to(mean.dtype)


def _or_zeros(kept: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    # A state that was saved may have been loaded to another device.
    return torch.zeros_like(like) if kept is None else kept.to(like.device)
