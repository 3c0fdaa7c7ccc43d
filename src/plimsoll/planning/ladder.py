"""A ladder of plans for one family of steps: for each batch, the cheapest plan that fits is known before the batch runs.

A *family* is the same step at many batch sizes. A *rung* is one plan of the ladder.

The planner solves a few plans between the lowest peak and the unmanaged (without a plan) peak of the largest known step. Their
decisions name values, and every batch size has the same values. So each plan can be followed at every size, and its memory
there is known to the byte (see ``peaks``): a short batch takes the rung that keeps everything, a long batch takes a rung that
drops more.

Known weakness: a plan solved for exactly one batch may be slightly cheaper than the next rung.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic

import msgspec

from plimsoll.artifacts.plan import Plan
from plimsoll.planning.decisions import write_plan
from plimsoll.planning.family import S
from plimsoll.planning.peaks import Forecast, ShapedPlan, ShapedPlans, ShapedStep
from plimsoll.planning.replay_schedule import Unreachable
from plimsoll.planning.solve import Planner
from plimsoll.planning.spare_bytes import spread_bytes

_MOST_KNOWN = 4096
"""The forecasts of at most this many batch shapes are cached. There can be a hundred thousand pairs of lengths."""


def rungs_of(planner: Planner) -> Iterator[Plan]:
    """Yield those plans of a planner that no other plan beats in both peak and seconds. The fastest plan comes first.

    A plan object is made only when the iterator reaches it, because this takes time.
    """
    lowest_bytes = math.inf
    for simulation in sorted(planner.ladder, key=lambda s: (s.seconds, s.peak_bytes)):
        if simulation.peak_bytes < lowest_bytes:
            lowest_bytes = simulation.peak_bytes
            prices = planner.region_prices(planner.window_prices(simulation, simulation.peak_bytes))
            written = write_plan(simulation, planner.baseline, "auto", prices)
            floor_bytes = min(planner.floor.peak_bytes, simulation.peak_bytes)
            in_flight = math.ceil(planner.index.waiting) + 1
            yield msgspec.structs.replace(written, floor_bytes=floor_bytes, in_flight=in_flight)


@dataclass(frozen=True, slots=True)
class Rung:
    """Data: a rung, that is one plan of a ladder, and coefficients that give the plan's memory and time at any batch shape."""

    plan: Plan
    shaped: ShapedPlan
    larger_bytes: int
    """How many bytes more another batch of the same shape may need, because of its values."""


class Ladder(Generic[S]):
    """Several plans (rungs) for the batch shapes of one family of steps, with the memory and time of each at any shape.

    A plan that cannot be followed in this family (one step at many batch sizes) is left out.
    """

    def __init__(self, step: ShapedStep[S], plans: Iterable[Plan]) -> None:
        self.step = step
        self._rungs: list[Rung] = []
        self._known: dict[S, tuple[Forecast, ...]] = {}
        self._waiting = list(plans)
        """Plans that are not rungs (plans of the ladder) yet. They become rungs on first use, because a ladder (plans with
        falling peaks) may be replaced before its first use if a trace is added to its family.
        """
        self._all = ShapedPlans(())

    def extend(self, plans: Iterable[Plan]) -> None:
        """Add more plans to the ladder. They become rungs (plans whose memory is known at any shape) on first use."""
        self._waiting += plans
        self._known.clear()

    def at(self, shape: S) -> tuple[Forecast, ...]:
        """Return one forecast (memory and time) for each plan of the ladder at a batch shape that the family knows."""
        if shape not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[shape] = self._all.at(self.step.terms_at(shape)) if self.rungs else ()
        return self._known[shape]

    @property
    def rungs(self) -> list[Rung]:
        """The rungs: the plans that can be followed in this family, with their memory and time at any batch shape.

        If no plan can be followed, the only rung is the first plan without its decisions.
        """
        for plan in self._waiting:
            with contextlib.suppress(Unreachable):
                self._rungs.append(Rung(plan, self.step.under(plan.regions), spread_bytes(plan)))
        if self._waiting:
            if not self._rungs:
                self._rungs.append(Rung(msgspec.structs.replace(self._waiting[0], regions=()), self.step.under(()), 0))
            self._waiting = []
            self._all = ShapedPlans([rung.shaped for rung in self._rungs])
        return self._rungs

    def fitting(self, shape: S, room_bytes: int) -> list[tuple[Plan, Forecast]]:
        """Return a list of (plan, forecast) with the ladder's plans that fit ``room_bytes`` at a batch shape.

        Only forward and backward have to fit; the optimizer's step does not count. If some plans also have room for
        the larger bytes of other batches of this shape, only these are returned.
        """
        rungs = list(zip(self.rungs, self.at(shape), strict=True))
        fitting = [(rung, forecast) for rung, forecast in rungs if forecast.before_optimizer_bytes <= room_bytes]
        for_all = [each for each in fitting if each[1].before_optimizer_bytes + each[0].larger_bytes <= room_bytes]
        return [(rung.plan, forecast) for rung, forecast in for_all or fitting]

    def cheapest(self, shape: S, room_bytes: int) -> tuple[Plan, Forecast] | None:
        """Return the ladder's fastest plan that fits ``room_bytes`` at this shape, with its forecast; ``None`` if no plan fits.

        Only forward and backward have to fit; the optimizer's step does not count.
        """
        return min(self.fitting(shape, room_bytes), key=lambda rung: rung[1].seconds, default=None)

    def lowest(self, shape: S) -> tuple[Plan, Forecast]:
        """Return the ladder's plan with the lowest peak of forward and backward at this shape, with its forecast."""
        place, forecast = min(enumerate(self.at(shape)), key=lambda entry: entry[1].before_optimizer_bytes)
        return self.rungs[place].plan, forecast
