"""Groups the parameters of one pipeline stage into units, which ZeRO gathers and reduces together, without torch.

A unit is what ``fully_shard`` would be called on: every block (region) with its parameters, and the rest as the root. Under
expert parallelism a block's experts are a separate unit: expert-parallel ranks hold different experts, so only ``dp * cp / ep``
ranks hold the same ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.trace import Category, RegionCall, Storage, Trace, TraceParameter
from plimsoll.estimator.parallelism.members import region_of

ROOT = ""
"""The name of the unit (parameters that are gathered together) that has the parameters outside all blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTypes:
    """Which tensors a rank holds in float32 although the model computes in 16 bits, and which are on the host, as data.

    ``shards`` are the shards of parameters. ``reduced`` are gradients while they are reduced. ``gradients`` are the gradients
    that are kept until the optimizer's step. ``on_host``: shards and their gradients are on the host (FSDP2's
    ``CPUOffloadPolicy``, ZeRO-Infinity). ``own_gradients``: gradients in the model's dtype last as well (DeepSpeed's
    ``BF16_Optimizer`` zeroes them and keeps them).
    """

    shards: bool = False
    reduced: bool = False
    gradients: bool = False
    on_host: bool = False
    own_gradients: bool = False


AS_COMPUTED = HeldTypes()
"""With this setting, a rank holds every tensor in the dtype that the model computes in."""
_WIDE_BYTES = 4
_NARROW = ("bf16", "f16")


def in_f32(parameter: TraceParameter) -> TraceParameter:
    """Return the parameter with dtype and size in float32 if it has 16 bits. Other parameters are unchanged."""
    if parameter.dtype not in _NARROW:
        return parameter
    return replace(parameter, dtype="f32", bytes=math.prod(parameter.shape) * _WIDE_BYTES)


@dataclass(frozen=True, slots=True)
class ShardedUnit:
    """Parameters that are sharded over ``ranks`` ranks and gathered together, as data: those of one block, of the block's
    experts, or of everything outside blocks.

    ``calls`` are the calls of the block.
    """

    name: str
    is_expert: bool
    ranks: int
    parameters: tuple[TraceParameter, ...]
    calls: tuple[RegionCall, ...]

    @property
    def label(self) -> str:
        """The name that messages give this unit of parameters."""
        return (self.name or "the rest of the model") + (" experts" if self.is_expert else "")

    @property
    def dtype(self) -> str:
        """The dtype of the parameters of this unit (parameters that are gathered together)."""
        return self.parameters[0].dtype

    @property
    def gradient_dtype(self) -> str:
        """The dtype of the gradients of this unit. Frozen parameters do not have gradients, and may have another dtype (4-bit
        weights are stored as bytes).
        """
        return next((each.dtype for each in self.parameters if each.is_trainable), self.dtype)

    def times(self, *, is_wide: bool) -> int:
        """Return the factor from the own bytes of this unit's gradients to their bytes in float32 (``is_wide``) or in their own
        dtype: 1 or 2.
        """
        return 2 if is_wide and self.gradient_dtype in _NARROW else 1

    @property
    def padded_bytes(self) -> int:
        """The bytes of all parameters of this unit before sharding, each padded to a multiple of the ranks."""
        return sum(self.ranks * shard_bytes(p, self.ranks) for p in self.parameters)

    @property
    def padded_gradient_bytes(self) -> int:
        """The bytes of the trainable parameters of this unit before sharding, each padded to a multiple of the ranks."""
        return sum(self.ranks * shard_bytes(p, self.ranks) for p in self.parameters if p.is_trainable)


def find_units(trace: Trace, layout: Layout) -> tuple[ShardedUnit, ...]:
    """Return the units of one stage: groups of parameters that are sharded and gathered together.

    Each block is a unit. The root, with the parameters outside blocks, is last.
    """
    names = dict.fromkeys(call.name for call in trace.regions)
    members: dict[tuple[str, bool], list[TraceParameter]] = {}
    for parameter in trace.parameters:
        name = region_of(parameter.name, names) or ROOT
        members.setdefault((name, layout.ep > 1 and is_expert(parameter.name)), []).append(parameter)
    order = [(name, kind) for name in (*names, ROOT) for kind in (False, True)]
    return tuple(
        ShardedUnit(
            name=name,
            is_expert=kind,
            ranks=layout.shards // layout.ep if kind else layout.shards,
            parameters=tuple(members[name, kind]),
            calls=tuple(call for call in trace.regions if call.name == name) if name in names else (),
        )
        for name, kind in dict.fromkeys(order)
        if (name, kind) in members
    )


