"""What the ops of a step and the engine's own work cost on this device, as far as both can be measured.

*Ops.* Seconds are the median of the faster half of an op's samples, with their spread. The faster half, because an op to which
the system gives fresh memory waits for its pages: on a virtual machine up to five times as long as it computes, in the first
run after memory went back to the system. What a plan has run again takes memory that backward has just let go, and waits for
nothing. Ops without samples (an optimizer step is traced fake, so that the model stays as it was) get a roofline whose
bandwidth, arithmetic rate and launch time are fitted to the ops that do have samples: `fit_roofline`. Such ops have a spread
as large as the fit's own typical error.

*Engine.* Small real regions run under it, in a few tenths of a second. The engine is Python. Between ops that have gone
through megabytes it runs from cold caches and takes several times as long as in a tight loop, so between two links of the
chain that is measured as many bytes are touched as an op of the step moves. On a GPU the chain runs on the GPU: a lap is what
the host takes to launch, nothing waits for the device, and the host's caches stay warm. Each link is one small op that saves
its input, so a lap is one op and what the engine does around it. The chain is run with the engine and without it, and of every
lap the median over the faster half of the steps is taken, as of traced ops.
"""

from __future__ import annotations

import os
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
from plimsoll.session.manage import manage

_COMPUTE_BOUND_FLOPS_PER_BYTE = 8.0
"""Above it an op is taken to be bound by arithmetic; between 5 (slow f32) and 300 (bf16 on an H100) on real devices."""
_LARGE_BYTES = 2**18
"""Ops that move less say more about launches than about bandwidth."""


_OPS_PER_LINK = 3
"""An op in forward, and in backward its derivative and a product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOverhead:
    """Host seconds that the engine adds to a step, beside the ops that it runs again.

    ``region_seconds``: per call of a region that it touches (signature, hooks, guard, closing the call).
    ``slot_seconds``: per tensor that autograd saves in there (pack, its place in a cell and in the guard, unpack).
    ``replay_seconds``: per op that runs again, for a recipe of one op (the call below autograd, the sentinel's sample and
    comparison of every second one; the small op itself, about a microsecond, is in it).
    ``host_op_seconds``: no cost of the engine: what the host takes for any op, to tell whether a device waits for it.
    """

    region_seconds: float = 0.0
    slot_seconds: float = 0.0
    replay_seconds: float = 0.0
    host_op_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainLaps:
    """Seconds of one step of a chain: into the region, through every link, out of the region, and back through every link.

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
    """What a device reached on the ops that were timed."""

    bytes_per_second: float
    flops_per_second: float
    launch_seconds: float
    relative_error: float
    """Median of |fitted - measured| / measured over the ops that it was fitted to."""

    def seconds(self, spec: OpSpec) -> float:
        return self.launch_seconds + max(spec.moved_bytes / self.bytes_per_second, spec.flops / self.flops_per_second)


def measured_costs(trace: Trace, engine: EngineOverhead = _NO_ENGINE) -> Costs:
    """Seconds of every op of ``trace`` on the device on which it was traced, and of the engine's own work on this host.

    A plan's extra seconds are those of the ops that it runs again, plus ``engine`` for every region that it touches. A
    fake trace has no timings and needs ``roofline_costs``.
    """
    assert trace.timings, "a fake trace has no timings: use roofline_costs"
    ops = {key: op_cost(samples) for key, samples in trace.timings.items() if samples}
    unseen = [key for key in trace.specs if key not in ops]
    if unseen:
        fit = fit_roofline(trace.specs, {key: cost.seconds for key, cost in ops.items()})
        for key in unseen:
            seconds = fit.seconds(trace.specs[key])
            ops[key] = OpCost(seconds=seconds, spread_seconds=seconds * fit.relative_error)
    if hides_host_work(trace, ops, engine):
        engine = _NO_ENGINE
    elif not _is_cpu(trace):  # the device waits for launches: an op takes as long as the host
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
    """Whether the step's ops keep a device busy for longer than the host takes to launch them, so that the host runs ahead.

    Both are measured apart: ops in seconds of the device alone (``CudaClock``), the host by a chain of small ops on the device.
    Known weakness: not yet run on a GPU; a step whose launches bind only in part counts as whole.
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
    """The median of the faster half of ``samples``, and half the distance between the quartiles of all of them."""
    if len(samples) < 2:
        return OpCost(seconds=samples[0])
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return OpCost(seconds=faster_half_median(samples), spread_seconds=(high - low) / 2)


def fit_roofline(specs: Mapping[str, OpSpec], seconds: Mapping[str, float]) -> FittedRoofline:
    """Bandwidth, arithmetic rate and launch time that the timed ops show: medians, so that odd ops do not matter.

    Where no timed op is large enough to show a rate, the fastest that any of them showed stands in for it.
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
    """Memory of ``device`` (``"cpu"``, ``"cuda:0"``), ``None`` where it cannot be told."""
    kind = device.partition(":")[0]
    if kind == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)
    if kind == "cpu" and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


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
"""More takes long, and tells little more: most of the caches are cold."""


