"""A traced and costed step and what is allowed in, a planner that knows the forms of values (where they are wanted) out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.pipeline.allowance import Allowance
from plimsoll.pipeline.confirm import Gradients
from plimsoll.pipeline.forms import sense_forms
from plimsoll.planning.lowest import find_extremes
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.strategies import codecs_of_strategy
from plimsoll.verification.step import TrainingStep


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes plans of one step. ``gradients`` are the unmanaged ones, where lossy plans have to be compared with them."""

    trace: Trace
    costs: Costs
    allowance: Allowance
    planner: Planner
    gradients: Gradients | None = None

    def solve(
        self,
        budget_bytes: int | None,
        strategy: str = "auto",
        *,
        excess_bytes: int = 0,
        error_scale: float = 1.0,
        raise_below_floor: bool = True,
    ) -> Plan:
        """A plan for a budget.

        Args:
            budget_bytes: ``None`` for as much as it takes.
            strategy: as for ``plimsoll.plan``.
            excess_bytes: taken off the budget.
            error_scale: how many times larger than expected errors are.
            raise_below_floor: whether a budget that cannot be met is an error.
        """
        made = solve(
            self.trace,
            self.costs,
            budget_bytes=budget_bytes,
            strategy=strategy,
            excess_bytes=excess_bytes,
            raise_below_floor=raise_below_floor,
            planner=self._planner_for(strategy, error_scale),
        )
        notes = made.notes
        if self.allowance.wants_forms and not self.planner.index.forms.regions:
            notes = (*notes, "Nothing is compressed or offloaded although it was allowed: everything fits as it is.")
        return msgspec.structs.replace(self.allowance.written_into(made), notes=notes)

    def _planner_for(self, strategy: str, error_scale: float) -> Planner:
        if codecs_of_strategy(strategy):
            return self.planner.heedless_of_error()
        limits = self.allowance.limits(error_scale)
        return self.planner if strategy != "auto" or limits == self.planner.limits else self.planner.relimited(limits)


def make_maker(
    trace: Trace,
    costs: Costs,
    allowance: Allowance,
    budget_bytes: int | None,
    step: Callable[[], TrainingStep],
    report: Callable[[str, float], None],
) -> Maker:
    """Build the planner of a step; where other forms are allowed and needed, run it once to see which there are.

    Args:
        trace: the step.
        costs: seconds of its ops.
        allowance: what plans may do.
        budget_bytes: where everything fits, other forms are not looked for.
        step: makes the step that is run.
        report: told the stage and the share done.
    """
    extremes = find_extremes(trace, costs)
    fits = budget_bytes is not None and budget_bytes >= extremes.unmanaged_peak_bytes
    if not allowance.wants_forms or (fits and not allowance.insists_on_forms):
        report("solving", 0.0)
        overrides = allowance.overrides_without_forms
        planner = Planner(trace, costs, overrides=overrides, may_recompute=allowance.may_recompute)
        return Maker(trace, costs, allowance, planner)
    report("trying codecs and links", 0.0)
    sensed = sense_forms(step(), trace, costs, extremes.lowest, allowance)
    report("solving", 0.4)
    planner = Planner(
        trace,
        costs,
        forms=sensed.forms,
        overrides=allowance.overrides,
        limits=allowance.limits(),
        may_recompute=allowance.may_recompute,
    )
    return Maker(trace, costs, allowance, planner, sensed.gradients if allowance.wants_lossy else None)
