"""Finds whether the ranks replicate or shard a model, and which methods can send its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plimsoll.artifacts.traffic import UNCOMPRESSED
from plimsoll.distributed.gradient_compression.compress import check_scatters
from plimsoll.distributed.gradient_compression.method import parse_method
from plimsoll.distributed.gradient_compression.shards import ShardUnit, check_default, check_free, units_of
from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.session.rendezvous.world import World
from plimsoll.tracing.fsdp2 import has_flat_parameters
from plimsoll.tracing.local_tensors import is_wrapper

METHODS = ("powersgd:4", "topk:1%", "randomk:1%", "sign", "int8")
"""What is looked at unless told otherwise; the first is not for a model that FSDP2 shards."""


def check_layout(model: nn.Module, world: World) -> None:
    """Refuse what is wrapped already, shards whose traffic is not that of all ranks, and gradients that have a hook."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise InvalidModel(
            "The model is under DistributedDataParallel already.",
            why="it is wrapped for the while, with a hook that tells when each bucket is full; two wrappers would both send",
            next="give the model that is inside: model.module; on the command line, a target that returns it unwrapped",
        )
    if has_flat_parameters(model):
        raise InvalidModel(
            f"{type(model).__name__} is under FullyShardedDataParallel (FSDP1).",
            why="its gradients have no place for compression; FSDP2's have",
            next="shard it with torch.distributed.fsdp.fully_shard, or give the model before it is sharded",
        )
    units = units_of(model)
    if not units:
        _check_no_wrappers(model)
    check_free(units)
    check_default(units)
    for unit in units:
        if unit.ranks != world.size:
            raise InvalidModel(
                f"Parameter {unit.names[0]!r} is sharded over {unit.ranks} of {world.size} ranks.",
                why="the traffic between groups of shards would not be weighed, and it is what compression is mostly for",
                next=f"ask on {unit.ranks} ranks with all of them in one mesh",
            )


def check_reducible(model: nn.Module, units: Sequence[ShardUnit]) -> int:
    """After a step: refuse gradients that are not reduced, that torch's wrapper would wait for, or that have no buckets.

    Returns:
        How many trained parameters of a sharded model have none.
    """
    trained = [(name, each.grad) for name, each in model.named_parameters() if each.requires_grad]
    unused = [name for name, gradient in trained if gradient is None]
    if units:
        if len(unused) == len(trained):
            raise InvalidModel(
                "No sharded parameter has a gradient after a step.",
                why="no module reduced any: that is so after set_requires_gradient_sync(False)",
                next="call set_requires_gradient_sync(True) on the model first",
            )
        return len(unused)
    if unused:
        raise InvalidModel(
            f"{len(unused)} trained parameters get no gradient, the first of them {unused[0]!r}.",
            why="DistributedDataParallel waits for the gradients of all of them",
            next="freeze what is not trained: requires_grad_(False)",
        )
    sparse = [name for name, gradient in trained if gradient is not None and gradient.is_sparse]
    if sparse:
        raise InvalidModel(
            f"The gradient of {sparse[0]!r} is sparse.",
            why="sparse gradients are sent outside of buckets, which are what is timed here",
            next="ask with Embedding(sparse=False); compress_gradients itself leaves sparse gradients as they are",
        )
    return 0


def name_methods(given: object, *, is_sharded: bool) -> tuple[str, ...]:
    """Every method once by its full name, the uncompressed one first; ``given`` is ``None`` for one of each kind.

    Raises:
        InvalidOption: no list, an unknown method, one that cannot take the place of a reduce-scatter where a model is
            sharded, or none at all.
    """
    default = METHODS[1:] if is_sharded else METHODS
    if given is not None and not isinstance(given, Iterable):
        raise InvalidOption(
            f"methods={given!r} is no list of methods.",
            why="each is a name with its parameter",
            next=f'methods=["{METHODS[1]}", "{METHODS[-1]}"], or leave it out',
        )
    listed = default if given is None else [given] if isinstance(given, str) else given
    parsed = [parse_method(each) for each in listed]
    if is_sharded:
        for method in parsed:
            check_scatters(method)
    others = dict.fromkeys(str(method) for method in parsed if str(method) != UNCOMPRESSED)
    if not others:
        raise InvalidOption(
            "methods= names no method of compression.",
            why="there is nothing to hold against sending gradients as they are",
            next=f"name some of {', '.join(default)}, or leave it out",
        )
    return (UNCOMPRESSED, *others)


def _check_no_wrappers(model: nn.Module) -> None:
    """Every parameter in the memory of every rank, as torch's wrapper needs it."""
    for name, parameter in model.named_parameters():
        if is_wrapper(parameter):
            raise InvalidModel(
                f"Parameter {name!r} is a {type(parameter).__name__}, and no module of the model is under fully_shard.",
                why="its gradients are exchanged in ways that compression has no place in",
                next="ask with the model before it is made parallel, on as many ranks as there are replicas",
            )
