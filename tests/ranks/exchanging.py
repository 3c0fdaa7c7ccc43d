"""What ranks do in ``test_exchange.py``."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from plimsoll.errors import InvalidOption, PlimsollError, RankFailed, RankMissing
from plimsoll.session.rendezvous.exchange import exchange, together
from plimsoll.session.rendezvous.world import World, current_world


def everything() -> dict[str, Any]:
    """All scenarios of one launch, in the same order on every rank."""
    world = current_world()
    assert world is not None
    return {
        "messages": [exchange(world, "greeting", f"{turn} from {world.rank}".encode()) for turn in range(3)],
        "keys_left": _keys_left(world),
        "large": [len(message) for message in exchange(world, "large", bytes(1 << 20))],
        "straggler": _late(world),
        "after_straggler": exchange(world, "late", b"on time"),
        "failure": _failing(world),
        "after_failure": _fine(world),
        "subset": _subset(world),
        "no_such_rank": _no_such_rank(),
    }


def _keys_left(world: World) -> list[str]:
    dist.barrier()
    return [
        key
        for key in (f"greeting/{turn}/{what}" for turn in (1, 2, 3) for what in (0, 1, "verdict", "read"))
        if world.store.check([key])
    ]


def _late(world: World) -> tuple[str, tuple[int, ...], float]:
    if world.rank == 1:
        time.sleep(0.6)
    start = time.perf_counter()
    try:
        exchange(world, "late", b"hello", timeout_seconds=0.2)
    except RankMissing as error:
        return error.found, error.ranks, time.perf_counter() - start
    raise AssertionError("nobody was missed")


def _failing(world: World) -> tuple[str, str]:
    try:
        with together(world, "dividing"):
            1 // (world.rank - 1)
    except (RankFailed, ZeroDivisionError) as error:
        found = error.found if isinstance(error, PlimsollError) else str(error)
        return type(error).__name__, found
    raise AssertionError("it went well")


def _fine(world: World) -> int:
    with together(world, "dividing"):
        return 1 + world.rank


def _subset(world: World) -> tuple[bytes, ...]:
    """Two pairs exchange under one topic at the same time."""
    pair = (0, 2) if world.rank in (0, 2) else (1, 3)
    part = current_world(pair)
    assert part is not None
    assert current_world((world.rank,)) is None
    return exchange(part, "pair", str(world.rank).encode())


def _no_such_rank() -> str:
    try:
        current_world((0, 1, 2, 3, 4))
    except InvalidOption as error:
        return error.found
    raise AssertionError("rank 4 exists")
