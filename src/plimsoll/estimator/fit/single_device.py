"""The training step of one model on one device at any micro-batch, and the best plan for it.

The step is traced where it must be, and predicted from other traces where that is possible. If this machine lacks the device, a
trace takes seconds and does not allocate memory, and three sizes per structure determine all others. On the device itself,
seconds are measured: the sizes that the search tries first are traced and timed, and sizes between two of them are predicted.
If everything fits, the step is simulated without a plan; otherwise a plan is solved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.fit import FitPoint
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.errors import InvalidBatch, InvalidOption
from plimsoll.estimator.fit.search import Outlook, Shape
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import optimizer_seconds, roofline_costs
from plimsoll.planning.family import Family
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_full, choose_none
from plimsoll.session.options import PlanOptions
from plimsoll.session.step_planner import trace_and_cost
from plimsoll.session.task import TrainingTask, detached
from plimsoll.session.training_step import gradients_as_if
from plimsoll.tracing.recorder.calling import Loss, call_tensors, split_batch

Report = Callable[[str], None]
MakeBatch = Callable[[int, int], Any]


class MicroBatches:
    """Makes batches of any number of examples and tokens from a sample or a function of the user.

    ``items_name`` is the unit of their size: ``tokens`` or ``examples``.
    """

    def __init__(self, batch: Any, sequences: tuple[int, ...] | None) -> None:
        self._make: MakeBatch | None = None
        if callable(batch) and not isinstance(batch, torch.Tensor):
            self._make = batch
            self.sequences = sequences or (1,)
            self.items_name = "tokens" if sequences else "examples"
            return
        self._sample = batch
        args, kwargs = split_batch(detached(batch))
        tokens = _tokens(args, kwargs)
        first = next((tensor for tensor in call_tensors(args, kwargs) if tensor.dim() > 0), None)
        if first is None or not first.shape[0]:
            raise InvalidBatch(
                "The batch does not contain a tensor with examples."
                if first is None
                else f"The batch's first tensor, of shape {tuple(first.shape)}, does not contain any examples.",
                why="fit varies the number of examples, so it must know the dimension that counts them",
                next="pass tensors with the examples along their first dimension, or batch=lambda size, sequence: ...",
            )
        self._examples = first.shape[0]
        self._positions = 0 if tokens is None else tokens.shape[1]
        self.items_name = "examples" if tokens is None else "tokens"
        if tokens is None and sequences:
            raise InvalidOption(
                "sequences= cannot be used with this batch.",
                why="the batch does not contain a two-dimensional tensor of token ids whose length could be varied",
                next="leave sequences= out, or pass batch=lambda size, sequence: ...",
            )
        self.sequences = sequences or (self._positions or 1,)

    def of(self, shape: Shape) -> Any:
        """Return a batch with this number of examples and tokens."""
        if self._make is not None:
            return self._make(shape.batch, shape.sequence)
        return tree_map_only(torch.Tensor, lambda tensor: self._resized(tensor, shape), self._sample)

    def _resized(self, tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != self._examples:
            return tensor
        resized = tensor.detach().index_select(0, _cycle(shape.batch, self._examples, tensor.device))
        if self._positions and tensor.dim() > 1 and tensor.shape[1] == self._positions:
            resized = resized.index_select(1, _cycle(shape.sequence, self._positions, tensor.device))
        return resized.requires_grad_(tensor.requires_grad)


def _cycle(count: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device="cpu").remainder(length).to(device)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Find the token ids of a batch: ``input_ids``, or the first two-dimensional tensor that is not floating point."""
    named = kwargs.get("input_ids")
    if isinstance(named, torch.Tensor) and named.dim() == 2:
        return named
    found = (tensor for tensor in call_tensors(args, kwargs) if tensor.dim() == 2)
    return next((tensor for tensor in found if not tensor.is_floating_point()), None)


