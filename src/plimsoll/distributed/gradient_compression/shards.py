"""Compresses the gradients of a model under FSDP2, in place of the reduce-scatter of each of its modules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from plimsoll.distributed.gradient_compression.counters import Tally
from plimsoll.distributed.gradient_compression.encoders import Encoder, encoder_of, narrow
from plimsoll.distributed.gradient_compression.feedback import FeedbackOutcome, Offer, offer, settle, with_velocity
from plimsoll.distributed.gradient_compression.meaning import BucketMean
from plimsoll.distributed.gradient_compression.method import CompressionSettings
from plimsoll.distributed.gradient_compression.replicas import twice
from plimsoll.distributed.gradient_compression.rounds import (
    average,
    columns_of,
    draw_places,
    exchange_rows,
    generator_for,
    reduce_rows,
)
from plimsoll.distributed.gradient_compression.slots import GradientPart, GradientSlot
from plimsoll.errors import InvalidModel, InvalidOption


class ScatterRound(Protocol):
    """One compressed reduce-scatter of several parameters."""

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[FeedbackOutcome]:
        """What came of each offer; the mean is that of this rank's row."""
        ...


def scatter_round(settings: CompressionSettings) -> ScatterRound:
    """The compressed reduce-scatter of a method."""
    if settings.method.kind == "randomk":
        return _SharedPlacesScatter(settings)
    return _PayloadScatter(encoder_of(settings.method))


@dataclass(frozen=True, slots=True)
class _PayloadScatter:
    """Every row goes to its rank as a payload; the rank decodes all that came and averages."""

    encoder: Encoder

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[FeedbackOutcome]:
        mine = [self.encoder.encode(each.values, each.slot.dtype) for each in offers]
        received = exchange_rows(torch.cat(mine, dim=1), group)
        outcomes = []
        for each, own, theirs in zip(offers, mine, columns_of(received, mine), strict=True):
            ranks, chunk = each.slot.shape
            mean = average(self.encoder, theirs, chunk, each.slot.dtype, ranks)
            outcomes.append(FeedbackOutcome(mean=mean, sent=self.encoder.decode(own, chunk, each.slot.dtype), kept={}))
        return outcomes


@dataclass(frozen=True, slots=True)
class _SharedPlacesScatter:
    """All ranks send the same places of a row, so a plain reduce-scatter of the values adds up."""

    settings: CompressionSettings

    def reduce(self, offers: Sequence[Offer], group: dist.ProcessGroup) -> list[FeedbackOutcome]:
        places, values = [], []
        for each in offers:
            ranks, chunk = each.slot.shape
            sent = self.settings.method.elements_sent(chunk)
            drawn = torch.stack(
                [draw_places(generator_for(self.settings.seed, each.slot, row), chunk, sent) for row in range(ranks)]
            )
            places.append(drawn.to(each.values.device))
            values.append(narrow(each.values.gather(1, places[-1]), each.slot.dtype))
        rows = torch.cat(values, dim=1).mul_(1 / group.size())
        total = rows.new_empty(rows.shape[1])
        reduce_rows(total, rows, group)
        own, outcomes = group.rank(), []
        for each, drawn, value, averaged in zip(
            offers, places, values, total.split([each.shape[1] for each in values]), strict=True
        ):
            empty = torch.zeros_like(each.values)
            outcomes.append(
                FeedbackOutcome(
                    mean=empty[own].index_copy(0, drawn[own], averaged.float()),
                    sent=empty.scatter(1, drawn, value.float()),
                    kept={},
                )
            )
        return outcomes