def measure_engine(trace: Trace) -> EngineOverhead:
    """Host seconds of the engine beside ops like those of ``trace``; zeros where regions cannot be managed just now.

    That is where somebody else's hooks on saved tensors are at work around the call. Random state and modes stay as they are.
    """
    with torch.enable_grad():
        return _measure(_touched_bytes(trace), torch.device("cpu" if _is_cpu(trace) else trace.device))


def _touched_bytes(trace: Trace) -> int:
    """Bytes that one op of the step moves on average through the host's caches."""
    moved = [trace.specs[op.cost_key].moved_bytes for op in trace.ops if op.cost_key in trace.specs]
    if not moved or torch.device(trace.device).type != "cpu":
        return 0
    return min(sum(moved) // len(moved), _MOST_TOUCHED_BYTES)


def _measure(touched_bytes: int, device: torch.device) -> EngineOverhead:
    watch = _Stopwatch(touched_bytes)
    unmanaged, short, long = (_Model(links, watch, device) for links in (_LONG_LINKS, _SHORT_LINKS, _LONG_LINKS))
    with manage(short, _plan_for(_SHORT_LINKS)), manage(long, _plan_for(_LONG_LINKS)) as handle:
        for model in (unmanaged, short, long) * 2:  # to record, and to learn the order of reading
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
    """The links whose result, saved by the next one, is dropped: pairs, so that every second one ends a recipe's chain."""
    return [link for link in range(links - 1) if link % 4 < 2]


class _Stopwatch:
    """Notes what passes between two laps; what it does to the caches in between does not count."""

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
    """Small ops one after the other, each of which saves its input; a lap ends before and after every one, both ways."""

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
        """One step."""
        watch, links = self._watch, self._links
        watch.laps = []
        # No leaf: torch.utils.module_tracker, if the user runs it, puts hooks on what a module receives, and those refuse
        # leaves under autograd.grad.
        start = self._start.clone()
        watch.go()
        out = self(start)
        watch.lap()
        torch.autograd.grad(out, start)
        watch.lap()
        entry, *forward = watch.laps[: links + 1]
        exit_, _, *backward = watch.laps[links + 1 :]  # the second lap is autograd's start
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
    """Tell the engine's seconds from the laps of some steps; none is negative.

    ``unmanaged`` are steps of the long chain without the engine, ``short`` and ``long`` managed ones: a region returns
    the later, the more was saved in it. ``rebuilt`` are the links whose saved tensor is rebuilt.
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
    """The median of the faster half of ``samples``: whatever disturbs a measurement of seconds only ever adds some."""
    return statistics.median(sorted(samples)[: (len(samples) + 1) // 2])


def _typical(steps: Sequence[ChainLaps], of: Callable[[ChainLaps], Iterable[float]]) -> float:
    """The mean over laps of one kind of what each of them takes in the faster half of the steps."""
    return statistics.fmean(map(faster_half_median, zip(*map(of, steps), strict=True)))
