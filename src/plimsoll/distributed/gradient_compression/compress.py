"""The function ``compress_gradients``. After its call, the ranks that train a model exchange compressed gradients."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from plimsoll.distributed.gradient_compression.averaging import Averages
from plimsoll.distributed.gradient_compression.handle import CompressionHandle
from plimsoll.distributed.gradient_compression.method import EXCLUDED, CompressionSettings, parse_method
from plimsoll.distributed.gradient_compression.replicas import Replicas
from plimsoll.distributed.gradient_compression.shards import Shards
from plimsoll.distributed.gradient_compression.slots import Form, make_slots
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
    """Exchange fewer bytes of gradients between ranks.

    What a rank does not send in a step is added to its next step's gradient.

    All ranks must call this function with the same arguments, after the model was wrapped and before a backward. Parameters,
    optimizer and ``state_dict`` do not change. Whether compression saves time depends on the link; within one machine it
    usually does not.

    Args:
        model: under ``DistributedDataParallel``, or sharded by FSDP2's ``fully_shard`` over a mesh of one dimension.
        method: ``"none"``, ``"powersgd:4"`` (two factors of rank 4 of each matrix; not for the reduce-scatter of FSDP2), or
            ``"topk:1%"`` (the largest elements and their places).
        exclude: patterns (``fnmatch``) of names of parameters that are not compressed.
        momentum: with ``topk``, momentum before compression; then use an optimizer without momentum.
        warmup_steps: the number of reductions at the start that are not compressed.
        seed: seed of the first factors of ``powersgd``; the same on all ranks.
        min_ratio: compress a parameter only if compression divides the parameter's bytes by at least this number.
        min_elements: compress a parameter only if the parameter has at least this many elements.
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

    Source: see `powersgd`, `topk`, `feedback`. Known weakness: the residual takes 4 bytes per compressed element on every rank,
    under FSDP2 per element of the unsharded parameter. On a CPU backward waits for each exchange.
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
    return attach_compression(model, settings, replicate_group)


def attach_compression(
    model: nn.Module,
    settings: CompressionSettings,
    replicate_group: dist.ProcessGroup | None = None,
    make_averages: Callable[[CompressionSettings, Form], Averages] = Averages,
) -> CompressionHandle:
    """Compress gradients as ``compress_gradients`` does, with settings in one object.

    ``make_averages`` makes the object that exchanges the gradients; a measurement can pass another class.
    """
    layout = layout_of(model, replicate_group)
    world = current_world(dist.get_process_group_ranks(layout.group))
    # Without this conversation a rank would wait for the others in its next collective, or could not read what they send.
    with contextlib.nullcontext() if world is None else Conversation(world, _TOPIC) as conversation:
        layout.check(settings.method)
        slots = make_slots(layout.parts(), settings, ranks=layout.group.size(), form=layout.form)
        if conversation is not None:
            parameters = [(slot.name, slot.shape, str(slot.dtype), slot.reason) for slot in slots]
            digest = hashlib.blake2s(repr(parameters).encode(), digest_size=6).hexdigest()
            mine = {**settings.as_text(), "parameters": f"{len(slots)}, {digest}"}
            facts = {name: str(value) for name, value in mine.items()}
            conversation.same(
                "what is compressed", facts, {"": _SAME}, why="else they cannot read what the others send"
            )
    averages = make_averages(settings, layout.form)
    layout.attach(slots, averages)
    return CompressionHandle(settings, slots, averages, layout)


def layout_of(model: nn.Module, replicate_group: dist.ProcessGroup | None) -> Replicas | Shards:
    """Return the object that attaches compression to the wrapper (DDP or FSDP2) that exchanges the model's gradients.

    Raises:
        InvalidOption: ``replicate_group`` was given for a model under DDP.
        InvalidModel: the model is under neither DDP nor FSDP2, or it does not have trained parameters.
    """
    if isinstance(model, DistributedDataParallel):
        if replicate_group is not None:
            raise InvalidOption(
                "replicate_group= with DistributedDataParallel.",
                why="all its ranks are replicas already",
                next="leave replicate_group= out",
            )
        return Replicas(model)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return Shards(model, replicate_group)
    raise InvalidModel(
        f"{type(model).__name__} is neither under DistributedDataParallel nor sharded by fully_shard.",
        why="gradients are exchanged by one of these two",
        next="wrap the model first, and pass what DistributedDataParallel() returned",
    )