class Scatter:
    """Averages the unsharded gradients of a module and gives every rank its shards."""

    def __init__(self, settings: CompressionSettings, round_: ScatterRound | None, tally: Tally) -> None:
        self._settings = settings
        self._round = round_
        self._tally = tally

    @torch.no_grad()
    def reduce(
        self,
        slots: Sequence[GradientSlot],
        output: torch.Tensor,
        rows: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        step: int,
    ) -> None:
        """Put the mean of this rank's row into ``output``.

        Args:
            slots: of the module's parameters, in the order of their columns.
            output: ``(elements of a row,)``.
            rows: ``(ranks, elements of a row)``.
            group: whose ranks take part.
            step: which step of training this belongs to, for the counts.
        """
        widths = [slot.shape[1] for slot in slots]
        pieces, shards = rows.split(widths, dim=1), output.split(widths)
        due = [i for i, slot in enumerate(slots) if slot.is_due(self._settings)]
        plain = [i for i, slot in enumerate(slots) if not slot.is_due(self._settings)]
        is_nonfinite = torch.zeros((), dtype=torch.bool, device=rows.device)
        if len(plain) == len(slots):
            # As it lies in memory: the bits are those of the reduce-scatter that this stands in for.
            reduce_rows(output, rows, group, dist.ReduceOp.AVG)
            is_nonfinite = ~output.isfinite().all()
            for slot, shard in zip(slots, shards, strict=True):
                shard.copy_(self._with_momentum(slot, shard))
        elif plain:
            message = torch.cat([pieces[i] for i in plain], dim=1).mul_(1 / group.size())
            averaged = message.new_empty(message.shape[1])
            reduce_rows(averaged, message, group)
            for i, mean in zip(plain, averaged.split([widths[i] for i in plain]), strict=True):
                shards[i].copy_(self._with_momentum(slots[i], mean))
            is_nonfinite = ~averaged.isfinite().all()
        if due and self._round is not None:
            for i in due:
                _spread_velocity(slots[i], group)
            offers = [offer(slots[i], pieces[i], self._settings.momentum) for i in due]
            # Each rank has its own shard only: what is void somewhere has to be void everywhere.
            is_void = torch.stack([each.is_not_finite for each in offers])
            dist.all_reduce(is_void, group=group)
            outcomes = self._round.reduce(offers, group)
            for flag, i, each, outcome in zip(is_void, due, offers, outcomes, strict=True):
                shards[i].copy_(settle(each, outcome, flag, group.rank()))
            is_nonfinite = is_nonfinite | (is_void > 0).any()
        self._tally.add(slots, self._settings, is_nonfinite, step)
        for slot in slots:
            slot.reductions += 1

    def _with_momentum(self, slot: GradientSlot, mean: torch.Tensor) -> torch.Tensor:
        return with_velocity(slot, mean, self._settings.momentum) if self._settings.momentum else mean


def _spread_velocity(slot: GradientSlot, group: dist.ProcessGroup) -> None:
    """After warm-up: momentum of this rank's shard of the mean becomes momentum of its own gradients, of the same mean."""
    if slot.velocity is not None and slot.velocity.dim() == 1:
        rows = slot.velocity.new_zeros(slot.shape)
        rows[group.rank()] = slot.velocity * group.size()
        slot.velocity = rows


@dataclass(frozen=True, slots=True)
class ShardUnit:
    """One module that ``fully_shard`` was called on, with the parameters that it reduces, in that order."""

    module: FSDPModule
    names: tuple[str, ...]
    parameters: tuple[DTensor, ...]

    @property
    def ranks(self) -> int:
        """How many ranks share the parameters."""
        return self.parameters[0].device_mesh.size()

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """What FSDP2's mixed precision reduces in, where the caller set it."""
        policy = self.module._get_fsdp_state()._mp_policy
        return policy.reduce_dtype or policy.param_dtype

    @property
    def gradient_bytes(self) -> int:
        """Of all its gradients, unsharded, as they are reduced."""
        return sum(each.numel() * (self.reduce_dtype or each.dtype).itemsize for each in self.parameters)

    @property
    def shard_shapes(self) -> list[tuple[int, ...]]:
        """Of one rank's padded shard of each parameter."""
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
        InvalidModel: FSDP2's own HSDP, or parameters that are sharded over several meshes.
    """
    seen: set[nn.Parameter] = set()
    units = []
    for prefix, module in model.named_modules():
        unit = module if isinstance(module, FSDPModule) else None
        if unit is None:
            continue
        unit.reshard()  # a forward without a backward leaves the root's parameters gathered, as plain tensors
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
    """What FSDP2 takes into the unit of a module: children before their parents, no nested units, shared parameters once."""

    def visit(each: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, child in each.named_children():
            if not isinstance(child, FSDPModule):
                yield from visit(child, f"{prefix}{name}.")
        for name, parameter in each.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield f"{prefix}{name}", parameter

    yield from visit(module, "")


def parts_to_scatter(unit: ShardUnit, dtype: torch.dtype | None) -> list[GradientPart]:
    """A unit's parameters as a reduce-scatter has them: one row per rank."""
    return [
        GradientPart(name=name, shape=(unit.ranks, math.prod(shape)), dtype=dtype or parameter.dtype)
        for name, parameter, shape in zip(unit.names, unit.parameters, unit.shard_shapes, strict=True)
    ]


def parts_to_average(unit: ShardUnit, dtype: torch.dtype | None) -> list[GradientPart]:
    """A unit's parameters as an all-reduce among replicas has them: this rank's shards."""
    return [
        GradientPart(name=name, shape=shape, dtype=dtype or parameter.dtype)
        for name, parameter, shape in zip(unit.names, unit.parameters, unit.shard_shapes, strict=True)
    ]


