"""A traced and costed step and what is allowed in, a planner that knows the forms of values (where they are wanted) out.

On several ranks one of them plans for all: the tightest, whose budget lies lowest beside what its step takes without a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress
from plimsoll.artifacts.trace import Trace
from plimsoll.planning.lowest import find_extremes
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.strategies import codecs_of_strategy
from plimsoll.session.agreement import Agreement
from plimsoll.session.allowance import Allowance
from plimsoll.session.confirm import Gradients, Trial
from plimsoll.session.forms import Sensed, sense_forms
from plimsoll.session.tightest_rank import Frame, SharedTrial, find_frame
from plimsoll.session.training_step import TrainingStep


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes plans of one step, on the rank that plans; the others get them from there.

    ``gradients`` are the unmanaged ones, where lossy plans have to be compared with them.
    """

    trace: Trace
    costs: Costs
    allowance: Allowance
    frame: Frame
    planner: Planner | None
    gradients: Gradients | None = None

    @property
    def budget_bytes(self) -> int | None:
        """The budget of the rank that plans."""
        return self.frame.budget_bytes

    def trial(self, step: TrainingStep) -> SharedTrial:
        """How plans of this maker are run."""
        return SharedTrial(Trial(step, self.gradients), self.frame)

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

        Raises:
            BudgetBelowFloor: nothing fits.
        """

        def make() -> Plan:
            assert self.planner is not None
            return self._solve(
                self._planner_for(self.planner, strategy, error_scale),
                budget_bytes,
                strategy,
                excess_bytes=excess_bytes,
                raise_below_floor=raise_below_floor,
            )

        return self.frame.agreement.made_by(self.frame.planner, f"solving {strategy}", make)

    def _solve(
        self,
        planner: Planner,
        budget_bytes: int | None,
        strategy: str,
        *,
        excess_bytes: int,
        raise_below_floor: bool,
    ) -> Plan:
        made = solve(
            self.trace,
            self.costs,
            budget_bytes=budget_bytes,
            strategy=strategy,
            excess_bytes=excess_bytes,
            raise_below_floor=raise_below_floor,
            planner=planner,
        )
        made = self.frame.written_into(made)
        notes = made.notes
        if self.allowance.wants_forms and not planner.index.forms.regions:
            notes = (*notes, "Nothing is compressed or offloaded although it was allowed: everything fits as it is.")
        return msgspec.structs.replace(self.allowance.written_into(made), notes=notes)

    def _planner_for(self, planner: Planner, strategy: str, error_scale: float) -> Planner:
        if codecs_of_strategy(strategy):
            return planner.heedless_of_error()
        limits = self.allowance.limits(error_scale)
        return planner if strategy != "auto" or limits == planner.limits else planner.relimited(limits)


def make_maker(
    trace: Trace,
    costs: Costs,
    allowance: Allowance,
    budget_bytes: int | None,
    step: Callable[[], TrainingStep],
    report: Progress,
    agreement: Agreement | None = None,
) -> Maker:
    """Build the planner of a step; where other forms are allowed and needed, run it once to see which there are.

    Args:
        trace: the step.
        costs: seconds of its ops.
        allowance: what plans may do.
        budget_bytes: of this rank; where everything fits on all ranks, other forms are not looked for.
        step: makes the step that is run.
        report: told the stage and the share done.
        agreement: with the ranks that plan the same step; ``None``: this process alone.
    """
    agreement = agreement or Agreement(None, "plan")
    trace = allowance.opened(trace)
    extremes = find_extremes(trace, costs)
    frame = find_frame(agreement, extremes.unmanaged_peak_bytes, budget_bytes)
    fits = budget_bytes is not None and budget_bytes >= extremes.unmanaged_peak_bytes
    sensed: Sensed | None = None
    if allowance.wants_forms and not (agreement.every("budgets", holds=fits) and not allowance.insists_on_forms):
        report("trying codecs and links", 0.0)
        with agreement.stepping():
            sensed = sense_forms(step(), trace, costs, extremes.lowest, allowance)
    report("solving", 0.0 if sensed is None else 0.4)
    planner = _planner(trace, costs, allowance, sensed) if frame.planner == agreement.rank else None
    gradients = sensed.gradients if sensed is not None and allowance.wants_lossy else None
    return Maker(trace, costs, allowance, frame, planner, gradients)


def _planner(trace: Trace, costs: Costs, allowance: Allowance, sensed: Sensed | None) -> Planner:
    if sensed is None:
        overrides = allowance.overrides_without_forms
        return Planner(trace, costs, overrides=overrides, may_recompute=allowance.may_recompute)
    return Planner(
        trace,
        costs,
        forms=sensed.forms,
        overrides=allowance.overrides,
        limits=allowance.limits(),
        may_recompute=allowance.may_recompute,
    )
