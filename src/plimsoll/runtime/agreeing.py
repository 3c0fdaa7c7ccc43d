"""What a region's recipes will say to other ranks in; the same on all of these, or one error on all of them, out.

A recipe that repeats collectives must do so on every rank, in the same order: a rank that keeps what the others rebuild would
leave them waiting. So where a region was recorded, its ranks compare what their recipes repeat, once; and a call that does not
fit the recording stops the step before backward.
"""

from __future__ import annotations

import torch

from plimsoll.errors import RanksDiffer
from plimsoll.ranks.exchange import exchange
from plimsoll.ranks.world import current_world


def agree_on_service(region: str, peers: tuple[int, ...], service: str) -> None:
    """Compare how a region is served, by which collectives, with the ranks that it talks to.

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


def left_alone(region: str, reason: str) -> RanksDiffer:
    """The error of a call on this rank that cannot follow its recipes while other ranks count on its collectives."""
    rank = torch.distributed.get_rank()
    return RanksDiffer(
        f"Region {region!r} cannot be rebuilt on rank {rank} as it was recorded: {reason}.",
        why="its recipes repeat collectives, in which all ranks must take part; this one would leave the others waiting",
        next="nothing was stepped; give the region's calls equal shapes, or plan without 'collectives' in allow=",
        ranks=(rank,),
    )