class Shards:
    """The units of one model, while their reduce-scatters are compressed."""

    def __init__(self, units: Sequence[ShardUnit], slots: Sequence[Sequence[GradientSlot]], scatter: Scatter) -> None:
        self._comms = [_CompressedReduceScatter(each, scatter) for each in slots]
        self._modules = [unit.module for unit in units]
        self._before = [_group_of(module)._reduce_scatter_comm for module in self._modules]
        for module, comm in zip(self._modules, self._comms, strict=True):
            module.set_custom_reduce_scatter(comm)

    def restore(self, step: int) -> None:
        """Count steps from here on."""
        for comm in self._comms:
            comm.step = step

    def detach(self) -> None:
        """Put back the reduce-scatters that were there."""
        for module, comm in zip(self._modules, self._before, strict=True):
            module.set_custom_reduce_scatter(comm)


class ShardReplicas:
    """The units of one model, while the all-reduces between replicas of their shards are ours."""

    def __init__(
        self,
        units: Sequence[ShardUnit],
        slots: Sequence[Sequence[GradientSlot]],
        mean: BucketMean,
        group: dist.ProcessGroup,
    ) -> None:
        self._modules = [unit.module for unit in units]
        self._hooks = [_AverageShards(each, mean, group) for each in slots]
        for module, hook in zip(self._modules, self._hooks, strict=True):
            module.set_all_reduce_hook(hook)

    def restore(self, step: int) -> None:
        """Count steps from here on."""
        for hook in self._hooks:
            hook.step = step

    def detach(self) -> None:
        """Take the hooks away; FSDP2 has none by default."""
        for module in self._modules:
            module.set_all_reduce_hook(None)  # type: ignore[arg-type]  # what it is before anybody sets one


class _CompressedReduceScatter(DefaultAllocMixin, ReduceScatter):
    """What FSDP2 calls in the place of its reduce-scatter, in its own stream."""

    def __init__(self, slots: Sequence[GradientSlot], scatter: Scatter) -> None:
        self._slots = slots
        self._scatter = scatter
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
            # Some parameters had no gradient in this step. Which ones FSDP2 does not say, but all ranks agree.
            reduce_rows(output_tensor, input_tensor, group, op)
            return None
        _check_op(op)
        rows = input_tensor.view(group.size(), -1)
        self._scatter.reduce(self._slots, output_tensor, rows, group=group, step=step)
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())
        return None


class _AverageShards:
    """What FSDP2 calls after its reduce-scatter."""

    def __init__(self, slots: Sequence[GradientSlot], mean: BucketMean, group: dist.ProcessGroup) -> None:
        self._slots = slots
        self._mean = mean
        self._group = group
        self.step = 0

    def __call__(self, reduced: torch.Tensor) -> None:
        step, self.step = self.step, self.step + 1
        if reduced.numel() != sum(slot.elements for slot in self._slots):
            reduced.mul_(1 / self._group.size())
            dist.all_reduce(reduced, group=self._group)
            return
        gradients = [
            piece.view(slot.shape)
            for slot, piece in zip(self._slots, reduced.split([slot.elements for slot in self._slots]), strict=True)
        ]
        self._mean.reduce(self._slots, gradients, reduced, group=self._group, step=step)


def _check_op(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> None:
    if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        raise InvalidOption(
            f"FSDP2 reduces these gradients with {op}, which is neither a mean nor a sum.",
            why="set_gradient_divide_factor() makes NCCL scale and sum at once; a compressed reduction cannot",
            next="call set_force_sum_reduction_for_comms(True) on the model: torch divides after the sum then",
        )


def check_free(units: Sequence[ShardUnit]) -> None:
    """Refuse a model whose gradients have a hook already."""
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
    """Refuse a model whose reduce-scatter is not torch's own."""
    for unit in units:
        comm = _group_of(unit.module)._reduce_scatter_comm
        if type(comm) is not DefaultReduceScatter:
            raise InvalidOption(
                f"The model has a reduce-scatter of its own already: {type(comm).__name__}.",
                why="FSDP2 has one per module, and compression would take its place",
                next="leave out set_custom_reduce_scatter() and settings of communication memory, or the compression",
            )


def _group_of(module: FSDPModule) -> torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:
    """Where FSDP2 keeps its hooks. They can be set in public but only be read here, and what was there has to come back."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    if len(groups) != 1:
        raise InvalidModel(
            f"A module of the model has {len(groups)} groups of sharded parameters.",
            why="FSDP2 takes a reduce-scatter of one's own for modules with one group only",
            next="shard its parameters over one mesh, or leave the gradients uncompressed",
        )
    return groups[0]