@dataclass(frozen=True, slots=True)
class FitTraining:
    """What is trained, as data: the model, its batches, the loss, the optimizer and the options."""

    model: nn.Module
    batches: MicroBatches
    loss: Loss | None
    optimizer: torch.optim.Optimizer | None
    options: PlanOptions

    def task(self, shape: Shape) -> TrainingTask:
        """Return the training step for micro-batches of this size."""
        batch = detached(self.batches.of(shape))
        return TrainingTask(model=self.model, batch=batch, loss=self.loss, optimizer=self.optimizer)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the step cannot run here, because it is planned for another device or because parameters are on the meta
        device.
        """
        return self.options.device_profile is not None or any(
            parameter.is_meta for parameter in self.model.parameters()
        )


@dataclass(slots=True)
class StepFamily:
    """Gives the step of one model at any size of micro-batch, either traced or predicted from traces at other sizes.

    With ``accumulates``, gradients exist before the step, as when several micro-batches are accumulated.
    """

    training: FitTraining
    accumulates: bool
    report: Report
    traces: dict[Shape, Trace] = field(default_factory=dict)
    _costs: dict[Shape, Costs] = field(default_factory=dict)
    _family: Family[Shape] | None = None

    def foreseen(self, shape: Shape) -> tuple[Trace, Costs] | None:
        """Predict the training step at a size of micro-batch that was not traced.

        Return ``None`` if the traces so far do not determine the step, or if this size itself was traced.
        """
        if shape in self.traces or not self.traces:
            return None
        return self._predicted(shape) if self.family.knows(shape) else None

    def at(self, shape: Shape, *, must_trace: bool = False) -> tuple[Trace, Costs]:
        """Return the step at this size of micro-batch as a trace, and the seconds of its ops. With ``must_trace`` the step is
        traced, never predicted.
        """
        if shape not in self.traces and (must_trace or not self._is_predictable(shape)):
            self._trace(shape)
        if shape in self.traces:
            return self.traces[shape], self._costs[shape]
        return self._predicted(shape)

    @property
    def family(self) -> Family[Shape]:
        """The structure of the step that all traces so far have in common. Steps at other sizes are predicted from it."""
        if self._family is None:
            self._family = Family(self.traces)
        return self._family

    def _predicted(self, shape: Shape) -> tuple[Trace, Costs]:
        predicted = self.family.at(shape)
        if self.training.is_elsewhere:
            return predicted, roofline_costs(predicted, find_device(self.training.options.device_profile or "CPU"))
        return predicted, self.family.seconds_at(shape, self._costs)

    def _is_predictable(self, shape: Shape) -> bool:
        if not self.traces or not self.family.covers(shape):
            return False
        if self.training.is_elsewhere:
            return self.family.knows(shape)
        # Measured seconds are interpolated between traced sizes, so a trace is needed on both sides.
        members = [each.batch for each in self.family.shapes if each.sequence == shape.sequence]
        return any(batch < shape.batch for batch in members) and any(batch > shape.batch for batch in members)

    def _trace(self, shape: Shape) -> None:
        training = self.training
        self.report(f"tracing {shape}")
        with gradients_as_if(training.model, are_there=True) if self.accumulates else contextlib.nullcontext():
            self.traces[shape], self._costs[shape] = trace_and_cost(training.task(shape), training.options)
        self._family = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """The rule for how many micro-batches make a step, as data: always ``count``, or as many as are needed for ``global_batch``
    examples.
    """

    count: int = 1
    global_batch: int | None = None

    def of(self, batch: int) -> int:
        """Return the number of micro-batches per step, if each has ``batch`` examples."""
        return self.count if self.global_batch is None else self.global_batch // batch


@dataclass(slots=True)
class SingleDevice:
    """Evaluates sizes of micro-batch on one device for a search (it implements ``fit.search.Evaluate``).

    ``plans`` and ``unmanaged`` (the simulated steps without a plan) are valid only for this accumulation and budget. The traces
    (``_families``) may be shared with a device that has another budget or accumulation.
    """

    training: FitTraining
    accumulation: Accumulation
    budget_bytes: int
    report: Report
    solves: int = 0
    plans: dict[Shape, Plan] = field(default_factory=dict)
    _families: dict[bool, StepFamily] = field(default_factory=dict)
    unmanaged: dict[Shape, Simulation] = field(default_factory=dict)

    def outlook(self, shape: Shape) -> Outlook:
        """Simulate the step without a plan, and return its peak and its speed."""
        simulation = self._simulate(shape)
        optimizer = _step_seconds(simulation)
        count = self.accumulation.of(shape.batch)
        seconds = count * (simulation.seconds - optimizer) + optimizer
        return Outlook(simulation.peak_bytes, count * shape.items / seconds if seconds else 0.0)

    def evaluate(self, shape: Shape) -> FitPoint:
        """Return the point (predicted memory and speed) of this size of micro-batch under the best plan for it.

        If even that plan does not fit, the point's peak is the smallest peak that a plan reaches.
        """
        unmanaged = self._simulate(shape)
        optimizer = _step_seconds(unmanaged)
        point = FitPoint(
            micro_batch=shape.batch,
            sequence=shape.sequence,
            accumulation=self.accumulation.of(shape.batch),
            status=Status.OPTIMAL,
            unmanaged_peak_bytes=unmanaged.peak_bytes,
            predicted_peak_bytes=unmanaged.peak_bytes,
            unmanaged_seconds=unmanaged.seconds - optimizer,
            micro_seconds=unmanaged.seconds - optimizer,
            optimizer_seconds=optimizer,
            saved_bytes=_decided_bytes(unmanaged.index),
            rebuilt_bytes=0,
            is_traced=shape in self._family(shape).traces,
        )
        return point if unmanaged.peak_bytes <= self.budget_bytes else self._solved(shape, point)

    def settle(self, shape: Shape) -> FitPoint:
        """Return the point (memory and speed) of this size of micro-batch, computed from a trace at this size and never from a
        prediction.

        Its plan is stored in ``plans``.
        """
        family = self._family(shape)
        if shape not in family.traces:
            family.at(shape, must_trace=True)
            self.unmanaged.pop(shape, None)
        point = self.evaluate(shape)
        if shape not in self.plans:
            trace, costs = family.at(shape)
            self.plans[shape] = solve(Planner(StepIndex(trace, costs)), budget_bytes=None, strategy="none")
        return point

    def resolve(self, shape: Shape, excess_bytes: int) -> Plan:
        """Solve the plan again for a size that was traced itself, with ``excess_bytes`` subtracted from the budget.

        Raises:
            BudgetBelowFloor: no plan fits the smaller budget.
        """
        trace, costs = self._family(shape).at(shape)
        self.solves += 1
        return solve(Planner(StepIndex(trace, costs)), budget_bytes=self.budget_bytes, excess_bytes=excess_bytes)

    @property
    def traces(self) -> int:
        """The number of steps that have been traced."""
        return sum(len(family.traces) for family in self._families.values())

    def inexact_bytes(self, shape: Shape) -> int:
        """Return how many bytes of the step at a predicted size belong to storages whose size could only be interpolated."""
        return self._family(shape).family.inexact_bytes(shape)

    def strays(self) -> dict[Shape, str]:
        """Return the traced sizes at which the step has another structure than in the other traces, each with the difference in
        words.
        """
        return {shape: why for family in self._families.values() for shape, why in family.family.strays.items()}

    def traced(self, shape: Shape) -> tuple[Trace, Costs]:
        """Return the step at this size and its costs, from a trace at this size."""
        return self._family(shape).at(shape, must_trace=True)

    def optimizer_seconds(self, shape: Shape) -> float:
        """Return the predicted seconds of the optimizer's step."""
        return _step_seconds(self._simulate(shape))

    def _solved(self, shape: Shape, point: FitPoint) -> FitPoint:
        index = self._simulate(shape).index
        self.report(f"solving {shape}")
        self.solves += 1
        plan = solve(Planner(index), budget_bytes=self.budget_bytes, raise_below_floor=False)
        if point.is_traced:
            self.plans[shape] = plan
        return described(point, plan)

    def _simulate(self, shape: Shape) -> Simulation:
        if shape not in self.unmanaged:
            index = self._too_large(shape) or StepIndex(*self._family(shape).at(shape))
            self.unmanaged[shape] = run_choices(index, choose_none(index, ""))
        return self.unmanaged[shape]

    def _too_large(self, shape: Shape) -> StepIndex | None:
        """Return a predicted step that exceeds the budget even if it recomputes everything, else ``None``.

        Such a shape is not traced: the device might run out of memory during the trace.
        """
        foreseen = None if self.training.is_elsewhere else self._family(shape).foreseen(shape)
        if foreseen is None:
            return None
        index = StepIndex(*foreseen)
        return index if run_choices(index, choose_full(index, "")).peak_bytes > self.budget_bytes else None

    def _family(self, shape: Shape) -> StepFamily:
        accumulates = self.accumulation.of(shape.batch) > 1
        if accumulates not in self._families:
            self._families[accumulates] = StepFamily(self.training, accumulates, self.report)
        return self._families[accumulates]


def described(point: FitPoint, plan: Plan) -> FitPoint:
    """Return the point (size of micro-batch) with the figures of this plan filled in: status, peak, seconds and recomputed
    bytes.
    """
    decisions = [decision for region in plan.regions for decision in region.decisions]
    return msgspec.structs.replace(
        point,
        status=plan.status,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        micro_seconds=plan.predicted_seconds - point.optimizer_seconds,
        rebuilt_bytes=sum(each.bytes for each in decisions if each.decision is Decision.RECOMPUTE),
    )


def _step_seconds(simulation: Simulation) -> float:
    """Return the seconds that the optimizer's step takes in a simulated training step."""
    return optimizer_seconds(simulation.index.trace, simulation.index.costs)


def _decided_bytes(index: StepIndex) -> int:
    """Return the bytes of all storages that a plan may drop, compress or offload."""
    storages = {view.graph.values[value].storage for view in index.views for value in view.decided}
    return sum(index.trace.storages[storage].bytes for storage in storages)
