"""A simulated step in, what is alive at any instant of it, and what replays make in each region, out."""

from __future__ import annotations

from dataclasses import replace as replaced

from plimsoll.artifacts.explained import RecomputedPart
from plimsoll.artifacts.plan import Holder
from plimsoll.artifacts.trace import Phase, Trace
from plimsoll.planning.describe import describe_peak
from plimsoll.planning.replay import replay
from plimsoll.planning.simulate import Simulation, chains, links_of, run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.what_if.chunked import with_chunked_loss
from plimsoll.planning.what_if.head import find_head


def holders_at(simulation: Simulation, instant: int) -> tuple[Holder, ...]:
    """Who is alive at an instant, largest first."""
    return describe_peak(replaced(simulation, peak_instant=instant)).holders


def forward_end(trace: Trace) -> int:
    """The tick of the first op of backward."""
    ticks = (tick for tick, op in enumerate(trace.ops) if op.phase is not Phase.FORWARD)
    return next(ticks, len(trace.ops))


def rebuilt_parts(simulation: Simulation) -> tuple[RecomputedPart, ...]:
    """What replays hold in every region that has one: rebuilt values at their highest, and the ops that run again."""
    index = simulation.index
    linked = links_of(index, simulation.choices)
    parts = []
    for chain in chains(index, simulation.choices, linked):
        outcome = replay(index, chain, linked)
        if outcome.ops:
            parts.append(
                RecomputedPart(
                    place=index.views[min(chain)].call.name,
                    most_bytes=max((bytes_ for _, bytes_ in outcome.levels), default=0),
                    ops=len(outcome.ops),
                )
            )
    return tuple(parts)


def peak_with_chunked_loss(simulation: Simulation) -> int | None:
    """The peak under the same choices with the loss computed in chunks; ``None`` where that cannot be told.

    There has to be a head with a loss over classes, and the choices have to be made among what a plain index offers.
    """
    before = simulation.index
    head = find_head(before.trace)
    if head is None:
        return None
    chunked = with_chunked_loss(before.trace, head)
    index = StepIndex(chunked, before.costs, before.forms, in_flight=before.waiting + 1)
    if any(view.decided != other.decided for view, other in zip(index.views, before.views, strict=True)):
        return None
    return run_choices(index, simulation.choices).peak_bytes
