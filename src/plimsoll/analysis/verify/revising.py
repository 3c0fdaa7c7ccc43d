"""Checks on its device a plan that was made without the device, and makes a new plan if the predictions were wrong.

Such a plan was made with costs from a roofline. Here the step is traced and timed on the device. If the plan's peak or time is
wrong, the plan is solved again with the measured costs, run until it keeps to its budget, and verified like any other plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from plimsoll.artifacts.costs import Costs, CostSource
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress, part_of
from plimsoll.artifacts.receipt import Claim, Confirmation, Receipt
from plimsoll.artifacts.trace import Category, Phase, Trace
from plimsoll.errors import BudgetBelowFloor, UnknownDevice
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import optimizer_seconds, roofline_costs
from plimsoll.session.agreement import Agreement
from plimsoll.session.options import PlanOptions
from plimsoll.session.step_planner import StepPlanner, trace_and_cost
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import TrainingStep
from plimsoll.units import format_bytes


def needs_confirmation(plan: Plan) -> bool:
    """Whether the plan's costs were computed by a roofline model, so that they were not measured on a device."""
    return plan.cost_source is CostSource.ROOFLINE


@dataclass(frozen=True, slots=True)
class Reviser:
    """Confirms on the device a plan that was made elsewhere, and revises it if its predictions are wrong.

    ``verify`` is the function that makes the receipt (the evidence) for a revised plan.
    """

    task: TrainingTask
    step: TrainingStep
    agreement: Agreement
    report: Progress
    verify: Callable[[Plan], Receipt]

    def confirm(self, plan: Plan, receipt: Receipt) -> Receipt:
        """Return the receipt (the evidence for a plan) with a comparison of predictions and measurements added.

        If the predictions are wrong, a revised plan is added too.

        Args:
            plan: the plan from elsewhere.
            receipt: of this plan, measured on this device.
        """
        self.report("timing every op on the device", 0.0)
        with self.agreement.stepping():
            names = tuple(dict.fromkeys(region.name for region in plan.regions if region.name))
            options = PlanOptions(regions=names or None, tiles=plan.tiles)
            traced, costs = trace_and_cost(self.task, options, part_of(self.report, 0.0, 0.4))
        found = Confirmation(
            cost_device=plan.cost_device,
            budget_bytes=plan.budget_bytes,
            given=_claim(plan, receipt, _roofline_optimizer_seconds(plan, traced)),
        )
        revised: Plan | None = None
        if not self.agreement.every("confirmation", holds=found.is_confirmed):
            obstacle = self._obstacle(plan)
            try:
                revised = None if obstacle else self._solve(plan, traced, costs)
            except BudgetBelowFloor as error:
                obstacle = f"{error.found} {error.why}"
            found = msgspec.structs.replace(found, obstacle=obstacle)
        if revised is None:
            return msgspec.structs.replace(receipt, confirmation=found)
        self.report("verifying the revised plan", 0.7)
        checked = self.verify(revised)
        found = msgspec.structs.replace(
            found,
            revised=_claim(revised, checked, optimizer_seconds(traced, costs)),
            revised_verdict=checked.verdict.value,
        )
        return msgspec.structs.replace(receipt, confirmation=found, revised_plan=revised)

    def _solve(self, plan: Plan, traced: Trace, costs: Costs) -> Plan:
        """Return a new plan for the same budget, solved with measured costs.

        It is run, and solved again, until its measured peak is within the budget.
        """
        options = replace(PlanOptions.read(strategies=plan.strategy, allow=plan.allow), tiles=plan.tiles)
        planner = StepPlanner(traced, costs, options, plan.budget_bytes, self.agreement)
        planner.try_forms(lambda: self.step)
        self.report("solving with measured costs", 0.4)
        return planner.plan(plan.strategy, lambda: self.step, part_of(self.report, 0.5, 0.7))

    def _obstacle(self, plan: Plan) -> str:
        """Return a text that says why the plan cannot be made again with measured costs; empty if it can."""
        state_bytes = plan.classes.get(Category.OPTIMIZER_STATE, 0)
        if state_bytes and self.task.optimizer is None:
            return (
                f"the plan counts {format_bytes(state_bytes)} of optimizer state, but verify was called without an optimizer: "
                "pass optimizer= to solve the plan again"
            )
        return ""


def _roofline_optimizer_seconds(plan: Plan, traced: Trace) -> float:
    """Return the seconds that the plan's roofline predicted for the optimizer's step.

    They are 0 if the plan was made without an optimizer. Verification does not run the optimizer, so these seconds are
    subtracted before times are compared.
    """
    if not plan.classes.get(Category.OPTIMIZER_STATE, 0) and Phase.OPTIMIZER not in {p.phase for p in plan.timeline}:
        return 0.0
    try:
        device = find_device(plan.cost_device)
    except UnknownDevice:  # this version lacks that profile: the plan's timeline says where the optimizer starts
        starts = [p.unmanaged_seconds for p in plan.timeline if p.phase == Phase.OPTIMIZER]
        return plan.baseline_seconds - starts[0] if starts and starts[0] is not None else 0.0
    return optimizer_seconds(traced, roofline_costs(traced, device))


def _claim(plan: Plan, receipt: Receipt, without_seconds: float) -> Claim:
    measured_peaks = (receipt.measured_peak_bytes or 0, receipt.measured_recording_peak_bytes or 0)
    return Claim(
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=max(measured_peaks),
        predicted_seconds=plan.predicted_seconds - without_seconds,
        measured_seconds=receipt.measured_seconds or 0.0,
        measured_spread_seconds=receipt.measured_spread_seconds,
    )
