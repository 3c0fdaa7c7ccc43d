"""Laps around the links of a small chain of ops, with the engine at work and without it, in; what the engine adds out.

Each link is one small op that saves its input, so a lap is one op and what the engine does around it. Of every lap the
median over the faster half of the steps is taken, as of traced ops, so that pauses of the machine do not count. Whoever may
run the engine takes the laps; this stage only reads them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

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


def overhead_of(
    unmanaged: Sequence[ChainLaps],
    short: Sequence[ChainLaps],
    long: Sequence[ChainLaps],
    rebuilt: Collection[int],
) -> EngineOverhead:
    """Tell the engine's seconds from the laps of some steps; none is negative.

    Args:
        unmanaged: steps of the long chain without the engine.
        short: managed steps of a chain with fewer links: a region returns the later, the more was saved in it.
        long: managed steps of the long chain.
        rebuilt: links of the managed chains whose saved tensor is rebuilt.
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
