"""Predicts the seconds of a step with a method, from the timed step, the timed method and the timed links.

The links follow the α-β model: seconds = latency + wire_bytes / bandwidth. The step has two lanes. One lane computes forward
and backward. The other lane handles the buckets one after the other, each when it is full: local work (encoding, decoding) and
transfers alternate. The lanes slow each other down: if both compute, they share the processor; while one transfers, each runs
at a share of its speed.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005; ``wire_bytes`` is
the number of bytes that a rank sends (nccl-tests, "bus bandwidth"). Known weaknesses: a backend that changes its algorithm with
the size does not follow one line (the fit's error shows how far off it is); at every bucket all ranks are as slow as the
slowest; transfers of two buckets never overlap; a processor is shared equally, or not at all.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from plimsoll.artifacts.traffic import LinkFit, LinkPoint, StepTiming, Transfer
from plimsoll.artifacts.verdict import IntervalEstimate


def fit_link(transfer: Transfer, points: Sequence[LinkPoint], ranks: int) -> LinkFit:
    """Fit latency and bandwidth (not negative) with the least relative error, from at least two payload sizes.

    Example:
        >>> points = [LinkPoint(payload_bytes=size, measured_seconds=1e-3 + size / 1e6) for size in (100, 1000, 10000)]
        >>> fit = fit_link(Transfer.ALL_REDUCE, points, 2)
        >>> f"{fit.latency_seconds:.4f} s, {fit.bytes_per_second:.0f} B/s, {fit.relative_error:.1%} off"
        '0.0010 s, 1000000 B/s, 0.0% off'
    """
    wire = np.array([transfer.wire_bytes(point.payload_bytes, ranks) for point in points])
    seconds = np.array([point.measured_seconds for point in points])
    scale = wire.max()  # both columns get a similar size, so that the fit is well conditioned
    rows = np.stack([1 / seconds, wire / scale / seconds], axis=1)
    (latency, full_size_seconds), _ = nnls(rows, np.ones(len(points)))
    errors = rows @ np.array([latency, full_size_seconds]) - 1
    return LinkFit(
        transfer=transfer,
        latency_seconds=float(latency),
        bytes_per_second=float(scale / full_size_seconds) if full_size_seconds > 0 else math.inf,
        relative_error=float(np.sqrt((errors**2).mean())),
        points=tuple(points),
    )


def transfer_seconds(fit: LinkFit, payload_bytes: float, ranks: int, *, bandwidth_scale: float = 1.0) -> float:
    """Seconds of a transfer on a link with ``bandwidth_scale`` times the measured bandwidth."""
    return fit.latency_seconds + fit.transfer.wire_bytes(payload_bytes, ranks) / (
        fit.bytes_per_second * bandwidth_scale
    )


@dataclass(frozen=True, slots=True)
class BucketWork:
    """One bucket: ``compute_seconds`` from when the previous bucket is full until this one is, then its work in lane two.

    That work alternates: ``local_seconds[0]``, the first transfer, ``local_seconds[1]``, the second transfer, and so on.
    ``local_seconds`` has one entry more than ``transfer_seconds``.
    """

    compute_seconds: float
    local_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Speeds of things that happen at the same time, as shares of full speed.

    ``compute``: compute during a transfer. ``transfer``: a transfer during compute. ``processor``: backward during local work,
    and local work during backward (0.5 on one shared processor, 1 if each has its own).
    """

    compute: float = 1.0
    transfer: float = 1.0
    processor: float = 0.5


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The result of `run_step`: ``exposed_seconds`` exceed compute alone; the last two fields are sums over the buckets."""

    step_seconds: float
    exposed_seconds: float
    transfer_seconds: float
    local_seconds: float


@dataclass(slots=True)
class _Piece:
    """The current work of a lane, in seconds at full speed."""

    left_seconds: float
    is_transfer: bool = False


def run_step(buckets: Sequence[BucketWork], tail_seconds: float, sharing: Sharing = Sharing()) -> StepTimeline:
    """Simulate the step from its start until the last gradient is reduced.

    ``buckets`` are in backward's order, and forward belongs to the first. ``tail_seconds`` is compute after the last bucket is
    full.

    Example:
        >>> run_step([BucketWork(2.0, (0.0, 0.0), (1.0,)), BucketWork(2.0, (0.0, 0.0), (1.0,))], 0.0).step_seconds
        5.0
    """
    computing = deque(_Piece(work.compute_seconds) for work in buckets)
    computing.append(_Piece(tail_seconds))
    sending: deque[_Piece] = deque()
    waiting = deque(buckets)
    now = 0.0
    while computing or sending:
        busy = [lane for lane in (computing, sending) if lane]
        speeds = [1.0]
        if len(busy) > 1:
            beside = sending[0].is_transfer
            speeds = [sharing.compute, sharing.transfer] if beside else [sharing.processor, sharing.processor]
        ends = [lane[0].left_seconds / speed for lane, speed in zip(busy, speeds, strict=True)]
        step = min(ends)
        now += step
        for lane, speed, end in zip(busy, speeds, ends, strict=True):
            lane[0].left_seconds -= step * speed
            if end == step:  # exact: this lane's own time was the minimum, so its piece is done despite rounding
                lane.popleft()
                if lane is computing and waiting:
                    sending.extend(_pieces(waiting.popleft()))
    computing_seconds = sum(work.compute_seconds for work in buckets) + tail_seconds
    return StepTimeline(
        step_seconds=now,
        exposed_seconds=max(0.0, now - computing_seconds),
        transfer_seconds=sum(sum(work.transfer_seconds) for work in buckets),
        local_seconds=sum(sum(work.local_seconds) for work in buckets),
    )


def _pieces(work: BucketWork) -> Iterator[_Piece]:
    yield _Piece(work.local_seconds[0])
    for transfer, local in zip(work.transfer_seconds, work.local_seconds[1:], strict=True):
        yield _Piece(transfer, is_transfer=True)
        yield _Piece(local)


LEAST_LINK_ERROR = 0.05
"""The least error assumed for any link, however well a line fits a few points: an assumption."""

_SIZES = 1024
"""The largest timed payload is at most this many times the smallest; in smaller payloads latency dominates anyway."""
_WIDEST_SCALE = 1e4
_SCALES_PER_DECADE = 8
_HALVINGS = 30


@dataclass(frozen=True, slots=True)
class BucketProgram:
    """A method's work on one bucket: local work and transfers alternate, starting and ending with local work."""

    local_seconds: tuple[float, ...]
    transfers: tuple[tuple[Transfer, int], ...]
    """Each transfer with its payload in bytes."""


