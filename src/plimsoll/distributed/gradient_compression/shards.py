"""Compresses the gradients of a model under FSDP2, by replacing the reduce-scatter of each of its modules.

The base class of FSDP2's reduce-scatters is private: seen in torch 2.9 to 2.15.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from plimsoll.distributed.gradient_compression.averaging import Averages, average_whole
from plimsoll.distributed.gradient_compression.replicas import twice
from plimsoll.distributed.gradient_compression.rounds import reduce_rows
from plimsoll.distributed.gradient_compression.slots import Form, GradientPart, GradientSlot
from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.tracing.fsdp2 import groups_of
from plimsoll.tracing.torch_internals import internal

_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_DefaultReduceScatter = internal(f"{_COLLECTIVES}.DefaultReduceScatter")
_DefaultAllocMixin: Any = internal(f"{_COLLECTIVES}.DefaultAllocMixin")
_ReduceScatter: Any = internal("torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter")


class OwnReduceScatter(_DefaultAllocMixin, _ReduceScatter):
    """A base for reduce-scatters that replace FSDP2's; memory is allocated in the same way as FSDP2's own."""


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """A module that ``fully_shard`` was called on, with its parameters in the order of reduction."""

    module: FSDPModule
    names: tuple[str, ...]
    parameters: tuple[DTensor, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks that share the parameters."""
        return self.parameters[0].device_mesh.size()

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype that FSDP2's mixed precision reduces in; None if the caller did not set one."""
        policy = self.module._get_fsdp_state()._mp_policy
        return policy.reduce_dtype or policy.param_dtype

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all its unsharded gradients in the dtype of the reduction."""
        return sum(each.numel() * (self.reduce_dtype or each.dtype).itemsize for each in self.parameters)

    @property
    def shard_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one rank's padded shard of each parameter."""
        shapes = []
        for parameter in self.parameters:
            dim = parameter.placements[0].dim  # type: ignore[attr-defined]  # FSDP2 shards
            shape = list(parameter.shape)
            shape[dim] = -(-shape[dim] // self.ranks)
            shapes.append(tuple(shape))
        return shapes


def units_of(model: nn.Module) -> list[ShardUnit]:
    """The units of a model that FSDP2 shards, in the order of ``named_modules``.

    Raises:
        InvalidModel: the model uses FSDP2's own HSDP, or its parameters are sharded over several meshes.
    """
    seen: set[nn.Parameter] = set()
    units = []
    for prefix, module in model.named_modules():
        unit = module if isinstance(module, FSDPModule) else None
        if unit is None:
            continue
        unit.reshard()  # after a forward without a backward the root's parameters are still gathered, as plain tensors
        named = [(f"{prefix}.{name}" if prefix else name, each) for name, each in _own_parameters(module, seen)]
        trained = [(name, each) for name, each in named if each.requires_grad]
        if not trained:
            continue
        names, parameters = zip(*trained, strict=True)
        if not all(isinstance(each, DTensor) and each.device_mesh.ndim == 1 for each in parameters):
            raise InvalidModel(
                f"Parameter {names[0]!r} is not sharded over a mesh of one dimension.",
                why="between replicas of shards, and under tensor parallelism, FSDP2 reduces gradients itself and has no hook",
                next="shard over the inner dimension alone and pass replicate_group=, or leave the gradients uncompressed",
            )
        units.append(ShardUnit(unit, names, parameters))
    return units


def _own_parameters(module: nn.Module, seen: set[nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters in a module's FSDP2 unit: children before parents, without nested units, shared parameters once."""

    def visit(each: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, child in each.named_children():
            if not isinstance(child, FSDPModule):
                yield from visit(child, f"{prefix}{name}.")
        for name, parameter in each.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield f"{prefix}{name}", parameter

    yield from visit(module, "")


def parts_of_shards(unit: ShardUnit, form: Form) -> list[GradientPart]:
    """A unit's parameters in their reduced shapes: one row per rank in a reduce-scatter, else this rank's shards."""
    return [
        GradientPart(
            name=name,
            shape=(unit.ranks, math.prod(shape)) if form == "shard" else shape,
            dtype=unit.reduce_dtype or parameter.dtype,
        )
        for name, parameter, shape in zip(unit.names, unit.parameters, unit.shard_shapes, strict=True)
    ]


class Shards:
    """Compresses the reduce-scatters of one model's units, or, with ``group``, all-reduces among the ranks of the group.

    The ranks of ``group`` hold the same shards. ``slots`` has one list per unit.
    """

    def __init__(
        self,
        units: Sequence[ShardUnit],
        slots: Sequence[Sequence[GradientSlot]],
        averages: Averages,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._hooks: list[_CompressedReduceScatter | _AverageShards] = []
        self._undo: list[Callable[[], None]] = []
        for unit, each in zip(units, slots, strict=True):
            module = unit.module
            if group is None:
                comm = _CompressedReduceScatter(each, averages)
                self._hooks.append(comm)
                before = _group_of(module)._reduce_scatter_comm
                self._undo.append(functools.partial(module.set_custom_reduce_scatter, before))
                module.set_custom_reduce_scatter(comm)
            else:
                hook = _AverageShards(each, averages, group)
                self._hooks.append(hook)
                undo: Callable[..., None] = module.set_all_reduce_hook
                self._undo.append(functools.partial(undo, None))  # None is FSDP2's default
                module.set_all_reduce_hook(hook)

    def restore(self, step: int) -> None:
        """Continue to count steps from here."""
        for hook in self._hooks:
            hook.step = step

    def detach(self) -> None:
        """Restore the hooks that the modules had before."""
        for undo in self._undo:
            undo()


class _CompressedReduceScatter(OwnReduceScatter):
    """The compressed reduce-scatter; FSDP2 calls it in its own stream."""

    def __init__(self, slots: Sequence[GradientSlot], averages: Averages) -> None:
        self._slots = slots
        self._averages = averages
        self.step = 0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> dist.Work | None:
        expected = sum(slot.elements for slot in self._slots)
        step, self.step = self.step, self.step + 1
        if input_tensor.numel() != expected:
            # Some parameters had no gradient in this step. FSDP2 does not say which, but all ranks agree: do not compress.
            reduce_rows(output_tensor, input_tensor, group, op)
            return None
        _check_op(op)
        rows = input_tensor.view(group.size(), -1)
        self._averages.scatter(self._slots, output_tensor, rows, group=group, step=step)
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())
        return None


class _AverageShards:
    """The compressed all-reduce; FSDP2 calls it after its reduce-scatter."""

    def __init__(self, slots: Sequence[GradientSlot], averages: Averages, group: dist.ProcessGroup) -> None:
        self._slots = slots
        self._averages = averages
        self._group = group
        self.step = 0

    def __call__(self, reduced: torch.Tensor) -> None:
        step, self.step = self.step, self.step + 1
        if reduced.numel() != sum(slot.elements for slot in self._slots):
            average_whole(reduced, self._group)
            return
        gradients = [
            piece.view(slot.shape)
            for slot, piece in zip(self._slots, reduced.split([slot.elements for slot in self._slots]), strict=True)
        ]
        self._averages.reduce(self._slots, gradients, reduced, group=self._group, step=step)


def _check_op(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> None:
    if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        raise InvalidOption(
            f"FSDP2 reduces these gradients with {op}, which is neither a mean nor a sum.",
            why="set_gradient_divide_factor() makes NCCL scale and sum at once; a compressed reduction cannot",
            next="call set_force_sum_reduction_for_comms(True) on the model: torch divides after the sum then",
        )


def check_free(units: Sequence[ShardUnit]) -> None:
    """Raise if the model's gradients have a hook already."""
    for unit in units:
        group = _group_of(unit.module)
        if isinstance(group._reduce_scatter_comm, _CompressedReduceScatter) or isinstance(
            group._all_reduce_hook, _AverageShards
        ):
            raise twice()
        if group._all_reduce_hook is not None:
            raise InvalidOption(
                "The model has an all-reduce hook already.",
                why="FSDP2 has one such hook per module, and compression would take its place",
                next="take that hook away with set_all_reduce_hook(None), or leave the gradients to it",
            )


def check_default(units: Sequence[ShardUnit]) -> None:
    """Raise if the model's reduce-scatter is not torch's default."""
    for unit in units:
        comm = _group_of(unit.module)._reduce_scatter_comm
        if type(comm) is not _DefaultReduceScatter:
            raise InvalidOption(
                f"The model has a reduce-scatter of its own already: {type(comm).__name__}.",
                why="FSDP2 has one per module, and compression would take its place",
                next="leave out set_custom_reduce_scatter() and settings of communication memory, or the compression",
            )


def _group_of(module: FSDPModule) -> Any:
    """The private object with FSDP2's hooks. The public API can only set hooks, and ``detach`` has to restore the old ones."""
    groups = groups_of(module)
    if len(groups) != 1:
        raise InvalidModel(
            f"A module of the model has {len(groups)} groups of sharded parameters.",
            why="FSDP2 takes a reduce-scatter of one's own for modules with one group only",
            next="shard its parameters over one mesh, or leave the gradients uncompressed",
        )
    return groups[0]
