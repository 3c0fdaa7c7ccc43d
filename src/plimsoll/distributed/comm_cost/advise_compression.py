"""Measures what each method of gradient compression costs on these ranks and links: the function behind
``compress-gradients``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plimsoll.analysis.probe.step import Blocks, Trainer, check_trainable
from plimsoll.analysis.probe.stream import Stream
from plimsoll.analysis.verify.evidence import versions
from plimsoll.artifacts.base import to_json
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.store import from_json
from plimsoll.artifacts.traffic import UNCOMPRESSED, Traffic
from plimsoll.distributed.comm_cost.cost_meter import CostMeter
from plimsoll.distributed.gradient_compression.compress import compress_gradients, layout_of
from plimsoll.distributed.gradient_compression.method import CompressionSettings, parse_method
from plimsoll.distributed.gradient_compression.replicas import Replicas
from plimsoll.errors import InvalidOption
from plimsoll.session.rendezvous.conversation import Conversation
from plimsoll.session.rendezvous.world import current_world, find_participants
from plimsoll.session.task import check_model, explained_loss
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.recorder.calling import Loss, scalar_loss
from plimsoll.tracing.recorder.fingerprint import fingerprint
from plimsoll.tracing.recorder.untouched import untouched
from plimsoll.units import check_count

METHODS = ("topk:1%", "powersgd:4")
"""The methods that are measured by default. The second one does not support models that FSDP2 shards."""
_TOPIC = "advise_compression"
_PATIENCE_SECONDS = 300.0
_SAME = "call advise_compression() with the same model, batches and arguments on every rank"


def advise_compression(
    model: nn.Module,
    batches: Any,
    *,
    methods: Sequence[str] = (),
    loss: Loss | None = None,
    measure_rounds: int = 5,
    bytes_per_second: float | None = None,
    seed: int = 0,
    data: str = "",
    progress: Progress | None = None,
) -> Traffic:
    """Measure and predict what a step costs with each method of gradient compression, and name the fastest method.

    All ranks must call this function with the same arguments. Real steps are measured in rounds. Steps are also predicted, for
    the measured link or for ``bytes_per_second``. Parameters, shards, gradients, buffers and random state are restored on all
    ranks. Under DDP, a hook of Plimsoll stays, which does what DDP does without a hook. The effect on training is not judged:
    train with and without compression to see it.

    Args:
        model: as for ``compress_gradients``, in its training mode.
        batches: anything that yields batches, the same on all ranks (ranks take different ones of them), or one batch.
        methods: as for ``compress_gradients``; by default one of each kind that supports the model's layout.
        loss: as for ``plimsoll.plan``.
        measure_rounds: number of rounds; each times every method; at least 1.
        bytes_per_second: predict for a link of this bandwidth, in each direction; ``None`` for the measured one.
        seed: the seed of everything random.
        data: a description of the batches.
        progress: a function that is called with the name of the stage and the share of the stage that is done.

    Returns:
        The figures of every method; the same on all ranks.

    Raises:
        InvalidOption: there is only one rank, a method is unknown or does not support this layout, or a number is out of range.
        InvalidModel: nothing is trained, or the model uses neither DDP nor FSDP2.
        RanksDiffer: ranks pass different arguments, or have different models.
        RankFailed, RankMissing: another rank cannot begin, or failed later; see the advice of the error.

    Example:
        >>> traffic = advise_compression(DDP(model), batches, bytes_per_second=125e6)  # doctest: +SKIP
        >>> print(traffic.fastest)  # doctest: +SKIP

    Source: docs/gradient-compression.md defines every figure. Known weaknesses: see `cost_meter`.
    """
    if current_world() is None:
        raise InvalidOption(
            "There is one rank only: no gradients are exchanged, so there is nothing to compress.",
            why="torch.distributed is not initialised, or has a single process",
            next="start several: torchrun --nproc-per-node 2 -m plimsoll compress-gradients TARGET",
        )
    report = progress or silent
    found = find_participants(model)
    assert found.world is not None, "there are several ranks"
    with Conversation(found.world, _TOPIC, groups=found.groups, timeout_seconds=_PATIENCE_SECONDS) as conversation:
        check_count("measure_rounds", measure_rounds, least=1)
        if bytes_per_second is not None and not 0 < bytes_per_second < math.inf:
            raise InvalidOption(
                f"bytes_per_second={bytes_per_second}.", why="a link has a bandwidth above 0", next="125e6 is 1 Gbit/s"
            )
        loss = explained_loss(loss)
        check_model(model)
        check_trainable(model)
        layout = layout_of(model, None)
        default = METHODS[:1] if layout.form == "shard" else METHODS
        parsed = [parse_method(method) for method in ([methods] if isinstance(methods, str) else methods or default)]
        for method in parsed:
            layout.check(method)
            CompressionSettings(method=method, seed=seed)  # raises for an invalid seed
        named = tuple(dict.fromkeys((UNCOMPRESSED, *map(str, parsed))))
        report("reading the data", 0.0)
        stream = Stream(batches, set_apart=0, seed=seed)
        call = Trainer(model, loss, Blocks(model, ())).own(stream.draw(layout.group.size())[layout.group.rank()])
        facts = {
            "model": fingerprint(model),
            "methods": ",".join(named),
            "measure_rounds": str(measure_rounds),
            "bytes_per_second": str(bytes_per_second),
            "seed": str(seed),
            "torch": str(torch.__version__),
        }
        # Otherwise they would wait for each other in different places.
        conversation.same("options", facts, {"": _SAME}, why="they measure in turns, and wait for each other")
        meter = CostMeter(
            group=layout.group,
            model=model,
            forward=lambda: scalar_loss(model(*call.args, **call.kwargs), loss),
            seed=seed,
            ask_all=conversation.ask,
        )
        if isinstance(layout, Replicas):
            # A bad batch or loss fails here, where no rank waits for another one in a collective.
            with untouched(model):
                scalar_loss(inner_module(model)(*call.args, **call.kwargs), loss)
            conversation.ask("a first forward")
        # DDP takes one hook for ever, so it gets it before `untouched` notes what the wrapper holds.
        compress_gradients(model, UNCOMPRESSED).remove()
        # Under DDP gradients may be views of the buckets, which the steps overwrite.
        gradients = [(each.grad, each.grad.clone()) for each in model.parameters() if each.grad is not None]
        try:
            with conversation.stepping(), untouched(model):
                figures = meter.measure(named, measure_rounds, bytes_per_second, report)
        finally:
            for gradient, copy in gradients:
                gradient.copy_(copy)
        traffic = Traffic(
            model=type(inner_module(model)).__name__,
            fingerprint=fingerprint(model),
            device=str(meter.device),
            backend=dict(each.split(":") for each in dist.get_backend_config().split(","))[meter.device.type],
            ranks=layout.group.size(),
            layout=layout.name,
            data=data or stream.description,
            seed=seed,
            versions={**versions(), "threads": str(torch.get_num_threads())},
            **figures,
        )
        first, *_ = conversation.ask("steps", to_json(traffic).encode())
    agreed = from_json(first)  # the first rank's: device names and rounding may differ between ranks
    assert isinstance(agreed, Traffic)
    return agreed
