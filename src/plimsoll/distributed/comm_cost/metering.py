"""Times what a forecast of gradient traffic needs: the step, what each method does to its buckets, and the links."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from plimsoll.artifacts.progress import Progress
from plimsoll.artifacts.traffic import UNCOMPRESSED, BucketTiming, LinkFit, LinkPoint, StepTiming, Transfer
from plimsoll.distributed.comm_cost.counting import CountingGroup, Hook, KeptBucket, Pass, finished, pass_through
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
    SilentParallel,
    time_transfers,
    wait_for_all,
    wait_for_device,
)
from plimsoll.distributed.gradient_compression.counters import Tally
from plimsoll.distributed.gradient_compression.meaning import BucketMean, average_whole
from plimsoll.distributed.gradient_compression.method import CompressionSettings, parse_method
from plimsoll.distributed.gradient_compression.rounds import mean_round
from plimsoll.distributed.gradient_compression.shards import ShardUnit
from plimsoll.distributed.gradient_compression.slots import GradientPart, GradientSlot, make_slots
from plimsoll.session.rendezvous.exchange import exchange
from plimsoll.session.rendezvous.world import World

_TOPIC = "gradient traffic"
_MOST_BESIDE = 64
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Metering:
    """What is measured, and how often.

    ``units`` are the modules that FSDP2 reduces the gradients of, none of a model that is to be replicated; ``bucket_bytes``
    is that of torch's wrapper, ``repetitions`` how often every step, transfer and pass is timed.
    """

    world: World
    model: nn.Module
    backward: Backward
    methods: tuple[str, ...]
    units: tuple[ShardUnit, ...]
    bucket_bytes: int | None
    repetitions: int
    seed: int
    report: Progress

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return next(self.model.parameters()).device

    @property
    def backend(self) -> str:
        """Who sends what lies on the device: a group may have one for each kind of device."""
        return dict(each.split(":") for each in dist.get_backend_config().split(","))[self.device.type]


@dataclass(frozen=True, slots=True)
class MeteredTraffic:
    """``job`` has the step (its optimizer not yet timed) and the links; ``programs`` begin with the uncompressed one.

    ``alone_seconds`` is what the bare model's step took meanwhile: a mark of how fast the machine was.
    """

    job: ForecastJob
    programs: tuple[MethodProgram, ...]
    gradient_bytes: int
    alone_seconds: float

    def with_optimizer(self, seconds: float) -> MeteredTraffic:
        """The same with the optimizer's seconds in the step."""
        step = msgspec.structs.replace(self.job.step, measured_optimizer_seconds=seconds)
        return replace(self, job=replace(self.job, step=step))

    def when_alone_takes(self, seconds: float) -> MeteredTraffic:
        """The same on a machine that computes at another speed, as another bare step shows: other jobs come and go."""
        factor = seconds / self.alone_seconds
        step = self.job.step
        slower = msgspec.structs.replace(
            step,
            measured_compute_seconds=step.measured_compute_seconds * factor,
            measured_optimizer_seconds=step.measured_optimizer_seconds * factor,
            buckets=tuple(
                msgspec.structs.replace(each, measured_ready_seconds=each.measured_ready_seconds * factor)
                for each in step.buckets
            ),
        )
        return replace(
            self,
            job=replace(self.job, step=slower),
            programs=tuple(program.slower(factor) for program in self.programs),
            alone_seconds=seconds,
        )


def meter_traffic(metering: Metering) -> MeteredTraffic:
    """Time the step, what each method does to its gradients, and the link. All ranks call it alike.

    All of it is timed in rounds, so that a disturbance of some seconds meets a little of everything.
    """
    metering.report("first steps", 0.0)
    silent = SilentParallel(metering.model, metering.bucket_bytes, metering.backward)
    buckets = silent.buckets()
    passes = {method: _Passes(metering, method, buckets) for method in metering.methods}
    sizes = sizes_to_time([each.program() for each in passes.values()])
    steps: list[list[float]] = []
    transfers: dict[tuple[Transfer, int], list[float]] = {}
    for number in range(metering.repetitions):
        metering.report(f"timing the parts, round {number + 1}", number / metering.repetitions)
        sample, alone = silent.step(), silent.step_beside(0, 0)
        steps.append([*sample.ready_seconds, sample.compute_seconds, alone.compute_seconds])
        for each in passes.values():
            each.time()
        for kind, payloads in sizes.items():
            for payload_bytes in payloads:
                seconds = time_transfers(kind, payload_bytes, metering.device, repetitions=1)
                transfers.setdefault((kind, payload_bytes), []).extend(seconds)
    rows = slowest(metering.world, steps)
    *ready_seconds, compute_seconds, alone_seconds = medians(rows)
    links = _fit_links(metering.world, transfers)
    largest_bytes = max(bucket.gradient_bytes for bucket in buckets)
    metering.report("timing the step beside transfers", 0.0)
    compute_share, transfer_share = _time_beside(metering, silent, links, largest_bytes)
    step = StepTiming(
        measured_compute_seconds=compute_seconds,
        measured_optimizer_seconds=0.0,
        spread=spread_of([row[-2] for row in rows]),
        compute_share=compute_share,
        transfer_share=transfer_share,
        processor_share=_processor_share(metering.world, metering.device),
        buckets=tuple(
            BucketTiming(gradient_bytes=bucket.gradient_bytes, measured_ready_seconds=seconds)
            for bucket, seconds in zip(buckets, ready_seconds, strict=True)
        ),
    )
    gradient_bytes = sum(bucket.gradient_bytes for bucket in buckets)
    programs = tuple(each.program() for each in passes.values())
    return MeteredTraffic(ForecastJob(step, links, metering.world.size), programs, gradient_bytes, alone_seconds)


