"""Compresses the gradients of a model under FSDP2.

It replaces the reduce-scatter of each module that ``fully_shard`` was called on.

The base class of FSDP2's reduce-scatters is private. It has been seen in torch 2.9 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from plimsoll.distributed.gradient_compression.averaging import Averages, SplitGradients, average_whole, scatter_rows
from plimsoll.distributed.gradient_compression.method import Method
from plimsoll.distributed.gradient_compression.replicas import twice
from plimsoll.distributed.gradient_compression.slots import Form, GradientPart, GradientSlot
from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.tracing.fsdp2 import groups_of, reshard
from plimsoll.tracing.torch_internals import internal

_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_DefaultReduceScatter = internal(f"{_COLLECTIVES}.DefaultReduceScatter")
_DefaultAllocMixin: Any = internal(f"{_COLLECTIVES}.DefaultAllocMixin")
_ReduceScatter: Any = internal("torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter")


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """Data: a unit of FSDP2, which is a module that ``fully_shard`` was called on, with its trained parameters in the order of
    their reduction.
    """

    module: FSDPModule
    parameters: dict[str, DTensor]

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of the ranks that share the parameters."""
        return next(iter(self.parameters.values())).device_mesh

    def parts(self, form: Form) -> list[GradientPart]:
        """Return the unit's parameters with the shapes of their gradients in a reduction.

        If each rank gets its shard of the mean, the shape is ``(ranks, elements of a padded shard)``. Otherwise, it is the
        shape of this rank's padded shard.
        """
        policy = self.module._get_fsdp_state()._mp_policy
        found, ranks = [], self.mesh.size()
        for name, parameter in self.parameters.items():
            dim = parameter.placements[0].dim  # type: ignore[attr-defined]  # FSDP2 shards
            shape = list(parameter.shape)
            shape[dim] = -(-shape[dim] // ranks)
            reduced = (ranks, math.prod(shape)) if form == "shard" else tuple(shape)
            dtype = policy.reduce_dtype or policy.param_dtype or parameter.dtype
            found.append(GradientPart(name, reduced, dtype))
        return found


def units_of(model: nn.Module) -> list[ShardUnit]:
    """Return the units of a model (modules that ``fully_shard`` was called on) that have trained parameters, in the order of
    ``modules()``.

    Modules that were sharded in one call form one unit.

    Raises:
        InvalidModel: the model uses FSDP2's own HSDP, or its parameters are sharded over several meshes.
    """
    reshard(model)  # after a forward without a backward the root's parameters are still gathered, as plain tensors
    names = {parameter: name for name, parameter in model.named_parameters()}
    units: dict[int, ShardUnit] = {}
    for module in model.modules():
        if not isinstance(module, FSDPModule) or not groups_of(module):
            continue
        group = _group_of(module)  # modules that were sharded in one call share it
        held = [each.sharded_param for each in group.fsdp_params]
        trained: dict[str, Any] = {names[each]: each for each in held if each.requires_grad}
        if not all(isinstance(each, DTensor) and each.device_mesh.ndim == 1 for each in trained.values()):
            raise InvalidModel(
                f"Parameter {next(iter(trained))!r} is not sharded over a mesh of one dimension.",
                why="between replicas of shards, and under tensor parallelism, FSDP2 reduces gradients itself and has no hook",
                next="shard over the inner dimension alone and pass replicate_group=, or leave the gradients uncompressed",
            )
        if trained:
            units.setdefault(id(group), ShardUnit(module, trained))
    return list(units.values())


class Shards:
    """A model under FSDP2. Attaches compression to the model's reductions, and detaches it.

    Without a ``replicate_group``, the reduce-scatters of its units are compressed. With one, the all-reduces among the ranks of
    that group are compressed; these ranks hold the same shards.
    """

    def __init__(self, model: nn.Module, replicate_group: dist.ProcessGroup | None) -> None:
        self._units = units_of(model)
        if not self._units:
            raise InvalidModel("No sharded parameter is trained.", why="there are no gradients", next="unfreeze some")
        self.form: Form = "shard" if replicate_group is None else "mean"
        self.name = "shards" if replicate_group is None else "replicas of shards"
        self.group = replicate_group or self._units[0].mesh.get_group()
        self._before = [_group_of(unit.module)._reduce_scatter_comm for unit in self._units]

    def parts(self) -> list[GradientPart]:
        """Return the trained parameters, with the shape and dtype of their reductions."""
        return [part for unit in self._units for part in unit.parts(self.form)]

    def check(self, method: Method) -> None:
        """Raise an error if the method cannot replace a reduce-scatter, or if the model already has its own hook or
        reduce-scatter.
        """
        if self.form == "shard" and method.kind == "powersgd":
            raise InvalidOption(
                f"{str(method)!r} for a model that FSDP2 shards.",
                why="its factors are of whole matrices, and a reduce-scatter hands every rank some rows of the mean only",
                next='choose "topk", or wrap in DistributedDataParallel; compress_gradients() takes it with replicate_group=',
            )
        for unit in self._units:
            group = _group_of(unit.module)
            comm, hook = group._reduce_scatter_comm, group._all_reduce_hook
            if isinstance(comm, _CompressedReduceScatter) or isinstance(hook, _AverageShards):
                raise twice()
            if hook is not None:
                raise InvalidOption(
                    "The model has an all-reduce hook already.",
                    why="FSDP2 has one such hook per module, and compression would take its place",
                    next="take that hook away with set_all_reduce_hook(None), or leave the gradients to it",
                )
            if self.form == "shard" and type(comm) is not _DefaultReduceScatter:
                raise InvalidOption(
                    f"The model has a reduce-scatter of its own already: {type(comm).__name__}.",
                    why="FSDP2 has one per module, and compression would take its place",
                    next="leave out set_custom_reduce_scatter() and settings of communication memory, or the compression",
                )

    def attach(self, slots: list[GradientSlot], averages: Averages) -> None:
        """Compress the model's gradients from now on. ``slots`` are the records of the parameters, in the order of
        ``parts``.
        """
        remaining = iter(slots)
        for unit in self._units:
            own = [next(remaining) for _ in unit.parameters]
            if self.form == "shard":
                unit.module.set_custom_reduce_scatter(_CompressedReduceScatter(own, averages))
            else:
                unit.module.set_all_reduce_hook(_AverageShards(own, averages, self.group))

    def detach(self) -> None:
        """Restore the hooks that the modules had before compression."""
        for unit, before in zip(self._units, self._before, strict=True):
            unit.module.set_custom_reduce_scatter(before)
            unit.module.set_all_reduce_hook(None)  # type: ignore[arg-type]  # FSDP2's default


class _CompressedReduceScatter(_DefaultAllocMixin, _ReduceScatter):
    """Replaces FSDP2's reduce-scatter of one unit by one that sends compressed gradients.

    FSDP2 calls it in its own stream, and allocates memory as for its own reduce-scatter.
    """

    def __init__(self, slots: Sequence[GradientSlot], averages: Averages) -> None:
        self._slots = slots
        self._averages = averages

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> dist.Work | None:
        if input_tensor.numel() != sum(slot.elements for slot in self._slots):
            # Some parameters had no gradient in this step. FSDP2 does not say which, but all ranks agree: do not compress.
            self._averages.tally.begin(self._slots)
            scatter_rows(input_tensor, output_tensor, group, op)
            return None
        _check_op(op)
        gradients = SplitGradients.of_shard(input_tensor.view(group.size(), -1), output_tensor, self._slots)
        self._averages.average(gradients, self._slots, group)
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())
        return None


