"""Measures the costs of a step's ops, and of the engine's own work, on this device.

*Ops.* Seconds are the median of the faster half of an op's samples, with their spread. The faster half is used because an op
that gets fresh memory from the system waits for page faults. On a virtual machine, this took up to five times the op's compute
time in the first run after memory was returned to the system. A replayed op reuses memory that backward has just freed and does
not wait. Ops without samples get a roofline, whose bandwidth, arithmetic rate and launch time are fitted to the ops with
samples: `fit_roofline`. Ops of an optimizer step are never sampled, because that step is traced with fake tensors to leave the
model unchanged. The spread of ops without samples is the fit's typical error.

*Engine.* The engine is the code that runs plans. Small real modules run under it, in a few tenths of a second. The engine is
Python. Between ops that have streamed through megabytes it runs from cold caches, and takes several times as long as in a tight
loop. So between two links (ops) of the measured chain, as many bytes are touched as an op of the step moves. On a GPU the chain
runs on the GPU: a lap is the host's time to launch, nothing waits for the device, and the host's caches stay warm. Each link is
one small op that saves its input, so a lap is one op plus the engine's work around it. The chain runs with and without the
engine. As for traced ops, each lap is the median over the faster half of the steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from plimsoll.artifacts.costs import Costs, CostSource, OpCost
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.plan import Peak, Plan, RegionPlan, ValueDecision
from plimsoll.artifacts.trace import OpSpec, Trace
from plimsoll.planning.costing.host import host_memory_bytes
from plimsoll.session.manage import manage

_COMPUTE_BOUND_FLOPS_PER_BYTE = 8.0
"""An op with more FLOPs per byte than this counts as limited by arithmetic, not by bandwidth. Real devices change over between
5 (slow f32) and 300 (bf16, H100).
"""
_LARGE_BYTES = 2**18
"""Only ops that move at least this many bytes show the bandwidth. The times of smaller ops mostly show the launch time."""

_OPS_PER_LINK = 3
"""The number of ops that one link of the measured chain runs, in forward and backward. The chain's links are small equal ops
that measure Plimsoll's own time.

A link runs one op in forward, its derivative and a product in backward.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOverhead:
    """Data: host seconds that the engine (the code that runs plans) adds to a step, not counting the ops that it recomputes.

    ``region_seconds``: for each call of a managed module that it changes (hooks, comparing the call with the recorded call).
    ``slot_seconds``: for each tensor that autograd saves in that module (pack hook, bookkeeping, unpack hook).
    ``replay_seconds``: for each recomputed op, if it is recomputed alone. It covers the call below autograd, and for every
    second op a sample that is compared with forward's. It includes the small op itself, about a microsecond.
    ``host_op_seconds``: the host's time for any op. It is not a cost of the engine; it shows whether a device waits for the
    host.
    """

    region_seconds: float = 0.0
    slot_seconds: float = 0.0
    replay_seconds: float = 0.0
    host_op_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainLaps:
    """Data: the seconds of one step of the measured chain of small ops: entering the managed module, each op of forward,
    leaving the module, and each op of backward.

    Both tuples are in the order of forward.
    """

    entry_seconds: float
    forward_seconds: tuple[float, ...]
    exit_seconds: float
    backward_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.forward_seconds) == len(self.backward_seconds)


_NO_ENGINE = EngineOverhead()


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedRoofline:
    """The rates that a device reached on the timed ops, as data: bandwidth, arithmetic rate and launch time."""

    bytes_per_second: float
    flops_per_second: float
    launch_seconds: float
    relative_error: float
    """The median of |fitted - measured| / measured over the ops that the rates were fitted to."""

    def seconds(self, spec: OpSpec) -> float:
        return self.launch_seconds + max(spec.moved_bytes / self.bytes_per_second, spec.flops / self.flops_per_second)


