"""Estimates a step that was planned outside of PyTorch on a device of the catalogue, and finds the largest batch that fits.

Parameters, gradients, the optimizer's state and the batch are counted exactly. Temporaries are counted by the framework on
*this* machine. The compiler or allocator of another device decides differently, so the figure has a wide error. Seconds come
from the roofline model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.estimate import BudgetItem, Estimate, StageEstimate, StageSeconds, Throughput
from plimsoll.artifacts.fit import Fit, FitPoint
from plimsoll.artifacts.job import Layout, ModelFacts
from plimsoll.artifacts.plan import Holder, Peak, Plan
from plimsoll.artifacts.trace import Phase
from plimsoll.errors import BudgetBelowFloor
from plimsoll.estimator.budget import COUNTED_ERROR, framework_items
from plimsoll.integrations.search import PlanSearch
from plimsoll.planning.costing.devices import find_device
from plimsoll.units import check_count, format_bytes, parse_budget

_TEMPORARY_ERROR = 0.6
"""The relative error of the temporaries.

It is assumed: the planner's own model of fusion, made from the same jaxpr, was 15 to 59% below XLA for CPUs.
"""
_SECONDS_ERROR = 0.3


@dataclass(frozen=True, kw_only=True)
class FixedSizes:
    """Data: the bytes of a training step that do not depend on the plan.

    ``count`` is the number of parameters, and ``rows`` the number of samples in a batch.
    """

    parameters: int
    gradients: int
    state: int
    batch: int
    count: int
    rows: int

    @property
    def total(self) -> int:
        """The bytes of parameters, gradients, optimizer state and batch together."""
        return self.parameters + self.gradients + self.state + self.batch

    def room_in(self, budget_bytes: int) -> int:
        """Return how many bytes are left for temporaries, if the budget is for everything.

        Raises:
            BudgetBelowFloor: nothing is left.
        """
        if self.total >= budget_bytes:
            raise BudgetBelowFloor(
                f"budget {format_bytes(budget_bytes)} is below what a plan cannot reduce, {format_bytes(self.total)}.",
                why="parameters, gradients, optimizer state and batch stay in memory even if everything is recomputed",
                next="use a smaller model or optimizer state, or a device with more memory",
            )
        return budget_bytes - self.total


class Plannable(Protocol):
    """The interface of a training step of any framework (JAX, Keras, TensorFlow) that can be planned.

    ``flops`` are those of forward and backward, in products of ``dtype``. ``counted_by`` says what counts temporaries.
    """

    name: str
    search: PlanSearch
    counted_by: str

    @property
    def flops(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    def plan(self, budget: int | str | None) -> Plan:
        """Return the fastest plan within a budget for temporaries."""
        ...

    def unmanaged_taken(self) -> int:
        """Return the bytes of temporaries of the step without a plan."""
        ...


def estimate_step(
    step: Plannable, sizes: FixedSizes, *, device: str, optimizer: str, budget: str | int | None, started: float
) -> Estimate:
    """Estimate a training step: its memory item by item, and its speed.

    Args:
        step: the step, whose seconds come from the roofline of the device.
        sizes: the bytes that do not depend on the plan.
        device: the name of a device from the catalogue.
        optimizer: the name of the optimizer.
        budget: if given, the step is planned to fit into these bytes, which cover everything.
        started: the time when the work began, by ``time.monotonic``.
    """
    unmanaged = step.unmanaged_taken()
    limit = None if budget is None else parse_budget(budget)
    plan = None if limit is None or unmanaged + sizes.total <= limit else step.plan(sizes.room_in(limit))
    stage = _stage(step, sizes, unmanaged, plan, device)
    seconds = stage.seconds.forward_seconds + stage.seconds.backward_seconds + stage.seconds.recompute_seconds
    found = find_device(device)
    return Estimate(
        target=step.name,
        model=step.name,
        device=found.name,
        device_bytes=found.memory_bytes,
        precision="as its arrays",
        optimizer=optimizer,
        strategy="none" if plan is None else "auto",
        budget_bytes=limit,
        layout=Layout(),
        facts=ModelFacts(
            name=step.name, architecture=step.search.meter.framework, batch=sizes.rows, parameters=sizes.count
        ),
        stages=(stage,),
        throughput=Throughput(
            step_seconds=seconds,
            samples_per_second=sizes.rows / seconds if seconds else 0.0,
            tokens_per_second=None,
            mfu=step.flops / seconds / found.flops_per_second(step.dtype) if seconds else None,
            relative_error=_SECONDS_ERROR,
            basis=Basis.MODELLED,
            note="forward and backward by the roofline model; without the optimizer's step",
        ),
        notes=("The number of samples is the size of the batch's first array.",),
        total_seconds=time.monotonic() - started,
    )


def _stage(step: Plannable, sizes: FixedSizes, unmanaged: int, plan: Plan | None, device: str) -> StageEstimate:
    taken = unmanaged if plan is None else plan.predicted_peak_bytes
    exact = {
        "parameters": sizes.parameters,
        "gradients": sizes.gradients,
        "optimizer state": sizes.state,
        "batch": sizes.batch,
    }
    items = [
        BudgetItem(name=name, bytes=bytes_, relative_error=COUNTED_ERROR, basis=Basis.EXACT)
        for name, bytes_ in exact.items()
        if bytes_
    ]
    note = f"{step.counted_by}; on another device the number can differ"
    items.append(
        BudgetItem(name="temporaries", bytes=taken, relative_error=_TEMPORARY_ERROR, basis=Basis.ASSUMED, note=note)
    )
    # Workspaces of cuBLAS belong to torch only.
    outside = tuple(each for each in framework_items(find_device(device), Layout()) if each.name != "cuBLAS workspaces")
    allocated = sizes.total + taken
    holders = tuple(Holder(label=each.name, bytes=each.bytes or 0) for each in items)
    spent = dict.fromkeys(Phase, 0.0)
    traced = step.search.step
    for op in traced.trace.ops:
        spent[op.phase] += traced.costs.ops[op.cost_key].seconds
    return StageEstimate(
        stage=0,
        ranks=1,
        regions=step.name,
        in_flight=1,
        items=(*items, *outside),
        allocated_bytes=allocated,
        reserved_bytes=None,
        unmanaged_bytes=sizes.total + unmanaged,
        recomputed_bytes=sizes.total + min([*step.search.measured.values(), taken]),
        peak=Peak(moment="gradient", bytes=allocated, holders=tuple(sorted(holders, key=lambda each: -each.bytes))),
        seconds=StageSeconds(
            forward_seconds=spent[Phase.FORWARD],
            backward_seconds=spent[Phase.BACKWARD],
            weight_gradient_seconds=0.0,
            recompute_seconds=0.0 if plan is None else max(plan.predicted_seconds - plan.baseline_seconds, 0.0),
            communication_seconds=0.0,
            exposed_seconds=0.0,
            optimizer_seconds=0.0,
        ),
        bubble_share=0.0,
        plans=() if plan is None else (plan,),
    )


def fit_steps(at: Callable[[int], tuple[Plannable, FixedSizes]], budget: str | int, *, most_batch: int) -> Fit:
    """Find the batch with the most samples per second: double the batch until no plan fits, then also try the middle.

    Args:
        at: returns the step for a number of samples, and its bytes that do not depend on the plan.
        budget: the bytes of everything that a training step takes.
        most_batch: the largest batch to try.

    Raises:
        InvalidOption: ``most_batch`` is less than 1.
    """
    check_count("most_batch", most_batch, least=1)
    started, limit = time.monotonic(), parse_budget(budget)
    found: dict[int, tuple[FitPoint, Plan | None]] = {}

    def look(rows: int) -> Plannable:
        step, sizes = at(rows)
        try:
            plan = step.plan(sizes.room_in(limit))
        except BudgetBelowFloor:
            plan = None
        found[rows] = (_point(step, rows, sizes, plan), plan)
        return step

    rows, step = 1, look(1)
    while found[rows][1] is not None and 2 * rows <= most_batch:
        rows *= 2
        step = look(rows)
    if found[rows][1] is None and rows > 2:
        look(3 * rows // 4)
    looked = [found[each] for each in sorted(found)]
    usable = [number for number, (point, _) in enumerate(looked) if point.does_fit]
    best = max(usable, key=lambda number: looked[number][0].items_per_second, default=None)
    traced = step.search.step
    return Fit(
        model=step.name,
        fingerprint=traced.trace.fingerprint,
        device=traced.costs.device,
        cost_source=traced.costs.source,
        cost_device=traced.costs.device,
        budget_bytes=limit,
        items_name="samples",
        global_batch=None,
        points=tuple(point for point, _ in looked),
        best=best,
        plan=None if best is None else looked[best][1],
        seconds_basis=Basis.MODELLED,
        seconds_error=_SECONDS_ERROR,
        traces=len(looked),
        solves=len(looked),
        total_seconds=time.monotonic() - started,
        notes=(f"Temporaries: {step.counted_by}. The time of the optimizer's step is not included.",),
    )


def _point(step: Plannable, rows: int, sizes: FixedSizes, plan: Plan | None) -> FitPoint:
    base = step.search.planner.baseline.seconds
    saved = step.search.meter.unmanaged_bytes
    measured = step.search.measured.values()
    decisions = [] if plan is None else [each for region in plan.regions for each in region.decisions]
    held = sum(each.bytes for each in decisions if each.decision is Decision.KEEP)
    return FitPoint(
        micro_batch=rows,
        sequence=1,
        accumulation=1,
        status=Status.INFEASIBLE if plan is None else plan.status,
        unmanaged_peak_bytes=sizes.total + saved,
        predicted_peak_bytes=sizes.total + (min(measured, default=0) if plan is None else plan.predicted_peak_bytes),
        unmanaged_seconds=base if plan is None else plan.baseline_seconds,
        micro_seconds=base if plan is None else plan.predicted_seconds,
        optimizer_seconds=0.0,
        saved_bytes=saved,
        rebuilt_bytes=max(saved - held, 0),
        is_traced=True,
    )