class _AverageShards:
    """Replaces FSDP2's all-reduce among ranks with the same shards by one that sends compressed gradients. FSDP2 calls it after
    its own reduce-scatter.
    """

    def __init__(self, slots: Sequence[GradientSlot], averages: Averages, group: dist.ProcessGroup) -> None:
        self._slots = slots
        self._averages = averages
        self._group = group

    def __call__(self, reduced: torch.Tensor) -> None:
        sizes = [slot.elements for slot in self._slots]
        if reduced.numel() != sum(sizes):
            self._averages.tally.begin(self._slots)
            average_whole(reduced, self._group)
            return
        pieces = zip(self._slots, reduced.split(sizes), strict=True)
        gradients = [piece.view(slot.shape) for slot, piece in pieces]
        self._averages.average(SplitGradients.of_mean(reduced, gradients), self._slots, self._group)


def _check_op(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> None:
    if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        raise InvalidOption(
            f"FSDP2 reduces these gradients with {op}, which is neither a mean nor a sum.",
            why="set_gradient_divide_factor() makes NCCL scale and sum at once; a compressed reduction cannot",
            next="call set_force_sum_reduction_for_comms(True) on the model: torch divides after the sum then",
        )


def _group_of(module: FSDPModule) -> Any:
    """Return the private object that has a module's FSDP2 hooks.

    The public API can only set hooks, but ``detach`` has to restore the earlier hooks.
    """
    groups = groups_of(module)
    if len(groups) != 1:
        raise InvalidModel(
            f"A module of the model has {len(groups)} groups of sharded parameters.",
            why="FSDP2 takes a reduce-scatter of one's own for modules with one group only",
            next="shard its parameters over one mesh, or leave the gradients uncompressed",
        )
    return groups[0]
