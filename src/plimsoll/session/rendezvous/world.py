"""The state of ``torch.distributed`` in, the ranks that take part, and the store that they share, out."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from plimsoll.errors import InvalidOption

_PREFIX = "plimsoll"


@dataclass(frozen=True, slots=True)
class World:
    """Ranks that do something together, seen from one of them.

    ``rank`` and ``ranks`` are global ranks, as torchrun numbers them. ``store`` is torch's own key-value store, behind a
    prefix: messages through it are no collectives, so a rank that waits for one can stop waiting.
    """

    rank: int
    ranks: tuple[int, ...]
    store: Store

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == self.ranks[0]


def current_world(ranks: Iterable[int] | None = None) -> World | None:
    """The ranks that train together, ``None`` where this process is on its own.

    Args:
        ranks: global ranks, this one among them; by default all.

    Raises:
        InvalidOption: a rank that does not exist, or this one is not among them.

    Example:
        >>> current_world() is None  # torch.distributed is not initialised
        True
    """
    if not dist.is_available() or not dist.is_initialized():
        if ranks is None:
            return None
        raise InvalidOption(
            "ranks= was given, but torch.distributed is not initialised.",
            why="ranks are those of torch's process group",
            next="call torch.distributed.init_process_group() first (torchrun starts the processes), or leave ranks= out",
        )
    size, rank = dist.get_world_size(), dist.get_rank()
    chosen = tuple(range(size)) if ranks is None else tuple(sorted(set(ranks)))
    if rank not in chosen or not set(chosen) <= set(range(size)):
        raise InvalidOption(
            f"ranks={list(chosen)} on rank {rank} of {size}.",
            why="a rank takes part in what it asks for, with ranks that exist",
            next=f"name ranks from 0 to {size - 1}, {rank} among them",
        )
    if len(chosen) == 1:
        return None
    # Subgroups have keys of their own: two of them may exchange something under one topic at the same time.
    group = "all" if len(chosen) == size else ",".join(map(str, chosen))
    return World(rank, chosen, PrefixStore(f"{_PREFIX}/{group}", _get_default_store()))


def launched_world(timeout_seconds: float) -> World | None:
    """The ranks that torchrun has started, which need no process group yet; ``None`` where it keeps no store for them.

    Args:
        timeout_seconds: how long to try to reach the store.

    Raises:
        torch.distributed.DistError, ValueError: the store is not where the environment says.

    Example:
        >>> launched_world(1.0) is None  # torchrun has not started this process
        True
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*place, is_master=False, timeout=datetime.timedelta(seconds=timeout_seconds))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store may outlive one
    ranks = tuple(range(int(os.environ["WORLD_SIZE"])))
    return World(int(os.environ["RANK"]), ranks, PrefixStore(f"{_PREFIX}/launched/{attempt}", store))
