"""Times the inputs of a forecast of gradient traffic: the step, each method's work on buckets, and the links."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plimsoll.analysis.probe.step import Blocks, MakeOptimizer, Trainer
from plimsoll.analysis.probe.stream import Call
from plimsoll.artifacts.progress import Progress, silent
from plimsoll.artifacts.traffic import UNCOMPRESSED, BucketTiming, LinkFit, LinkPoint, StepTiming, Transfer
from plimsoll.distributed.comm_cost.figures import ReplicaFigures
from plimsoll.distributed.comm_cost.forecast import (
    BucketProgram,
    ForecastJob,
    MethodProgram,
    fit_link,
    sizes_to_time,
    transfer_seconds,
)
from plimsoll.distributed.comm_cost.timed_step import (
    Backward,
    CountingGroup,
    Hook,
    KeptBucket,
    SilentParallel,
    finished,
    pass_through,
    time_transfer,
    wait_for_all,
)
from plimsoll.distributed.gradient_compression.averaging import Averages, Tally, average_whole
from plimsoll.distributed.gradient_compression.method import CompressionSettings, parse_method
from plimsoll.distributed.gradient_compression.rounds import round_of
from plimsoll.distributed.gradient_compression.shards import ShardUnit, units_of
from plimsoll.distributed.gradient_compression.slots import GradientPart, GradientSlot, make_slots
from plimsoll.session.rendezvous.exchange import exchange
from plimsoll.session.rendezvous.world import World
from plimsoll.tracing.meters.timing import wait_for_device
from plimsoll.tracing.recorder.calling import Loss, scalar_loss

_TOPIC = "gradient traffic"
_MOST_BESIDE = 64
_LEAST_SHARE = 0.05
REPETITIONS = 7
"""The number of times that every step, transfer and pass is timed."""


@dataclass(slots=True, kw_only=True)
class Metering:
    """The checked arguments of ``advise_compression`` on this rank, and helpers to compare ranks.

    ``methods`` are full names, the uncompressed one first. ``calls`` are this rank's own batches, one per step; the first is
    the one timed. ``held_out`` batches are the same on all ranks. With each method ``orders`` runs of ``validate_steps`` steps
    are trained. ``units`` are the modules whose gradients FSDP2 reduces (empty for a model to be replicated), and
    ``bucket_bytes`` is DDP's bucket size.
    """

    world: World
    model: nn.Module
    methods: tuple[str, ...]
    calls: Sequence[Call]
    held_out: Sequence[Call]
    loss: Loss | None
    make_optimizer: MakeOptimizer
    measure_rounds: int = 0
    validate_steps: int = 0
    orders: int = 1
    bucket_bytes: int | None = None
    seed: int = 0
    report: Progress = silent
    units: tuple[ShardUnit, ...] = field(init=False)
    backward: Backward = field(init=False)

    def __post_init__(self) -> None:
        self.units = tuple(units_of(self.model))
        self.backward = _backward(self.model, self.calls[0], self.loss)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def backend(self) -> str:
        """The backend that sends tensors of this device; a group may have one backend for each kind of device."""
        return dict(each.split(":") for each in dist.get_backend_config().split(","))[self.device.type]

    def ask_all(self, value: object) -> list[Any]:
        """Return every rank's value, in the order of ranks; all ranks have to call it."""
        return [json.loads(message) for message in exchange(self.world, _TOPIC, json.dumps(value).encode())]

    def slowest(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Replace each number by its maximum over ranks; all ranks get the same result."""
        return [[max(each) for each in zip(*row, strict=True)] for row in zip(*self.ask_all(rows), strict=True)]


def _backward(model: nn.Module, call: Call, loss: Loss | None) -> Callable[[nn.Module], None]:
    """A function that runs forward, loss and backward on a batch, which is moved to the model's device."""
    call = Trainer(model, loss, Blocks(model, ())).own(call)

    def backward(module: nn.Module) -> None:
        scalar_loss(module(*call.args, **call.kwargs), loss).backward()

    return backward


def meter_traffic(metering: Metering) -> ReplicaFigures:
    """Time the step, each method's work on the gradients, and the link. All ranks have to call it.

    Everything is timed in rounds, so that a disturbance of some seconds affects a little of everything.
    """
    metering.report("first steps", 0.0)
    silent = SilentParallel(metering.model, metering.bucket_bytes, metering.backward)
    buckets = silent.buckets()
    passes = {method: _Passes(metering, method, buckets) for method in metering.methods}
    sizes = sizes_to_time([each.program() for each in passes.values()])
    steps: list[list[float]] = []
    transfers: dict[tuple[Transfer, int], list[float]] = {}
    for number in range(REPETITIONS):
        metering.report(f"timing the parts, round {number + 1}", number / REPETITIONS)
        steps.append([*silent.step(), silent.step_beside(0, 0)[0]])
        for each in passes.values():
            each.time()
        for kind, payloads in sizes.items():
            for payload_bytes in payloads:
                seconds = time_transfer(kind, payload_bytes, metering.device)
                transfers.setdefault((kind, payload_bytes), []).append(seconds)
    rows = metering.slowest(steps)
    *ready_seconds, compute_seconds, alone_seconds = medians(rows)
    links = _fit_links(metering, transfers)
    largest_bytes = max(bucket.gradient_bytes for bucket in buckets)
    metering.report("timing the step beside transfers", 0.0)
    compute_share, transfer_share = _time_beside(metering, silent, links, largest_bytes)
    step = StepTiming(
        measured_compute_seconds=compute_seconds,
        measured_optimizer_seconds=0.0,
        spread=spread_of([row[-2] for row in rows]),
        compute_share=compute_share,
        transfer_share=transfer_share,
        processor_share=_processor_share(metering),
        buckets=tuple(
            BucketTiming(gradient_bytes=bucket.gradient_bytes, measured_ready_seconds=seconds)
            for bucket, seconds in zip(buckets, ready_seconds, strict=True)
        ),
    )
    gradient_bytes = sum(bucket.gradient_bytes for bucket in buckets)
    programs = tuple(each.program() for each in passes.values())
    return ReplicaFigures(ForecastJob(step, links, metering.world.size), programs, gradient_bytes, alone_seconds)


def compression_hook(model: nn.Module, method: str, group: CountingGroup, seed: int) -> Hook:
    """A hook that does what ``compress_gradients`` does to a bucket, for a model without DDP, on a given group."""
    if method == UNCOMPRESSED:

        def plain(bucket: KeptBucket) -> torch.futures.Future[torch.Tensor]:
            average_whole(bucket.buffer(), group)
            return finished(bucket.buffer(), bucket.buffer().device)

        return plain
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    settings = CompressionSettings(method=parse_method(method), seed=seed)
    parts = [GradientPart(name=name, shape=tuple(each.shape), dtype=each.dtype) for name, each in trained]
    slots = make_slots(parts, settings, ranks=group.size(), form="mean")
    slot_of: dict[torch.Tensor, GradientSlot] = dict(zip((parameter for _, parameter in trained), slots, strict=True))
    mean = Averages(settings, round_of(settings, "mean"), Tally())

    def hook(bucket: KeptBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        parameters = [slot_of[parameter] for parameter in bucket.parameters()]
        mean.reduce(parameters, bucket.gradients(), buffer, group=group, step=0)
        return finished(buffer, buffer.device)

    return hook


class _Passes:
    """Passes of one method over the buckets, timed while all ranks run; a first, untimed pass finds the transfers."""

    def __init__(self, metering: Metering, method: str, buckets: Sequence[KeptBucket]) -> None:
        device = metering.device

        def now() -> float:
            wait_for_device(device)
            return time.perf_counter()

        self._metering = metering
        self._method = method
        self._buckets = buckets
        self._group = CountingGroup(metering.world.size, now)
        self._hook = compression_hook(metering.model, method, self._group, metering.seed)
        self._shape = self._pass()
        self._rows: list[list[float]] = []

    def time(self) -> None:
        """Time one more pass."""
        self._rows.append([seconds for each in self._pass() for seconds in each.local_seconds])

    def program(self) -> MethodProgram:
        """The method's work: medians over passes of the slowest rank's seconds. All ranks have to call it."""
        untimed = [seconds for each in self._shape for seconds in each.local_seconds]
        rows = self._metering.slowest(self._rows or [untimed])
        local_seconds = iter(medians(rows))
        return MethodProgram(
            method=self._method,
            buckets=tuple(
                replace(each, local_seconds=tuple(next(local_seconds) for _ in each.local_seconds))
                for each in self._shape
            ),
            spread=spread_of([sum(row) for row in rows]),
        )

    def _pass(self) -> list[BucketProgram]:
        wait_for_all(self._metering.device)
        return pass_through(self._hook, self._buckets, self._group)


def _fit_links(metering: Metering, transfers: dict[tuple[Transfer, int], list[float]]) -> dict[Transfer, LinkFit]:
    rows = metering.slowest(list(transfers.values()))
    points: dict[Transfer, list[LinkPoint]] = {}
    for (kind, payload_bytes), row in zip(transfers, rows, strict=True):
        point = LinkPoint(payload_bytes=payload_bytes, measured_seconds=statistics.median(row))
        points.setdefault(kind, []).append(point)
    return {kind: fit_link(kind, found, metering.world.size) for kind, found in points.items()}


def _time_beside(
    metering: Metering, silent: SilentParallel, links: dict[Transfer, LinkFit], payload_bytes: int
) -> tuple[float, float]:
    """Speed of compute during transfers, and of transfers during compute, each as a share of its speed alone."""
    first = metering.slowest([[silent.step_beside(payload_bytes, 0)[0]]])[0][0]
    each_seconds = transfer_seconds(links[Transfer.ALL_REDUCE], payload_bytes, metering.world.size)
    count = min(_MOST_BESIDE, math.ceil(1.5 * first / each_seconds) + 1)
    samples = [
        [silent.step_beside(payload_bytes, 0)[0], *silent.step_beside(payload_bytes, count)] for _ in range(REPETITIONS)
    ]
    alone_seconds, beside_seconds, all_seconds = medians(metering.slowest(samples))
    # Some of the transfers were done during the step; the rest ran alone afterwards.
    sent_seconds = count * each_seconds - max(0.0, all_seconds - beside_seconds)
    shares = alone_seconds / beside_seconds, sent_seconds / min(beside_seconds, all_seconds)
    return min(1.0, max(_LEAST_SHARE, shares[0])), min(1.0, max(_LEAST_SHARE, shares[1]))


def _processor_share(metering: Metering) -> float:
    """The speed of local work during backward: 0.5 on a GPU; on a CPU 1 with enough cores for all threads, down to 0.5.

    It is the smallest over all ranks' machines, because all ranks must predict the same.
    """
    if metering.device.type != "cpu":
        return 0.5
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads_per_core = (torch.get_num_threads() + 1) * local_ranks / (os.cpu_count() or 1)
    return min(1.0, max(0.5, 1 / metering.slowest([[threads_per_core]])[0][0]))


def medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """The median of every column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def spread_of(values: Sequence[float]) -> float:
    """Half the interquartile range, as a share of the median.

    Example:
        >>> spread_of([1.0, 2.0, 3.0])
        0.25
    """
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0