def measured_costs(trace: Trace, engine: EngineOverhead = _NO_ENGINE) -> Costs:
    """Return the seconds of each op of ``trace`` on the device that it was traced on, and the seconds of Plimsoll's own work on
    this host.

    A plan's extra seconds are the seconds of its recomputed ops, plus ``engine`` for every region (managed module) that it
    changes. A trace with fake tensors is not timed and needs ``roofline_costs``.
    """
    assert trace.timings, "a fake trace is not timed: use roofline_costs"
    ops = {key: op_cost(samples) for key, samples in trace.timings.items() if samples}
    unseen = [key for key in trace.specs if key not in ops]
    if unseen:
        fit = fit_roofline(trace.specs, {key: cost.seconds for key, cost in ops.items()})
        for key in unseen:
            seconds = fit.seconds(trace.specs[key])
            ops[key] = OpCost(seconds=seconds, spread_seconds=seconds * fit.relative_error)
    if hides_host_work(trace, ops, engine):
        engine = _NO_ENGINE
    elif not _is_cpu(trace):  # the device waits for launches, so an op takes at least the host's time
        ops = {key: _no_faster(cost, engine.host_op_seconds) for key, cost in ops.items()}
    return Costs(
        device=trace.device,
        source=CostSource.MEASURED,
        ops=ops,
        region_seconds=engine.region_seconds,
        slot_seconds=engine.slot_seconds,
        replay_seconds=engine.replay_seconds,
        memory_bytes=device_memory_bytes(trace.device),
    )


def hides_host_work(trace: Trace, ops: Mapping[str, OpCost], engine: EngineOverhead) -> bool:
    """Return True if the device needs longer for the step's ops than the host needs to launch them. The host's work then runs
    ahead of the device and costs no time.

    The two are measured separately: ops in device seconds (``CudaClock``), the host by a chain of small ops on the device.
    Known weakness: not yet run on a GPU; if only some launches are the bottleneck, the whole step gets one answer.
    """
    if _is_cpu(trace):
        return False
    device_seconds = sum(ops[op.cost_key].seconds for op in trace.ops if op.cost_key in ops)
    return device_seconds > len(trace.ops) * engine.host_op_seconds


def _is_cpu(trace: Trace) -> bool:
    return trace.device.partition(":")[0] == "cpu"


def _no_faster(cost: OpCost, seconds: float) -> OpCost:
    return OpCost(seconds=max(cost.seconds, seconds), spread_seconds=cost.spread_seconds)


def op_cost(samples: Sequence[float]) -> OpCost:
    """Return the median of the faster half of ``samples``, with half their interquartile range as the spread."""
    if len(samples) < 2:
        return OpCost(seconds=samples[0])
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return OpCost(seconds=faster_half_median(samples), spread_seconds=(high - low) / 2)


