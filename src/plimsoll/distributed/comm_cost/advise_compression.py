"""Says whether compressing a model's gradients pays on these ranks and links: the function behind ``compress-gradients``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plimsoll.analysis.probe.keeping import trainable_copy
from plimsoll.analysis.probe.step import MakeOptimizer, check_trainable, describe_optimizer
from plimsoll.analysis.probe.stream import Call, read_data
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.store import from_json
from plimsoll.artifacts.traffic import UNCOMPRESSED, Traffic
from plimsoll.distributed.comm_cost.figures import ReplicaFigures, ShardFigures
from plimsoll.distributed.comm_cost.findings import LEAST_ROUNDS, TrafficFindings, validate_methods
from plimsoll.distributed.comm_cost.metering import Metering, meter_traffic
from plimsoll.distributed.comm_cost.timed_step import time_call
from plimsoll.distributed.comm_cost.training import Parallel, planned_steps
from plimsoll.distributed.gradient_compression.compress import check_scatters
from plimsoll.distributed.gradient_compression.method import CompressionSettings, parse_method
from plimsoll.distributed.gradient_compression.shards import ShardUnit, check_default, check_free, units_of
from plimsoll.errors import InvalidModel, InvalidOption
from plimsoll.session.rendezvous.conversation import Conversation
from plimsoll.session.rendezvous.world import World, current_world, find_participants
from plimsoll.session.task import check_model, explained_loss
from plimsoll.tracing.fsdp2 import has_flat_parameters, reshard
from plimsoll.tracing.local_tensors import is_wrapper
from plimsoll.tracing.recorder.calling import Loss
from plimsoll.tracing.recorder.fingerprint import fingerprint
from plimsoll.tracing.recorder.untouched import untouched
from plimsoll.units import check_count, format_seconds

_TOPIC = "advise_compression"
_PATIENCE_SECONDS = 300.0
_SAME = "call advise_compression() with the same model, batches and arguments on every rank"


def advise_compression(
    model: nn.Module,
    batches: Any,
    *,
    methods: Sequence[str] | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    measure_rounds: int = 5,
    validate_steps: int = 0,
    orders: int = 2,
    held_out: Iterable[Any] | int | None = None,
    bucket_bytes: int | None = None,
    seed: int = 0,
    data: str = "",
    progress: Progress | None = None,
) -> Traffic:
    """Say whether compressing gradients pays here: from the measured link, step and methods, and from held-out loss.

    Every rank calls it with the same arguments, with the model before ``DistributedDataParallel`` or after ``fully_shard``.
    Before DDP it measures when each bucket of gradients is full, how each method handles it and how long the link takes, and
    predicts a step with each method. For a sharded model it predicts nothing. If asked, it also measures whole steps, and
    trains with and without compression. Model, shards, gradients, buffers and random state are restored on every rank.

    Args:
        model: on its device, in its training mode, the same on all ranks; if sharded, over all of them.
        batches: anything that yields batches, the same on all ranks (ranks take different ones of them), or one batch.
        methods: as for ``compress_gradients``; by default one of each kind that supports the model's layout.
        loss: as for ``plimsoll.plan``.
        optimizer: makes the optimizer from an iterable of parameters.
        measure_rounds: rounds of real steps with every method; with fewer than three the prediction decides. A sharded
            model needs three.
        validate_steps: steps of training without compression, and with every method fast enough; 0 for none.
        orders: the number of orders of the data to train in.
        held_out: as for ``plimsoll.probe``.
        bucket_bytes: bucket size of DDP; ``None`` for its default. Not for a sharded model.
        seed: the seed of everything random.
        data: a description of the batches.
        progress: called with the stage and the share of it that is done.

    Returns:
        The figures of every method and a ruling; the same on all ranks.

    Raises:
        InvalidOption: there is only one rank, a method is unknown or does not support this layout, validation lacks
            held-out data, or a sharded model gets too few rounds.
        InvalidModel: nothing is trained, the model is in a wrapper of torch's, or its shards cover only some of the ranks.
        RanksDiffer: ranks pass different arguments, or have different models.
        RankFailed, RankMissing: another rank cannot begin, or failed later; see the advice of the error.

    Example:
        >>> traffic = advise_compression(model, batches, validate_steps=200)  # doctest: +SKIP
        >>> print(traffic.ruling, traffic.best)  # doctest: +SKIP

    Source: docs/gradient-compression.md defines every figure. Known weakness: the prediction sends one bucket after the
    other, but NCCL and gloo may send two at a time.
    """
    world = _world()
    report = progress or silent
    assert dist.group.WORLD is not None, "torch.distributed is initialised"
    groups = tuple(dict.fromkeys((dist.group.WORLD, *find_participants(model).groups)))
    with Conversation(world, _TOPIC, groups=groups, timeout_seconds=_PATIENCE_SECONDS) as conversation:
        _check_counts(measure_rounds, validate_steps, orders, bucket_bytes)
        loss = explained_loss(loss)
        check_model(model)
        check_trainable(model)
        check_layout(model, world)
        is_sharded = bool(units_of(model))
        named = name_methods(methods, is_sharded=is_sharded)
        CompressionSettings(method=parse_method(named[-1]), seed=seed)  # raises for an invalid seed
        if is_sharded:
            _check_shard_options(bucket_bytes, measure_rounds)
        report("reading the data", 0.0)
        stream, evaluated = read_data(batches, held_out, seed)
        _check_held_out(validate_steps, evaluated)
        metering = Metering(
            world=world,
            model=model,
            methods=named,
            calls=[stream.draw(world.size)[world.ranks.index(world.rank)] for _ in range(max(1, validate_steps))],
            held_out=evaluated,
            loss=loss,
            make_optimizer=optimizer,
            measure_rounds=measure_rounds,
            validate_steps=validate_steps,
            orders=orders,
            bucket_bytes=bucket_bytes,
            seed=seed,
            report=report,
        )
        described = describe_optimizer(model, optimizer)
        _agree(conversation, metering, described)
        unused = _try(conversation, metering)
        with trainable_copy(model), conversation.stepping():
            found = _measure(metering, unused)
        traffic = found.traffic(optimizer=described, data=data or stream.description)
        told, *_ = conversation.ask("steps", to_json(traffic).encode())
    agreed = from_json(told)  # the first rank's: device names and rounding may differ between ranks
    assert isinstance(agreed, Traffic)
    return agreed


def _world() -> World:
    if not dist.is_available():
        raise InvalidOption(
            "This torch has no torch.distributed.",
            why="ranks exchange gradients through it",
            next="install a build of torch with distributed support",
        )
    world = current_world()
    if world is None:
        raise InvalidOption(
            "There is one rank only: no gradients are exchanged, so there is nothing to compress.",
            why="torch.distributed is not initialised, or has a single process",
            next="start several: torchrun --nproc-per-node 2 -m plimsoll compress-gradients TARGET",
        )
    return world


def _check_counts(measure_rounds: int, validate_steps: int, orders: int, bucket_bytes: int | None) -> None:
    check_count("measure_rounds", measure_rounds, least=0)
    check_count("validate_steps", validate_steps, least=0)
    check_count("orders", orders, least=1)
    if bucket_bytes is not None:
        check_count("bucket_bytes", bucket_bytes, least=1)


def _check_shard_options(bucket_bytes: int | None, measure_rounds: int) -> None:
    if bucket_bytes is not None:
        raise InvalidOption(
            f"bucket_bytes={bucket_bytes} for a model that FSDP2 shards.",
            why="buckets are those of DistributedDataParallel; FSDP2 reduces each module that fully_shard was called on",
            next="leave bucket_bytes= (--bucket) out; call fully_shard on larger or smaller modules instead",
        )
    if measure_rounds < LEAST_ROUNDS:
        raise InvalidOption(
            f"measure_rounds={measure_rounds} for a model that FSDP2 shards.",
            why=f"nothing is predicted for it, and fewer than {LEAST_ROUNDS} measured rounds have no interval",
            next=f"measure_rounds={LEAST_ROUNDS} (--steps {LEAST_ROUNDS}), or leave it out",
        )


def _check_held_out(validate_steps: int, evaluated: Sequence[Call]) -> None:
    if validate_steps and not evaluated:
        raise InvalidOption(
            f"validate_steps={validate_steps}, and no held-out data.",
            why="what compression does to training shows on data that was not trained on",
            next="give a list of batches (a tenth of it is set apart) or held_out=, or leave validation out",
        )


def _agree(conversation: Conversation, metering: Metering, optimizer: str) -> None:
    """Check that all ranks are about to run the same steps; otherwise they would wait for each other in different places."""
    mine = {
        "model": fingerprint(metering.model),
        "methods": ",".join(metering.methods[1:]),
        "measure_rounds": str(metering.measure_rounds),
        "validate_steps": str(metering.validate_steps),
        "orders": str(metering.orders),
        "held-out batches": str(len(metering.held_out)),
        "bucket_bytes": str(metering.bucket_bytes),
        "seed": str(metering.seed),
        "optimizer": optimizer,
        "torch": str(torch.__version__),
    }
    conversation.same("options", mine, {"": _SAME}, why="they measure in turns, and wait for each other")


def _try(conversation: Conversation, metering: Metering) -> int:
    """Run one step on every rank and check that it works on all. Return how many trained parameters get no gradient here."""
    model = metering.model
    # Without shards the ranks do not wait for each other in this step, so a failure does not have to release them.
    with conversation.stepping() if metering.units else contextlib.nullcontext(), untouched(model):
        reshard(model)
        step_seconds = time_call(lambda: metering.backward(model), metering.device)
        unused = check_reducible(model, metering.units)
        _foretell(metering, step_seconds)
    conversation.ask("a first step")
    return unused


def _foretell(metering: Metering, step_seconds: float) -> None:
    """Report the estimated duration, first alone and then with every stage."""
    steps, told = planned_steps(metering), metering.report
    all_of_it = format_seconds(steps * step_seconds)
    told(
        f"about {steps} steps of {format_seconds(step_seconds)}, {all_of_it} in all (fewer: measure_rounds=, --steps; "
        "methods=, --methods)",
        0.0,
    )
    metering.report = lambda stage, share: told(f"{stage}, of about {all_of_it}", share)


def _measure(metering: Metering, unused: int) -> TrafficFindings:
    """Measure the parts, then whole steps, then training. This changes the model's weights; the caller restores them."""
    measured = None if metering.units else meter_traffic(metering)
    parallel = Parallel(metering)
    optimizer_seconds = parallel.optimizer_seconds()
    errors = parallel.gradient_errors()
    steps, alone = parallel.measured_rounds()
    figures: ReplicaFigures | ShardFigures
    if measured is None:
        turns = len(metering.methods)
        figures = ShardFigures(
            silent_seconds=[median(alone[first : first + turns]) for first in range(0, len(alone), turns)],
            uncompressed_seconds=steps[UNCOMPRESSED],
            optimizer_seconds=optimizer_seconds,
            units=len(metering.units),
            gradient_bytes=sum(unit.gradient_bytes for unit in metering.units),
            sent_bytes=parallel.sent_bytes(),
            unused=unused,
            backend=metering.backend,
        )
    else:
        figures = measured.with_optimizer(optimizer_seconds)
        figures = figures.when_alone_takes(median(alone)) if alone else figures
    found = TrafficFindings(metering=metering, figures=figures, errors=errors, rounds=steps)
    return replace(found, validations=validate_methods(found, parallel)) if metering.validate_steps else found


METHODS = ("powersgd:4", "topk:1%", "randomk:1%", "sign", "int8")
"""The default methods; the first does not support models that FSDP2 shards."""


def check_layout(model: nn.Module, world: World) -> None:
    """Raise if the model is wrapped already, its shards do not cover all ranks, or its gradients have a hook."""
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
    """After a step: raise if gradients are not reduced, are missing although DDP would wait for them, or are sparse.

    Returns:
        The number of trained parameters of a sharded model that got no gradient.
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
    """Return every method once by its full name, with the uncompressed one first; ``None`` means one of each kind.

    Raises:
        InvalidOption: ``given`` is not a list, a method is unknown, a method cannot replace the reduce-scatter of a sharded
            model, or there are only uncompressed ones.
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
    """Raise unless every parameter is a plain tensor on every rank, which DDP requires."""
    for name, parameter in model.named_parameters():
        if is_wrapper(parameter):
            raise InvalidModel(
                f"Parameter {name!r} is a {type(parameter).__name__}, and no module of the model is under fully_shard.",
                why="its gradients are exchanged in ways that compression has no place in",
                next="ask with the model before it is made parallel, on as many ranks as there are replicas",
            )
