"""A model and a step on several ranks in; the timed step, methods and links that a forecast of its traffic needs, out."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.traffic import UNCOMPRESSED, BucketTiming, LinkFit, LinkPoint, StepTiming, Transfer
from plimsoll.gradient_compression.counters import Tally
from plimsoll.gradient_compression.meaning import Mean, average_whole
from plimsoll.gradient_compression.method import parse_method
from plimsoll.gradient_compression.rounds import mean_round
from plimsoll.gradient_compression.settings import Settings
from plimsoll.gradient_compression.slots import Part, Slot, make_slots
from plimsoll.metering.collectives import time_transfers, wait_for_all, wait_for_device
from plimsoll.metering.counting import CountingGroup, KeptBucket, Pass, pass_through
from plimsoll.metering.hooks import Hook, finished
from plimsoll.metering.step import Backward, SilentParallel
from plimsoll.ranks.exchange import exchange
from plimsoll.ranks.world import World
from plimsoll.traffic.forecast import BucketProgram, Job, MethodProgram, sizes_to_time
from plimsoll.traffic.link import fit_link, transfer_seconds

_TOPIC = "gradient traffic"
_MOST_BESIDE = 64
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Metering:
    """What is measured, and how often.

    ``bucket_bytes`` is that of torch's wrapper, ``repetitions`` how often every step, transfer and pass is timed.
    """

    world: World
    model: nn.Module
    backward: Backward
    methods: tuple[str, ...]
    bucket_bytes: int | None
    repetitions: int
    seed: int
    report: Callable[[str, float], None]

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return next(self.model.parameters()).device


@dataclass(frozen=True, slots=True)
class Measured:
    """``job`` has the step (its optimizer not yet timed) and the links; ``programs`` begin with the uncompressed one."""

    job: Job
    programs: tuple[MethodProgram, ...]
    gradient_bytes: int

    def with_optimizer(self, seconds: float) -> Measured:
        """The same with the optimizer's seconds in the step."""
        step = msgspec.structs.replace(self.job.step, measured_optimizer_seconds=seconds)
        return replace(self, job=replace(self.job, step=step))


