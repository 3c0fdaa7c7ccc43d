"""A trace that ran on a real device in, seconds of every op out: the median of the faster half of them, with their spread.

The faster half, because an op to which the system gives fresh memory waits for its pages: on a virtual machine up to five
times as long as it computes, in the first run after memory went back to the system. What a plan has run again takes memory
that backward has just let go, and waits for nothing.

Ops without samples (an optimizer step is traced fake, so that the model stays as it was) get a roofline whose bandwidth,
arithmetic rate and launch time are fitted to the ops that do have samples: `fit_roofline`. Such ops have a spread as large
as the fit's own typical error.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from plimsoll.artifacts.costs import Costs, CostSource, OpCost
from plimsoll.artifacts.trace import OpSpec, Trace
from plimsoll.planning.costing.engine_overhead import EngineOverhead, faster_half_median

_COMPUTE_BOUND_FLOPS_PER_BYTE = 8.0
"""Above it an op is taken to be bound by arithmetic; between 5 (slow f32) and 300 (bf16 on an H100) on real devices."""
_LARGE_BYTES = 2**18
"""Ops that move less say more about launches than about bandwidth."""
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

    A plan's extra seconds are those of the ops that it runs again, plus ``engine`` for every region that it touches.

    Args:
        trace: a trace with ``timings``; a fake one has none and needs ``roofline_costs``.
        engine: what the engine was measured to take on this host.
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

    Known weakness: not yet compared with a GPU; a step of which a part is bound by launches counts as what most of it is.
    """
    if trace.device.partition(":")[0] == "cpu":
        return False
    device_seconds = sum(ops[op.cost_key].seconds for op in trace.ops if op.cost_key in ops)
    return device_seconds > len(trace.ops) * engine.host_op_seconds


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
    return FittedRoofline(
        bytes_per_second=fit.bytes_per_second,
        flops_per_second=fit.flops_per_second,
        launch_seconds=fit.launch_seconds,
        relative_error=statistics.median(errors),
    )


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