@dataclass(frozen=True, slots=True)
class MethodProgram:
    """A method's work on all buckets; ``spread`` is half the interquartile range of its local work, as a share."""

    method: str
    buckets: tuple[BucketProgram, ...]
    spread: float = 0.0

    @property
    def transfers(self) -> list[tuple[Transfer, int]]:
        """All transfers of a step, with their payloads in bytes."""
        return [each for bucket in self.buckets for each in bucket.transfers]

    def wire_bytes(self, ranks: int) -> int:
        """Bytes that each rank sends per step."""
        return round(sum(kind.wire_bytes(payload, ranks) for kind, payload in self.transfers))

    def slower(self, factor: float) -> MethodProgram:
        """Return the same program with ``factor`` times as much local work."""
        buckets = (
            replace(bucket, local_seconds=tuple(seconds * factor for seconds in bucket.local_seconds))
            for bucket in self.buckets
        )
        return replace(self, buckets=tuple(buckets))


@dataclass(frozen=True, slots=True)
class Scene:
    """A deviation from the measurements: factors on the seconds of compute, of local work and of transfers."""

    compute: float = 1.0
    local: float = 1.0
    transfer: float = 1.0
    bandwidth: float = 1.0
    """A factor on the link's bandwidth only; its latency does not change."""


@dataclass(frozen=True, slots=True)
class ForecastJob:
    """What all methods share: the step, the links by kind of transfer, and the number of ranks."""

    step: StepTiming
    links: Mapping[Transfer, LinkFit]
    ranks: int

    def timeline(self, program: MethodProgram, scene: Scene = Scene()) -> StepTimeline:
        """Simulate forward and backward with the method, in a scene."""
        begin, works = 0.0, []
        for timing, bucket in zip(self.step.buckets, program.buckets, strict=True):
            ready = timing.measured_ready_seconds
            works.append(
                BucketWork(
                    compute_seconds=max(0.0, ready - begin) * scene.compute,
                    local_seconds=tuple(seconds * scene.local for seconds in bucket.local_seconds),
                    transfer_seconds=tuple(
                        transfer_seconds(self.links[kind], payload, self.ranks, bandwidth_scale=scene.bandwidth)
                        * scene.transfer
                        for kind, payload in bucket.transfers
                    ),
                )
            )
            begin = max(begin, ready)
        tail = max(0.0, self.step.measured_compute_seconds - begin) * scene.compute
        sharing = Sharing(
            compute=self.step.compute_share,
            transfer=self.step.transfer_share,
            processor=self.step.processor_share,
        )
        return run_step(works, tail, sharing)

    def step_seconds(self, program: MethodProgram, scene: Scene = Scene()) -> float:
        """Seconds of the whole step with the method: forward, backward, exposed traffic, and the optimizer."""
        return self.timeline(program, scene).step_seconds + self.step.measured_optimizer_seconds * scene.compute


