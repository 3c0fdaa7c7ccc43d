"""Error feedback: a rank keeps what a step did not send, and adds it to the next step's gradient.

With gradient g, residual r and momentum m, each for one parameter on one rank, all in float32::

    u ← m·u + g          velocity, only with momentum; otherwise u is g
    v ← r + u            offered
    r ← v - sent(v)      not sent
    u ← 0 where sent     momentum factor masking

If a rank's gradient of a parameter is all zeros, because the rank's part of the batch did not use the parameter, the rank
offers nothing and keeps its residual (what it did not send earlier). A residual that it sent would be lost if no rank used the
parameter, since DDP ignores such gradients. For a gradient that is not finite, the rank offers zeros, reports it, and does not
change residual and velocity.

With residuals added, a mean can be too large for float16 although all gradients fit. The mean is clipped to the largest
float16, and the rest goes back to the residual. So the mean of all residuals still equals what was never sent.

Source: Seide et al. 2014; Stich et al. 2018, algorithm 1; Lin et al. 2018, algorithm 1 and section 3.2 (momentum).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plimsoll.distributed.gradient_compression.slots import GradientSlot

_MOST_FLOAT16 = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Data: what a rank offers to send for one parameter in one step: its gradient plus the residual (what it did not send
    earlier).

    ``values`` are float32 ``(rows, elements)``; they are zeros if the rank offers nothing. ``waiting`` equals ``values``, but
    if the rank offers nothing, it is the residual. ``is_not_finite`` is a tensor with one number, above 0 if the local gradient
    has NaN or infinity.
    """

    slot: GradientSlot
    values: torch.Tensor
    waiting: torch.Tensor
    velocity: torch.Tensor | None
    is_not_finite: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackOutcome:
    """Data: the result of averaging, over all ranks, what they offered to send for one parameter.

    Attributes:
        mean: the mean over ranks of the values sent, flat. Under FSDP2, it is the mean of this rank's shard only.
        sent: what this rank sent, in the shape of the offered values.
        factor: for ``powersgd``, the right factor that is kept for the next step.
    """

    mean: torch.Tensor
    sent: torch.Tensor
    factor: torch.Tensor | None = None


def offer(slot: GradientSlot, gradient: torch.Tensor, momentum: float) -> Offer:
    """Return what to send for a gradient: the gradient plus the residual (what was not sent earlier), with momentum if it is
    not 0.

    The gradient is ``(rows, elements)`` of any dtype.
    """
    local = gradient.float()
    is_finite = local.isfinite().all()
    is_used = (local != 0).any() & is_finite
    residual = _or_zeros(slot.residual, local)
    velocity = None
    if momentum:
        before = _or_zeros(slot.velocity, local)
        velocity = local = torch.where(is_used, before.mul(momentum).add_(local), before)
    values = torch.where(is_used, residual + local, 0.0)
    return Offer(
        slot=slot,
        values=values,
        waiting=torch.where(is_used, values, residual),
        velocity=velocity,
        is_not_finite=(~is_finite).float(),
    )


def settle(offered: Offer, outcome: FeedbackOutcome, is_not_finite: torch.Tensor, row: int) -> torch.Tensor:
    """Store what was not sent in the parameter's record (slot), and return the mean. If any rank's gradient was not finite, the
    mean is NaN.

    ``is_not_finite`` is a tensor with one number, above 0 if any rank's gradient was not finite; then the stored state does not
    change. ``row`` is the row of the offer that ``mean`` is about: this rank's own row under FSDP2, otherwise 0.
    """
    slot = offered.slot
    is_void = is_not_finite > 0
    residual = offered.waiting - outcome.sent
    mean = outcome.mean
    if slot.dtype is torch.float16:
        mean = mean.clamp(-_MOST_FLOAT16, _MOST_FLOAT16)
        # Of a shard only this rank keeps the remainder, so it counts for all ranks.
        residual[row] += (outcome.mean - mean) * (slot.ranks if slot.form == "shard" else 1)
    slot.residual = torch.where(is_void, _or_zeros(slot.residual, residual), residual)
    if offered.velocity is not None:
        masked = torch.where(outcome.sent != 0, 0.0, offered.velocity)
        slot.velocity = torch.where(is_void, _or_zeros(slot.velocity, masked), masked)
    if outcome.factor is not None:
        slot.factor = torch.where(is_void, _or_zeros(slot.factor, outcome.factor), outcome.factor)
    return torch.where(is_void, torch.nan, mean)


def with_velocity(slot: GradientSlot, mean: torch.Tensor, momentum: float) -> torch.Tensor:
    """Apply momentum to the mean of a parameter that is not compressed. Return the result, and store the momentum in the
    parameter's record (slot).

    The optimizer has to run without momentum.
    """
    before = _or_zeros(slot.velocity, mean.to(torch.promote_types(mean.dtype, torch.float32)))
    velocity = before.mul(momentum).add_(mean)
    slot.velocity = torch.where(velocity.isfinite().all(), velocity, before)
    return velocity.to(mean.dtype)


def _or_zeros(kept: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    # A saved state may have been loaded to another device.
    return torch.zeros_like(like) if kept is None else kept.to(like.device)
