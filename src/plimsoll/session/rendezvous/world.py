"""Finds the ranks that train one model together, and the store that they share.

The model shows its ranks: ``DistributedDataParallel`` has a process group, and parameters under FSDP2, HSDP and tensor
parallelism have a device mesh. If a model has neither, all ranks are assumed to train it together.
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

# torch does not name the default group's store publicly. This name was seen in torch 2.9 to 2.15.
_default_store = internal("torch.distributed.distributed_c10d._get_default_store")
_PREFIX = "plimsoll"


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that make calls together, as data, as one of them sees it.

    ``rank`` and ``ranks`` are global ranks, as torchrun numbers them. ``store`` is torch's own key-value store behind a prefix.
    Messages go through the store instead of collectives, so a rank that waits for a message can stop waiting.
    """

    rank: int
    ranks: tuple[int, ...]
    store: Store

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """True on the one rank that acts for all ranks."""
        return self.rank == self.ranks[0]


def current_world(ranks: Iterable[int] | None = None) -> World | None:
    """Return the ranks that train together. By default these are all ranks. Return ``None`` for a single process.

    Raises:
        InvalidOption: a rank does not exist, or this rank is not among them.

    Example:
        >>> current_world() is None  # torch.distributed is not initialised
        True
    """
    if not dist.is_available() or not dist.is_initialized():
        if ranks is None:
            return None
        raise InvalidOption(
            "ranks= was given, but torch.distributed is not initialised.",
            why="ranks= names ranks of torch's process group",
            next="call torch.distributed.init_process_group() first (torchrun starts the processes), or leave ranks= out",
        )
    size, rank = dist.get_world_size(), dist.get_rank()
    chosen = tuple(range(size)) if ranks is None else tuple(sorted(set(ranks)))
    if rank not in chosen or not set(chosen) <= set(range(size)):
        raise InvalidOption(
            f"ranks={list(chosen)} was passed on rank {rank} of {size}.",
            why="ranks= must contain the calling rank, and only ranks that exist",
            next=f"name ranks from 0 to {size - 1}, including {rank}",
        )
    if len(chosen) == 1:
        return None
    # Each subgroup has its own keys, because two subgroups may exchange messages under the same topic at the same time.
    group = "all" if len(chosen) == size else ",".join(map(str, chosen))
    return World(rank, chosen, PrefixStore(f"{_PREFIX}/{group}", _default_store()))


def launched_world(timeout_seconds: float) -> World | None:
    """Return the ranks that torchrun has started, even without a process group; ``None`` if torchrun does not keep a store.

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
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store may outlive one attempt
    ranks = tuple(range(int(os.environ["WORLD_SIZE"])))
    return World(int(os.environ["RANK"]), ranks, PrefixStore(f"{_PREFIX}/launched/{attempt}", store))


@dataclass(frozen=True, slots=True)
class Participants:
    """The ranks that train one model, as data (``None`` means this process alone), and the groups that its steps communicate
    in.
    """

    world: World | None
    groups: tuple[dist.ProcessGroup, ...] = ()


def find_participants(model: object, ranks: Sequence[int] | None = None) -> Participants:
    """Return the ranks that take part in a call on ``model``: by default the ranks of its own groups, or all without groups.

    Raises:
        InvalidOption: ``ranks`` that do not exist, that omit this rank, or that omit ranks over which the model is split.
    """
    if ranks is not None and not (isinstance(ranks, Collection) and all(isinstance(rank, int) for rank in ranks)):
        raise InvalidOption(
            f"ranks={ranks!r} is not a list of ranks.",
            why="ranks are whole numbers",
            next="pass ranks=[0, 1], for example",
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
    """Refuse a model whose steps communicate with other ranks, for a call that chooses its steps by its own measurements.

    It looks only at the model, so all ranks refuse at once and nothing is exchanged.
    """
    groups = find_participants(model).groups
    if groups:
        ranks = max(group.size() for group in groups)
        raise InvalidModel(
            f"{type(model).__name__} is trained by {ranks} ranks together, but plimsoll.{call} runs in one process.",
            why="its measurements decide which steps it runs, so ranks would run different steps and wait for ever",
            next=f"call plimsoll.{call} before the model is wrapped; plimsoll.plan, verify and compare accept wrapped models",
        )


def _refuse_to_leave_out(model: nn.Module, ranks: Sequence[int]) -> None:
    """Refuse ``ranks`` that omit some ranks of a split model, because each step of the model waits for all of its ranks."""
    spread = {rank for mesh in _meshes_of(model) for rank in mesh.mesh.flatten().tolist()}
    missing = sorted(spread - set(ranks))
    if missing:
        raise InvalidOption(
            f"ranks={sorted(set(ranks))} leaves out {', '.join(map(str, missing))}, and this model is split over "
            f"{', '.join(map(str, sorted(spread)))}.",
            why="each step of the model gathers parameters or sums results from all these ranks, so it would wait for them",
            next="leave ranks= out, and make the same call on all these ranks",
        )


def _meshes_of(model: nn.Module) -> list[DeviceMesh]:
    from torch.distributed.tensor import DTensor

    parameters = (*model.parameters(), *sharded_parameters(model))
    return list(dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor)))


def _widest(spans: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the group of ranks that contains all the other groups. Return None, which means all ranks, if groups cross each
    other, as a row and a column of a device mesh do.

    With crossing groups each rank sees different groups, but "all ranks" is the same everywhere.
    """
    widest = max(spans, key=len, default=None)
    if widest is None or any(not set(ranks) <= set(widest) for ranks in spans):
        return None
    return widest