def rank_parameters(trace: Trace, layout: Layout, held: HeldTypes = AS_COMPUTED) -> tuple[TraceParameter, ...]:
    """Return the parameters that one rank updates. With ZeRO they are its share of each parameter, cut along the first
    dimension.

    The optimizer's memory follows from these. They describe a rank with full shards: the last ranks may have less.

    Example:
        >>> rank_parameters(trace, Layout(dp=8, zero=3))[0].shape  # doctest: +SKIP
        (16032, 4096)
    """
    if not layout.zero:
        return trace.parameters
    ranks = {p.name: unit.ranks for unit in find_units(trace, layout) for p in unit.parameters}
    shards = (shard_of(parameter, ranks[parameter.name]) for parameter in trace.parameters)
    return tuple(in_f32(shard) if held.shards else shard for shard in shards)


def shard_bytes(parameter: TraceParameter, ranks: int) -> int:
    """Return the bytes of one rank's shard, with padding: FSDP2 pads the first dimension to a multiple of the ranks.

    Example:
        >>> shard_bytes(TraceParameter(name="w", shape=(10, 3), dtype="f32", bytes=120, storage=0), 4)
        36
    """
    return shard_of(parameter, ranks).bytes


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts. Shared experts, which see all tokens, do not count."""
    return "experts" in name.split(".")


def shard_of(parameter: TraceParameter, ranks: int) -> TraceParameter:
    """Return the padded shard of a parameter that one rank holds. A parameter without dimensions cannot be cut and is returned
    unchanged.
    """
    if not parameter.shape or not parameter.bytes:
        return parameter
    first, *others = parameter.shape
    rows = math.ceil(first / ranks)
    row_bytes = parameter.bytes // first
    return replace(parameter, shape=(rows, *others), bytes=rows * row_bytes)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Data: the gradients that backward makes for one unit (parameters that are gathered together).

    All of them exist before the tick (position among the ops) ``whole``.
    """

    unit: ShardedUnit
    storages: tuple[Storage, ...]
    whole: int


def gradients_of(trace: Trace, units: Sequence[ShardedUnit]) -> tuple[Gradients, ...]:
    """Return for each unit (parameters that are gathered together) its gradients. They are in the order of their completion in
    backward.

    A block's gradients are complete when its backward ends, the root's when the whole backward ends. Gradients of a block's
    experts are distinguished from the others by their sizes.
    """
    pools: dict[str, list[Storage]] = {}
    for storage in trace.storages:
        if storage.category is Category.GRADIENT and storage.born >= 0:
            region = trace.ops[storage.born].region
            pools.setdefault(trace.regions[region].name if region >= 0 else ROOT, []).append(storage)
    found = []
    for unit in sorted(units, key=lambda unit: not unit.is_expert):
        mine = _take(pools.get(unit.name, []), unit)
        ends = [call.backward[1] for call in unit.calls if call.backward[0] >= 0]
        if mine:
            found.append(Gradients(unit, tuple(mine), max(ends, default=len(trace.ops))))
    return tuple(sorted(found, key=lambda each: each.whole))


def _take(pool: list[Storage], unit: ShardedUnit) -> list[Storage]:
    """Remove from ``pool``, the gradients of a block, those whose sizes are the sizes of the unit's parameters. Return the
    removed gradients.
    """
    left = Counter(parameter.bytes for parameter in unit.parameters if parameter.is_trainable)
    mine = []
    for storage in tuple(pool):
        if left[storage.bytes] > 0:
            left[storage.bytes] -= 1
            mine.append(storage)
            pool.remove(storage)
    return mine