def meter_traffic(metering: Metering) -> Measured:
    """Time the step, what each method does to its gradients, and the link. All ranks call it alike."""
    report, world = metering.report, metering.world
    report("timing the step", 0.0)
    silent = SilentParallel(metering.model, metering.bucket_bytes, metering.backward)
    samples = [silent.step() for _ in range(metering.repetitions)]
    rows = slowest(world, [[*sample.ready_seconds, sample.compute_seconds] for sample in samples])
    *ready_seconds, compute_seconds = medians(rows)
    buckets = silent.buckets()
    programs = tuple(
        _program(metering, method, buckets, place / len(metering.methods))
        for place, method in enumerate(metering.methods)
    )
    links = _time_links(metering, programs)
    largest_bytes = max(bucket.gradient_bytes for bucket in buckets)
    report("timing the step beside transfers", 0.0)
    compute_share, transfer_share = _time_beside(metering, silent, links, largest_bytes)
    step = StepTiming(
        measured_compute_seconds=compute_seconds,
        measured_optimizer_seconds=0.0,
        spread=spread_of([row[-1] for row in rows]),
        compute_share=compute_share,
        transfer_share=transfer_share,
        processor_share=_processor_share(metering.device),
        buckets=tuple(
            BucketTiming(gradient_bytes=bucket.gradient_bytes, measured_ready_seconds=seconds)
            for bucket, seconds in zip(buckets, ready_seconds, strict=True)
        ),
    )
    gradient_bytes = sum(bucket.gradient_bytes for bucket in buckets)
    return Measured(Job(step, links, world.size), programs, gradient_bytes)


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
    settings = Settings(method=parse_method(method), seed=seed)
    parts = [Part(name=name, shape=tuple(each.shape), dtype=each.dtype) for name, each in trained]
    slots = make_slots(parts, settings, ranks=group.size(), form="mean")
    slot_of: dict[torch.Tensor, Slot] = dict(zip((parameter for _, parameter in trained), slots, strict=True))
    mean = Mean(settings, mean_round(settings), Tally())

    def hook(bucket: KeptBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        parameters = [slot_of[parameter] for parameter in bucket.parameters()]
        mean.reduce(parameters, bucket.gradients(), buffer, group=group, step=0)
        return finished(buffer, [buffer.device])

    return hook


def _program(metering: Metering, method: str, buckets: Sequence[KeptBucket], share: float) -> MethodProgram:
    """What the method does to the buckets: medians over repetitions, each that of the slowest rank."""
    metering.report(f"timing {method}", share)
    device = metering.device

    def now() -> float:
        wait_for_device(device)
        return time.perf_counter()

    group = CountingGroup(metering.world.size, now)
    hook = compression_hook(metering.model, method, group, metering.seed)
    runs: list[list[Pass]] = []
    for _ in range(metering.repetitions + 1):
        wait_for_all(device)
        runs.append(pass_through(hook, buckets, group))
    timed = runs[1:]
    rows = slowest(metering.world, [[s for each in run for s in each.local_seconds] for run in timed])
    local_seconds = iter(medians(rows))
    return MethodProgram(
        method=method,
        buckets=tuple(
            BucketProgram(
                local_seconds=tuple(next(local_seconds) for _ in each.local_seconds),
                transfers=tuple((Transfer(kind), payload_bytes) for kind, payload_bytes in each.transfers),
            )
            for each in timed[-1]
        ),
        spread=spread_of([sum(row) for row in rows]),
    )


def _time_links(metering: Metering, programs: Sequence[MethodProgram]) -> dict[Transfer, LinkFit]:
    found = {}
    sizes = sizes_to_time(programs)
    for place, (kind, payloads) in enumerate(sizes.items()):
        metering.report(f"timing {kind} of {len(payloads)} sizes", place / len(sizes))
        rows = slowest(
            metering.world,
            [
                time_transfers(kind, payload_bytes, metering.device, repetitions=metering.repetitions)
                for payload_bytes in payloads
            ],
        )
        points = [
            LinkPoint(payload_bytes=payload_bytes, measured_seconds=statistics.median(row))
            for payload_bytes, row in zip(payloads, rows, strict=True)
        ]
        found[kind] = fit_link(kind, points, metering.world.size)
    return found


def _time_beside(
    metering: Metering, silent: SilentParallel, links: dict[Transfer, LinkFit], payload_bytes: int
) -> tuple[float, float]:
    """Speed of computing beside transfers, and of transfers beside computing, as shares of what each has alone."""
    world, repetitions = metering.world, max(2, metering.repetitions // 2)
    alone = [silent.step_beside(payload_bytes, 0).compute_seconds for _ in range(repetitions)]
    alone_seconds = statistics.median(row[0] for row in slowest(world, [[seconds] for seconds in alone]))
    each_seconds = transfer_seconds(links[Transfer.ALL_REDUCE], payload_bytes, world.size)
    count = min(_MOST_BESIDE, math.ceil(1.5 * alone_seconds / each_seconds) + 1)
    samples = [silent.step_beside(payload_bytes, count) for _ in range(repetitions)]
    rows = slowest(world, [[each.compute_seconds, each.transfers_seconds] for each in samples])
    beside_seconds, all_seconds = medians(rows)
    # While the step was under way a part of the transfers was done; the rest ran alone.
    sent_seconds = count * each_seconds - max(0.0, all_seconds - beside_seconds)
    shares = alone_seconds / beside_seconds, sent_seconds / min(beside_seconds, all_seconds)
    return min(1.0, max(_LEAST_SHARE, shares[0])), min(1.0, max(_LEAST_SHARE, shares[1]))


def _processor_share(device: torch.device) -> float:
    """A CPU with as many cores as ranks and threads ask for gives local work a core of its own; a GPU shares itself."""
    if device.type != "cpu":
        return 0.5
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores_per_rank = (os.cpu_count() or 1) / local_ranks
    return min(1.0, max(0.5, cores_per_rank / (torch.get_num_threads() + 1)))


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