def fit_roofline(specs: Mapping[str, OpSpec], seconds: Mapping[str, float]) -> FittedRoofline:
    """Fit bandwidth, arithmetic rate and launch time to the timed ops. Medians are used, so that outliers do not matter.

    If no timed op is large enough to show a rate, use the fastest rate of any op.
    """
    timed = [(specs[key], value) for key, value in seconds.items() if key in specs and value > 0]
    assert timed, "no op was timed"
    small = sorted(value for spec, value in timed if spec.moved_bytes < _LARGE_BYTES and not _is_compute_bound(spec))
    launch_seconds = small[len(small) // 10] if small else min(value for _, value in timed) / 2
    net = [(spec, max(value - launch_seconds, value / 10)) for spec, value in timed]
    fit = FittedRoofline(
        bytes_per_second=_rate(
            [(spec.moved_bytes, value) for spec, value in net if not _is_compute_bound(spec)], at_least=_LARGE_BYTES
        ),
        flops_per_second=_rate(
            [(spec.flops, value) for spec, value in net if _is_compute_bound(spec)],
            at_least=int(_LARGE_BYTES * _COMPUTE_BOUND_FLOPS_PER_BYTE),
        ),
        launch_seconds=launch_seconds,
        relative_error=0.0,
    )
    errors = [abs(fit.seconds(spec) - value) / value for spec, value in timed]
    return replace(fit, relative_error=statistics.median(errors))


def device_memory_bytes(device: str) -> int | None:
    """Return the memory of ``device`` (``"cpu"``, ``"cuda:0"``), or ``None`` if it is unknown."""
    kind = device.partition(":")[0]
    if kind == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
    return host_memory_bytes() if kind == "cpu" else None


def _is_compute_bound(spec: OpSpec) -> bool:
    return spec.flops > _COMPUTE_BOUND_FLOPS_PER_BYTE * spec.moved_bytes


def _rate(work_and_seconds: Iterable[tuple[int, float]], *, at_least: int) -> float:
    rates = [(work, work / seconds) for work, seconds in work_and_seconds if work]
    large = [rate for work, rate in rates if work >= at_least]
    if large:
        return statistics.median(large)
    return max((rate for _, rate in rates), default=float("inf"))


_SHORT_LINKS, _LONG_LINKS = 5, 15
_SECONDS = 0.1
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 40
_MOST_TOUCHED_BYTES = 8 * 2**20
"""Touch at most this much memory between two timed ops to cool the caches. With 16 MiB, the time for an op was up to twice as
long, and nearer to the time in a real step, but measuring took too long.
"""


def measure_engine(trace: Trace) -> EngineOverhead:
    """Measure the host seconds that the engine (the code that runs plans) adds between ops like the ops of ``trace``, and
    return them. They are zeros if regions cannot be managed now.

    That happens if other code's hooks on saved tensors are active around the call. Random state and modes do not change.
    """
    with torch.enable_grad():
        return _measure(_touched_bytes(trace), torch.device("cpu" if _is_cpu(trace) else trace.device))


def _touched_bytes(trace: Trace) -> int:
    """Return the bytes that an average op of the step moves through the host's caches. They are 0 if the step does not run on a
    CPU.
    """
    moved = [trace.specs[op.cost_key].moved_bytes for op in trace.ops if op.cost_key in trace.specs]
    if not moved or torch.device(trace.device).type != "cpu":
        return 0
    return min(sum(moved) // len(moved), _MOST_TOUCHED_BYTES)


def _measure(touched_bytes: int, device: torch.device) -> EngineOverhead:
    watch = _Stopwatch(touched_bytes)
    unmanaged, short, long = (_Model(links, watch, device) for links in (_LONG_LINKS, _SHORT_LINKS, _LONG_LINKS))
    with manage(short, _plan_for(_SHORT_LINKS)), manage(long, _plan_for(_LONG_LINKS)) as handle:
        # The first step records, the second learns backward's order of reading.
        for model in (unmanaged, short, long) * 2:
            model.take_laps()
        if not any(outcome.dropped_bytes for outcome in handle.outcomes()):
            return EngineOverhead()
        taken: dict[_Model, list[ChainLaps]] = {unmanaged: [], short: [], long: []}
        end = time.perf_counter() + _SECONDS
        for turn in range(_MOST_ROUNDS):
            if turn >= _LEAST_ROUNDS and time.perf_counter() > end:
                break
            for model, steps in taken.items():
                steps.append(model.take_laps())
    return overhead_of(taken[unmanaged], taken[short], taken[long], [value + 1 for value in _dropped(_LONG_LINKS)])


def _dropped(links: int) -> list[int]:
    """Return the indices of the links (ops of the measured chain) whose result is dropped and recomputed. They come in pairs,
    so that each second one ends the chain of ops that run again.
    """
    return [link for link in range(links - 1) if link % 4 < 2]


class _Stopwatch:
    """Records the seconds between two calls of ``lap``. The time that it spends on touching memory to cool the caches is not
    counted.
    """

    def __init__(self, touched_bytes: int) -> None:
        self.laps: list[float] = []
        self._memory = np.zeros(touched_bytes // 8)
        self._since = 0.0

    def lap(self, *_: Any) -> None:
        self.laps.append(time.perf_counter() - self._since)
        self.go()

    def go(self) -> None:
        self._memory += 1.0
        self._since = time.perf_counter()


class _Chain(nn.Module):
    """A module that runs a chain of small ops; each op saves its input. The time is taken before and after each op, in forward
    and in backward.
    """

    def __init__(self, links: int, watch: _Stopwatch) -> None:
        super().__init__()
        self._links = range(links)
        self._watch = watch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in self._links:
            self._watch.lap()
            x = x.sin()
            x.register_hook(self._watch.lap)
        self._watch.lap()
        return x


class _Model(nn.Module):
    def __init__(self, links: int, watch: _Stopwatch, device: torch.device) -> None:
        super().__init__()
        self.chain = _Chain(links, watch)
        self._links = links
        self._watch = watch
        self._start = torch.ones(1, dtype=torch.float32, device=device, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.chain(x)
        return out

    def take_laps(self) -> ChainLaps:
        """Run one step of the measured chain of small ops, and return the seconds of each part (lap) of it."""
        watch, links = self._watch, self._links
        watch.laps = []
        # Not a leaf: torch.utils.module_tracker (if the user runs it) puts hooks on a module's inputs, and those raise for
        # leaves under autograd.grad.
        start = self._start.clone()
        watch.go()
        out = self(start)
        watch.lap()
        torch.autograd.grad(out, start)
        watch.lap()
        entry, *forward = watch.laps[: links + 1]
        exit_, _, *backward = watch.laps[links + 1 :]  # the second lap is the start of autograd
        return ChainLaps(
            entry_seconds=entry,
            forward_seconds=tuple(forward),
            exit_seconds=exit_,
            backward_seconds=tuple(reversed(backward)),
        )


def _plan_for(links: int) -> Plan:
    decisions = tuple(
        ValueDecision(value=f"sin#{link}", decision=Decision.RECOMPUTE, bytes=4) for link in _dropped(links)
    )
    region = RegionPlan(name="chain", call=0, kind="chain", decisions=decisions, retained_bytes=0, replay_seconds=0.0)
    nowhere = Peak(moment="", bytes=0, holders=())
    return Plan(
        status=Status.FEASIBLE,
        strategy="chain",
        model="chain",
        fingerprint="",
        signature="",
        device="cpu",
        cost_source=CostSource.MEASURED,
        cost_device="cpu",
        budget_bytes=None,
        floor_bytes=0,
        baseline_peak_bytes=0,
        baseline_seconds=0.0,
        predicted_peak_bytes=0,
        predicted_seconds=0.0,
        lower_bound_seconds=0.0,
        gap_of_overhead=0.0,
        gap_of_step=0.0,
        price_seconds_per_byte=0.0,
        regions=(region,),
        peak=nowhere,
        baseline_peak=nowhere,
        classes={},
    )


def overhead_of(
    unmanaged: Sequence[ChainLaps],
    short: Sequence[ChainLaps],
    long: Sequence[ChainLaps],
    rebuilt: Collection[int],
) -> EngineOverhead:
    """Compute the seconds that the engine (the code that runs plans) adds, from the laps (timed parts) of several steps. None
    of the results is negative.

    ``unmanaged`` are steps of a long chain of small ops without the engine; ``short`` and ``long`` are steps of a short and a
    long chain with the engine. A region takes longer to return if more was saved in it. ``rebuilt`` are the chain's ops whose
    saved tensor is rebuilt.
    """
    links = len(long[0].forward_seconds)
    kept = [link for link in range(links) if link not in rebuilt]

    def extra(of: Callable[[ChainLaps], Iterable[float]]) -> float:
        return _typical(long, of) - _typical(unmanaged, of)

    pack = extra(lambda laps: laps.forward_seconds)
    unpack = extra(lambda laps: [laps.backward_seconds[link] for link in kept])
    rebuild = extra(lambda laps: [laps.backward_seconds[link] for link in rebuilt])
    entry = extra(lambda laps: [laps.entry_seconds])
    exit_ = extra(lambda laps: [laps.exit_seconds])
    exits = [_typical(steps, lambda laps: [laps.exit_seconds]) for steps in (short, long)]
    closing = max(0.0, exits[1] - exits[0]) / (links - len(short[0].forward_seconds))
    return EngineOverhead(
        region_seconds=max(0.0, entry + exit_ - closing * links),
        slot_seconds=max(0.0, pack + unpack) + closing,
        replay_seconds=max(0.0, rebuild - unpack),
        host_op_seconds=_typical(
            unmanaged,
            lambda laps: map(sum, zip(laps.forward_seconds, laps.backward_seconds, strict=True)),
        )
        / _OPS_PER_LINK,
    )


def faster_half_median(samples: Sequence[float]) -> float:
    """Return the median of the faster half of ``samples``: disturbances only ever make a measurement of seconds longer."""
    return statistics.median(sorted(samples)[: (len(samples) + 1) // 2])


def _typical(steps: Sequence[ChainLaps], of: Callable[[ChainLaps], Iterable[float]]) -> float:
    """Return the typical seconds of one kind of laps (timed ops of the measured chain).

    For each lap, take the median over the faster half of the steps, and then the mean over the laps.
    """
    return statistics.fmean(map(faster_half_median, zip(*map(of, steps), strict=True)))
