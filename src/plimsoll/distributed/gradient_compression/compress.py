"""The function ``compress_gradients``: after its call, the ranks of a model exchange compressed gradients."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from plimsoll.distributed.gradient_compression.averaging import Averages, Tally
from plimsoll.distributed.gradient_compression.handle import CompressionHandle
from plimsoll.distributed.gradient_compression.method import EXCLUDED, CompressionSettings, Method, parse_method
from plimsoll.distributed.gradient_compression.replicas import Replicas, free_switch_of, parts_of_replicas
from plimsoll.distributed.gradient_compression.rounds import round_of
from plimsoll.distributed.gradient_compression.shards import (
    Shards,
    check_default,
    check_free,
    parts_of_shards,
    units_of,
)
from plimsoll.distributed.gradient_compression.slots import Form, GradientSlot, make_slots
from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.session.rendezvous.conversation import Conversation
from plimsoll.session.rendezvous.world import current_world
from plimsoll.tracing.torch_internals import warn_if_untried

_TOPIC = "gradient compression"
_SAME = "call compress_gradients() with the same model and the same arguments on every rank"


def compress_gradients(
    model: nn.Module,
    method: str,
    *,
    exclude: Sequence[str] = EXCLUDED,
    momentum: float = 0.0,
    warmup_steps: int = 0,
    seed: int = 0,
    min_ratio: float = 1.5,
    min_elements: int = 1024,
    replicate_group: dist.ProcessGroup | None = None,
) -> CompressionHandle:
    """Exchange fewer bytes of gradients between ranks; add what was not sent to the next step's gradient.

    Every rank calls this with the same arguments, after the model was wrapped and before a backward. Parameters, optimizer
    and ``state_dict`` do not change. Whether it saves time depends on the link; within one machine it usually does not.

    Args:
        model: under ``DistributedDataParallel``, or sharded by FSDP2's ``fully_shard`` over a mesh of one dimension.
        method: ``"none"``, ``"powersgd:4"``, ``"topk:1%"``, ``"randomk:1%"``, ``"sign"``, ``"int8"``.
        exclude: patterns (``fnmatch``) of names of parameters that are not compressed.
        momentum: with ``topk`` and ``randomk``, momentum before compression; then use an optimizer without momentum.
        warmup_steps: the number of reductions at the start that are not compressed.
        seed: seed of random places and first factors; the same on all ranks.
        min_ratio: compress a parameter only if this divides its bytes by at least this number.
        min_elements: compress a parameter only if it has at least this many elements.
        replicate_group: FSDP2 only: the ranks that hold the same shards. The all-reduce among them is added, and
            compressed; the reduce-scatter stays torch's.

    Returns:
        A handle with counts, a description, the state to save, and ``remove``.

    Raises:
        InvalidOption: the method is unknown or does not support this layout, a number is out of range, a pattern matches
            nothing, or the model's gradients already have a hook.
        InvalidModel: the model uses neither DDP nor FSDP2, or its layout does not offer a hook for its reductions.
        RanksDiffer: ranks pass different arguments, or have different models.
        RankFailed, RankMissing: another rank was refused, or did not call.

    Example:
        >>> handle = compress_gradients(DDP(model), "powersgd:4", warmup_steps=100)  # doctest: +SKIP
        >>> print(handle.describe())  # doctest: +SKIP

    Source: see `lowrank`, `encoders`, `feedback`. Known weakness: the residual takes 4 bytes per compressed element on every
    rank, under FSDP2 per element of the unsharded parameter.
    """
    warn_if_untried()
    settings = CompressionSettings(
        method=parse_method(method),
        exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
        momentum=momentum,
        warmup_steps=warmup_steps,
        seed=seed,
        min_ratio=min_ratio,
        min_elements=min_elements,
    )
    if isinstance(model, DistributedDataParallel):
        return _compress_replicas(model, settings, replicate_group)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return _compress_shards(model, settings, replicate_group)
    raise InvalidModel(
        f"{type(model).__name__} is neither under DistributedDataParallel nor sharded by fully_shard.",
        why="gradients are exchanged by one of these two",
        next="wrap the model first, and pass what DistributedDataParallel() returned",
    )


def _compress_replicas(
    model: DistributedDataParallel, settings: CompressionSettings, replicate_group: dist.ProcessGroup | None
) -> CompressionHandle:
    if replicate_group is not None:
        raise InvalidOption(
            "replicate_group= with DistributedDataParallel.",
            why="all its ranks are replicas already",
            next="leave replicate_group= out",
        )
    group = model.process_group
    with _agreeing(settings, group) as slots:
        slots += make_slots(parts_of_replicas(model), settings, ranks=group.size(), form="mean")
        switch = free_switch_of(model)
    tally = Tally()
    attachment = Replicas(model, switch, slots, Averages(settings, round_of(settings, "mean"), tally))
    return CompressionHandle(settings, slots, tally, attachment, rank=group.rank(), layout="replicas")


def _compress_shards(
    model: nn.Module, settings: CompressionSettings, replicate_group: dist.ProcessGroup | None
) -> CompressionHandle:
    units = units_of(model)
    if not units:
        raise InvalidModel("No sharded parameter is trained.", why="there are no gradients", next="unfreeze some")
    form: Form = "mean"
    group, layout = replicate_group, "replicas of shards"
    if group is None:
        form, layout = "shard", "shards"
        group = units[0].parameters[0].device_mesh.get_group()
    with _agreeing(settings, group) as slots:
        if form == "shard":
            check_scatters(settings.method)
        check_free(units)
        if form == "shard":
            check_default(units)
        parts = itertools.chain.from_iterable(parts_of_shards(unit, form) for unit in units)
        slots += make_slots(parts, settings, ranks=group.size(), form=form)
    tally, remaining = Tally(), iter(slots)
    of_units = [list(itertools.islice(remaining, len(unit.parameters))) for unit in units]
    averages = Averages(settings, round_of(settings, form), tally)
    attachment = Shards(units, of_units, averages, replicate_group)
    return CompressionHandle(settings, slots, tally, attachment, rank=group.rank(), layout=layout)


def check_scatters(method: Method) -> None:
    """Raise if a method cannot replace a reduce-scatter.

    Raises:
        InvalidOption: ``powersgd``.
    """
    if method.kind == "powersgd":
        raise InvalidOption(
            f"{str(method)!r} for a model that FSDP2 shards.",
            why="its factors are of whole matrices, and a reduce-scatter hands every rank some rows of the mean only",
            next='choose "topk", "randomk", "sign" or "int8", or wrap in DistributedDataParallel; '
            "compress_gradients() takes it with replicate_group=",
        )


@contextlib.contextmanager
def _agreeing(settings: CompressionSettings, group: dist.ProcessGroup) -> Iterator[list[GradientSlot]]:
    """Run the block that fills the list of slots, then check that all ranks agree; raise on all if one rank is refused.

    Without this, a rank would wait for the others in its next collective, or could not read what they send.
    """
    world = current_world(dist.get_process_group_ranks(group))
    slots: list[GradientSlot] = []
    if world is None:
        yield slots
        return
    with Conversation(world, _TOPIC) as conversation:
        yield slots
        parameters = [(slot.name, slot.shape, str(slot.dtype), slot.reason) for slot in slots]
        digest = hashlib.blake2s(repr(parameters).encode(), digest_size=6).hexdigest()
        mine = {**settings.as_text(), "parameters": f"{len(slots)}, {digest}"}
        facts = {name: str(value) for name, value in mine.items()}
        conversation.same("what is compressed", facts, {"": _SAME}, why="else they cannot read what the others send")