def predict_step(job: ForecastJob, program: MethodProgram) -> IntervalEstimate:
    """Predict the step's seconds; the interval covers all scenes within the measurements' errors."""
    found = [job.step_seconds(program, scene) for scene in _scenes(job, program)]
    return IntervalEstimate(value=job.step_seconds(program), low=min(found), high=max(found))


def predict_saved(job: ForecastJob, program: MethodProgram, baseline: MethodProgram) -> IntervalEstimate:
    """Predict the share of the uncompressed step that the method saves; both steps are simulated in the same scenes."""
    found = [
        1 - job.step_seconds(program, scene) / job.step_seconds(baseline, scene) for scene in _scenes(job, program)
    ]
    return IntervalEstimate(
        value=1 - job.step_seconds(program) / job.step_seconds(baseline), low=min(found), high=max(found)
    )


def _scenes(job: ForecastJob, program: MethodProgram) -> list[Scene]:
    used = {kind for kind, _ in program.transfers}
    link_error = max((LEAST_LINK_ERROR, *(job.links[kind].relative_error for kind in used)))
    return [
        Scene(compute=compute, local=local, transfer=transfer)
        for compute, local, transfer in itertools.product(
            _around(job.step.spread), _around(program.spread), _around(link_error)
        )
    ]


def _around(spread: float) -> tuple[float, float, float]:
    return (max(0.0, 1 - spread), 1.0, 1 + spread)


def break_even_bandwidth(job: ForecastJob, program: MethodProgram, baseline: MethodProgram) -> float | None:
    """The highest all-reduce bandwidth (bytes per second) at which the method still saves time.

    ``None`` if it saves time at none of the tried bandwidths (down to 1e-4 of the measured one), or already at the highest.
    """
    reference = job.links[Transfer.ALL_REDUCE].bytes_per_second
    decades = math.log10(_WIDEST_SCALE)
    count = int(2 * decades * _SCALES_PER_DECADE)
    scales = [10 ** (decades - 2 * decades * place / count) for place in range(count + 1)]

    def is_saving(scale: float) -> bool:
        scene = Scene(bandwidth=scale)
        return job.step_seconds(program, scene) < job.step_seconds(baseline, scene)

    first = next((place for place, scale in enumerate(scales) if is_saving(scale)), None)
    if not first or not math.isfinite(reference):
        return None
    low, high = scales[first], scales[first - 1]
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_saving(middle) else (low, middle)
    return reference * low


def break_even_hidden_share(job: ForecastJob, program: MethodProgram, baseline: MethodProgram) -> float | None:
    """The largest share of the uncompressed transfers that may be hidden if the method is still to save time.

    The method's own transfers are assumed to be hidden in the same proportion h. With T for seconds of transfers and L for
    seconds of local work: (1 - h)·T_none = L + (1 - h)·T_method. ``None`` if the method loses even with nothing hidden.
    """
    without, with_method = job.timeline(baseline), job.timeline(program)
    gain = without.transfer_seconds - with_method.transfer_seconds
    loss = with_method.local_seconds - without.local_seconds
    if gain <= loss:
        return None
    return min(1.0, 1 - loss / gain) if gain > 0 else None


def hidden_share(job: ForecastJob, program: MethodProgram) -> float:
    """The share of its transfers' time that a method hides behind compute."""
    timeline = job.timeline(program)
    if not timeline.transfer_seconds:
        return 1.0
    return min(1.0, max(0.0, 1 - timeline.exposed_seconds / timeline.transfer_seconds))


def sizes_to_time(programs: Sequence[MethodProgram], *, count: int = 5) -> dict[Transfer, tuple[int, ...]]:
    """The payload sizes to time for each kind of transfer, spread evenly on a log scale over the methods' payloads.

    Example:
        >>> program = MethodProgram("none", (BucketProgram((0.0, 0.0), ((Transfer.ALL_REDUCE, 4096),)),))
        >>> sizes_to_time([program], count=3)
        {<Transfer.ALL_REDUCE: 'all_reduce'>: (256, 1024, 4096)}
    """
    payloads: dict[Transfer, set[int]] = {}
    for program in programs:
        for kind, payload in program.transfers:
            payloads.setdefault(kind, set()).add(max(payload, 4))
    found = {}
    for kind, sizes in payloads.items():
        largest = max(sizes)
        smallest = max(4, largest // _SIZES, min(min(sizes), largest // 16))
        ratio = (largest / smallest) ** (1 / (count - 1))
        steps = (smallest * ratio**place for place in range(count - 1))
        found[kind] = (*dict.fromkeys(max(4, round(step) // 4 * 4) for step in steps), largest // 4 * 4)
    return found
