"""A trace in, what the engine itself costs on this host out: small real regions run under it, in a few tenths of a second.

The engine is Python. Between ops that have gone through megabytes it runs from cold caches and takes several times as long as
in a tight loop, so between two links of the chain that is measured as many bytes are touched as an op of the step moves.
On other devices than the CPU the host's caches stay warm.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn

from plimsoll.artifacts.costs import CostSource
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.plan import Peak, Plan, RegionPlan, ValueDecision
from plimsoll.artifacts.trace import Trace
from plimsoll.planning.costing.engine_overhead import ChainLaps, EngineOverhead, overhead_of
from plimsoll.session.manage import manage

_SHORT_LINKS, _LONG_LINKS = 5, 15
_SECONDS = 0.25
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 40
_MOST_TOUCHED_BYTES = 8 * 2**20
"""More takes long, and tells little more: most of the caches are cold."""


def measure_engine(trace: Trace) -> EngineOverhead:
    """Host seconds of the engine beside ops like those of ``trace``; zeros where regions cannot be managed just now.

    That is where somebody else's hooks on saved tensors are at work around the call. Random state and modes stay as they are.
    """
    with torch.enable_grad():
        return _measure(_touched_bytes(trace))


def _touched_bytes(trace: Trace) -> int:
    """Bytes that one op of the step moves on average through the host's caches."""
    moved = [trace.specs[op.cost_key].moved_bytes for op in trace.ops if op.cost_key in trace.specs]
    if not moved or torch.device(trace.device).type != "cpu":
        return 0
    return min(sum(moved) // len(moved), _MOST_TOUCHED_BYTES)


def _measure(touched_bytes: int) -> EngineOverhead:
    watch = _Stopwatch(touched_bytes)
    unmanaged, short, long = (_Model(links, watch) for links in (_LONG_LINKS, _SHORT_LINKS, _LONG_LINKS))
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
    def __init__(self, links: int, watch: _Stopwatch) -> None:
        super().__init__()
        self.chain = _Chain(links, watch)
        self._links = links
        self._watch = watch
        self._start = torch.ones(1, dtype=torch.float32, device="cpu", requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.chain(x)
        return out

    def take_laps(self) -> ChainLaps:
        """One step."""
        watch, links = self._watch, self._links
        watch.laps = []
        watch.go()
        out = self(self._start)
        watch.lap()
        torch.autograd.grad(out, self._start)
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
