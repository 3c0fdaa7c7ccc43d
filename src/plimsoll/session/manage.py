"""Puts a plan to work on a model, on one process or on all ranks together: what everybody above the engine calls."""

from __future__ import annotations

from typing import Any

from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.engine.apply import Handle, apply_plan
from plimsoll.errors import RanksDiffer
from plimsoll.session.agreement import Agreement
from plimsoll.session.rendezvous.exchange import exchange
from plimsoll.session.rendezvous.world import current_world


def manage(model: nn.Module, plan: Plan, **options: Any) -> Handle:
    """Apply the plan; ranks whose recipes repeat collectives compare these when a region is recorded.

    Args:
        model: not managed yet.
        plan: a usable plan.
        options: as for `plimsoll.engine.apply.apply_plan`.

    Raises:
        PlanNotUsable, PlanMismatch, OffloadFailed: as `apply_plan` says.
    """
    return apply_plan(model, plan, agree_on_service=agree_on_service, **options)


def manage_together(
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
    handle = manage(model, plan, sentinel_every=sentinel_every, verify_every=verify_every)
    try:
        agreement.meet("applied")
    except BaseException:
        handle.remove()
        raise
    return handle


def agree_on_service(region: str, peers: tuple[int, ...], service: str) -> None:
    """Compare how a region is served, and which collectives its recipes repeat, with the ranks that it talks to.

    A rank that keeps what the others rebuild would leave them waiting in a collective. So ranks compare once, when the
    region was recorded.

    Args:
        region: its name.
        peers: global ranks, this one among them.
        service: what serves it here, as text.

    Raises:
        RanksDiffer: another rank serves it otherwise.
        RankMissing: another rank does not record this region now.
    """
    world = current_world(peers)
    if world is None:
        return
    answers = [answer.decode() for answer in exchange(world, f"collectives of {region}", service.encode())]
    if len(set(answers)) == 1:
        return
    other = next(rank for rank, answer in zip(world.ranks, answers, strict=True) if answer != answers[0])
    said = answers[world.ranks.index(other)]
    raise RanksDiffer(
        f"Region {region!r} would repeat other collectives on rank {other} than on rank {world.ranks[0]}.",
        why=f"rank {world.ranks[0]}: {answers[0]}; rank {other}: {said}",
        next="plan without 'collectives' in allow=",
        ranks=(other,),
    )
