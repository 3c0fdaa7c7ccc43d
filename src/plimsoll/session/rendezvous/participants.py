"""A model in, the ranks that train it with this one, and the process groups of its collectives, out.

Who trains a model together is written in the model: ``DistributedDataParallel`` has a process group, parameters under FSDP2,
HSDP and tensor parallelism have a device mesh. A model that shows neither is taken to be every rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.session.rendezvous.world import World, current_world
from plimsoll.tracing.fsdp2 import sharded_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Participants:
    """Ranks that train one model (``None``: this process alone), and the groups that its steps communicate in."""

    world: World | None
    groups: tuple[dist.ProcessGroup, ...] = ()


def find_participants(model: object, ranks: Sequence[int] | None = None) -> Participants:
    """The ranks that take part in whatever is done to ``model``.

    Args:
        model: as the user passed it, wrapped or not.
        ranks: global ranks; by default those of the model's own groups, or all where it has none.

    Raises:
        InvalidOption: ``ranks`` that do not exist, without this one, or without some over which the model is split.
    """
    if isinstance(model, nn.Module) and ranks is not None:
        _refuse_to_leave_out(model, ranks)
    if current_world(ranks) is None:
        return Participants(None)
    groups: tuple[dist.ProcessGroup, ...] = ()
    if isinstance(model, nn.Module):
        meshes = _meshes_of(model)
        spans = [tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes]
        groups = tuple(dict.fromkeys((*_replicating(model), *(g for mesh in meshes for g in mesh.get_all_groups()))))
        if ranks is None:
            ranks = _widest([*spans, *(tuple(sorted(dist.get_process_group_ranks(group))) for group in groups)])
    return Participants(current_world(ranks), tuple(group for group in groups if group.size() > 1))


def refuse_several_ranks(model: nn.Module, call: str) -> None:
    """Refuse a model whose steps exchange something with other ranks, in a call that runs steps as one process sees fit.

    It looks at the model only, so all ranks refuse at once and nothing is exchanged.

    Args:
        model: as the user passed it, wrapped or not.
        call: the function, as the user called it.

    Raises:
        InvalidModel: other ranks take part in the model's steps.
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


def _replicating(model: nn.Module) -> Iterator[dist.ProcessGroup]:
    return (module.process_group for module in model.modules() if isinstance(module, DistributedDataParallel))


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