def compression_hook(model: nn.Module, method: str, group: CountingGroup, seed: int) -> Hook:
    """What ``compress_gradients`` does to a bucket, on a group of our choice.

    Args:
        model: without its wrapper.
        method: its name.
        group: whose number of ranks it works for.
        seed: as for ``compress_gradients``.
    """
    if method == UNCOMPRESSED:

        def plain(bucket: KeptBucket) -> torch.futures.Future[torch.Tensor]:
            average_whole(bucket.buffer(), group)
            return finished(bucket.buffer(), [bucket.buffer().device])

        return plain
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    settings = CompressionSettings(method=parse_method(method), seed=seed)
    parts = [GradientPart(name=name, shape=tuple(each.shape), dtype=each.dtype) for name, each in trained]
    slots = make_slots(parts, settings, ranks=group.size(), form="mean")
    slot_of: dict[torch.Tensor, GradientSlot] = dict(zip((parameter for _, parameter in trained), slots, strict=True))
    mean = BucketMean(settings, mean_round(settings), Tally())

    def hook(bucket: KeptBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        parameters = [slot_of[parameter] for parameter in bucket.parameters()]
        mean.reduce(parameters, bucket.gradients(), buffer, group=group, step=0)
        return finished(buffer, [buffer.device])

    return hook


class _Passes:
    """One method's passes over the buckets, each timed with all ranks at work; the first, not timed, shows what it does."""

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
        """One pass more."""
        self._rows.append([seconds for each in self._pass() for seconds in each.local_seconds])

    def program(self) -> MethodProgram:
        """What the method does: medians over passes, each that of the slowest rank. All ranks call it alike."""
        untimed = [seconds for each in self._shape for seconds in each.local_seconds]
        rows = slowest(self._metering.world, self._rows or [untimed])
        local_seconds = iter(medians(rows))
        return MethodProgram(
            method=self._method,
            buckets=tuple(
                BucketProgram(
                    local_seconds=tuple(next(local_seconds) for _ in each.local_seconds),
                    transfers=tuple((Transfer(kind), payload_bytes) for kind, payload_bytes in each.transfers),
                )
                for each in self._shape
            ),
            spread=spread_of([sum(row) for row in rows]),
        )

    def _pass(self) -> list[Pass]:
        wait_for_all(self._metering.device)
        return pass_through(self._hook, self._buckets, self._group)


def _fit_links(world: World, transfers: dict[tuple[Transfer, int], list[float]]) -> dict[Transfer, LinkFit]:
    rows = slowest(world, list(transfers.values()))
    points: dict[Transfer, list[LinkPoint]] = {}
    for (kind, payload_bytes), row in zip(transfers, rows, strict=True):
        point = LinkPoint(payload_bytes=payload_bytes, measured_seconds=statistics.median(row))
        points.setdefault(kind, []).append(point)
    return {kind: fit_link(kind, found, world.size) for kind, found in points.items()}


def _time_beside(
    metering: Metering, silent: SilentParallel, links: dict[Transfer, LinkFit], payload_bytes: int
) -> tuple[float, float]:
    """Speed of computing beside transfers, and of transfers beside computing, as shares of what each has alone."""
    world = metering.world
    first = slowest(world, [[silent.step_beside(payload_bytes, 0).compute_seconds]])[0][0]
    each_seconds = transfer_seconds(links[Transfer.ALL_REDUCE], payload_bytes, world.size)
    count = min(_MOST_BESIDE, math.ceil(1.5 * first / each_seconds) + 1)
    samples = []
    for _ in range(metering.repetitions):
        alone, beside = silent.step_beside(payload_bytes, 0), silent.step_beside(payload_bytes, count)
        samples.append([alone.compute_seconds, beside.compute_seconds, beside.transfers_seconds])
    alone_seconds, beside_seconds, all_seconds = medians(slowest(world, samples))
    # While the step was under way a part of the transfers was done; the rest ran alone.
    sent_seconds = count * each_seconds - max(0.0, all_seconds - beside_seconds)
    shares = alone_seconds / beside_seconds, sent_seconds / min(beside_seconds, all_seconds)
    return min(1.0, max(_LEAST_SHARE, shares[0])), min(1.0, max(_LEAST_SHARE, shares[1]))


def _processor_share(world: World, device: torch.device) -> float:
    """A CPU with as many cores as ranks and threads ask for gives local work a core of its own; a GPU shares itself.

    The smallest of all ranks' machines: what they predict from it has to be the same.
    """
    if device.type != "cpu":
        return 0.5
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads_per_core = (torch.get_num_threads() + 1) * local_ranks / (os.cpu_count() or 1)
    return min(1.0, max(0.5, 1 / slowest(world, [[threads_per_core]])[0][0]))


def slowest(world: World, rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Every number as the rank has it on which it is largest. All ranks get the same."""
    told = [json.loads(message) for message in exchange(world, _TOPIC, json.dumps(rows).encode())]
    return [[max(each) for each in zip(*row, strict=True)] for row in zip(*told, strict=True)]


def medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Of every column."""
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
