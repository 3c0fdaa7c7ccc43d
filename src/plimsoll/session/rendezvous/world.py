"""Who takes part in a call: the ranks that train one model together, and the store that they share.

Who trains a model together is written in the model: ``DistributedDataParallel`` has a process group, parameters under FSDP2,
HSDP and tensor parallelism have a device mesh. A model that shows neither is taken to be every rank's.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel

from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.tracing.fsdp2 import process_groups, sharded_parameters
from plimsoll.tracing.torch_internals import internal

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The default group's store has no public name; this one was seen in torch 2.9 to 2.15.
_default_store = internal("torch.distributed.distributed_c10d._get_default_store")
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
    """The ranks that train together, by default all; ``None`` where this process is on its own.

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
    return World(rank, chosen, PrefixStore(f"{_PREFIX}/{group}", _default_store()))


def launched_world(timeout_seconds: float) -> World | None:
    """The ranks that torchrun has started, which need no process group yet; ``None`` where it keeps no store for them.

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


@dataclass(frozen=True, slots=True)
class Participants:
    """Ranks that train one model (``None``: this process alone), and the groups that its steps communicate in."""

    world: World | None
    groups: tuple[dist.ProcessGroup, ...] = ()


def find_participants(model: object, ranks: Sequence[int] | None = None) -> Participants:
    """The ranks that take part in whatever is done to ``model``: by default those of its own groups, or all where it
    has none.

    Raises:
        InvalidOption: ``ranks`` that do not exist, without this one, or without some over which the model is split.
    """
    if ranks is not None and not (isinstance(ranks, Collection) and all(isinstance(rank, int) for rank in ranks)):
        raise InvalidOption(
            f"ranks={ranks!r} is no list of ranks.", why="ranks are whole numbers", next="give ranks=[0, 1]"
        )
    if isinstance(model, nn.Module) and ranks is not None:
        _refuse_to_leave_out(model, ranks)
    if current_world(ranks) is None:
        return Participants(None)
    groups: tuple[dist.ProcessGroup, ...] = ()
    if isinstance(model, nn.Module):
        meshes = _meshes_of(model)
        spans = [tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes]
        of_meshes = (group for mesh in meshes for group in mesh.get_all_groups())
        replicated = (each.process_group for each in model.modules() if isinstance(each, DistributedDataParallel))
        groups = tuple(dict.fromkeys((*replicated, *process_groups(model), *of_meshes)))
        if ranks is None:
            ranks = _widest([*spans, *(tuple(sorted(dist.get_process_group_ranks(group))) for group in groups)])
    return Participants(current_world(ranks), tuple(group for group in groups if group.size() > 1))


def refuse_several_ranks(model: nn.Module, call: str) -> None:
    """Refuse a model whose steps exchange something with other ranks, in a call that runs steps as one process sees
    fit.

    It looks at the model only, so all ranks refuse at once and nothing is exchanged.
    """
    groups = find_participants(model).groups
    if groups:
        ranks = max(group.size() for group in groups)
        raise InvalidModel(
            f"{type(model).__name__} is trained by {ranks} ranks together, and plimsoll.{call} is work of one process.",
            why="which steps it runs depends on what it measures here; the other ranks would run others, and wait for ever",
            next=f"plimsoll.{call} with the model before it is wrapped; plimsoll.plan, verify and compare take it as it is",
        )


def _refuse_to_leave_out(model: nn.Module, ranks: Sequence[int]) -> None:
    """A step of a model that is split over ranks waits for all of them, whoever is asked to take part."""
    spread = {rank for mesh in _meshes_of(model) for rank in mesh.mesh.flatten().tolist()}
    missing = sorted(spread - set(ranks))
    if missing:
        raise InvalidOption(
            f"ranks={sorted(set(ranks))} leaves out {', '.join(map(str, missing))}, and this model is split over "
            f"{', '.join(map(str, sorted(spread)))}.",
            why="every step of it gathers parameters or sums results from all of these ranks, so it would wait for them",
            next="leave ranks= out, and make the same call on all of them",
        )


def _meshes_of(model: nn.Module) -> list[DeviceMesh]:
    from torch.distributed.tensor import DTensor

    parameters = (*model.parameters(), *sharded_parameters(model))
    return list(dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor)))


def _widest(spans: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The ranks that hold all the others; of several that cross (a row and a column), all ranks there are.

    What a rank sees of crossing groups differs from rank to rank, all ranks do not.
    """
    widest = max(spans, key=len, default=None)
    if widest is None or any(not set(ranks) <= set(widest) for ranks in spans):
        return None
    return widest
