"""A model and one plan on every rank in, the model managed on all ranks, or on none, out."""

from __future__ import annotations

from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.pipeline.agreement import Agreement
from plimsoll.runtime.apply import Handle, apply_plan


def apply_together(
    agreement: Agreement, model: nn.Module, plan: Plan, *, sentinel_every: int = 1, verify_every: int = 0
) -> Handle:
    """Apply the plan here; where another rank cannot, undo it.

    Args:
        agreement: in whose block this is called, on all ranks.
        model: not managed yet.
        plan: the same on all ranks.
        sentinel_every: as for ``plimsoll.apply``.
        verify_every: as for ``plimsoll.apply``.

    Raises:
        PlanMismatch, PlanNotUsable, OffloadFailed: it cannot be applied here.
        RankFailed, RankMissing: nor elsewhere.
    """
    handle = apply_plan(model, plan, sentinel_every=sentinel_every, verify_every=verify_every)
    try:
        agreement.meet("applied")
    except BaseException:
        handle.remove()
        raise
    return handle
