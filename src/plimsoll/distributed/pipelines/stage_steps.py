"""Traces one pipeline stage on one of its micro-batches, and computes the stage's memory under any budget.

The stage's module is traced on this rank alone, forward and backward, with existing gradients of earlier micro-batches. The
stage's received inputs are in receive buffers that live through the step. So inputs do not count once more for each micro-batch
that waits between forward and backward.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.job import Layout
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import Category, Trace
from plimsoll.errors import InvalidBatch
from plimsoll.estimator.parallelism.rank import rank_trace
from plimsoll.estimator.pipeline_schedule.rank_memory import StageMemory
from plimsoll.estimator.pipeline_schedule.timeline import ActionSeconds
from plimsoll.estimator.rank_estimates import KnownChoices
from plimsoll.planning.describe import held_bytes, waiting_bytes
from plimsoll.planning.simulate import Simulation, choices_of, run_choices
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import RegionView, StepIndex
from plimsoll.session.options import PlanOptions
from plimsoll.session.step_planner import trace_and_cost
from plimsoll.session.task import TrainingTask, detached
from plimsoll.tracing.meters.memory import storage_bytes
from plimsoll.tracing.recorder.calling import Loss, output_tensors


@dataclass(frozen=True, slots=True)
class TracedStage:
    """Data: the traced step of one stage with one micro-batch.

    The stage's arguments take ``received_bytes``, its return value takes ``output_bytes``.
    """

    index: int
    trace: Trace
    costs: Costs
    received_bytes: int
    output_bytes: int


def trace_stage(
    index: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Loss | None,
    regions: tuple[str, ...] | None,
    micro_batches: int,
) -> TracedStage:
    """Trace one micro-batch of one stage. The stage is called with ``args`` and ``kwargs``.

    ``loss`` computes the loss from the last stage's output. For the other stages it is ``None``, because they receive the
    gradient of their output. If a step has several micro-batches, the trace has gradients that live from one micro-batch to the
    next.

    Raises:
        InvalidModel, InvalidBatch, InvalidLoss, InvalidRegions, TracingFailed: see ``plimsoll.plan``.
    """
    seen = _Output(loss)
    batch = _as_batch(index, module, args, kwargs)
    task = TrainingTask(model=module, batch=detached(batch), loss=seen)
    trace, costs = trace_and_cost(task, PlanOptions(regions=regions))
    if micro_batches > 1:
        trace = rank_trace(trace, Layout(micro_batches=micro_batches))
    received_bytes = sum(storage.bytes for storage in trace.storages if storage.category is Category.INPUT)
    return TracedStage(index, _with_received(trace), costs, received_bytes, seen.bytes)


def bytes_of(values: Any) -> int:
    """Return the bytes of all tensors in nested values."""
    return storage_bytes(output_tensors(values))


def _as_batch(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the call's arguments as one tuple or one dictionary.

    Raises:
        InvalidBatch: the call has positional and named arguments, and the stage's forward has no names for the positional ones.
    """
    if not args or not kwargs:
        return args or kwargs
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
        elif name in named and parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise InvalidBatch(
                f"Stage {index} is called with keyword arguments and with {name!r}, which can only be positional.",
                why="a micro-batch is traced with either named or positional arguments, not with both",
                next="give the parameters of the stage module's forward names",
            )
    return named


class _Output:
    """The loss function for the trace of a stage. It also notes the bytes of the stage's output.

    The loss is the stage's own. Stages without a loss get the sum of their output, whose gradient takes 0 bytes.
    """

    def __init__(self, loss: Loss | None) -> None:
        self._loss = loss
        self.bytes = 0

    def __call__(self, output: Any) -> torch.Tensor:
        tensors = output_tensors(output)
        self.bytes = bytes_of(tensors)
        if self._loss is not None:
            return self._loss(output)
        return torch.stack([t.sum().float() for t in tensors if t.requires_grad]).sum()


def _with_received(trace: Trace) -> Trace:
    """Return the trace with its inputs as receive buffers that live through the step, one per micro-batch."""
    storages = tuple(
        msgspec.structs.replace(storage, category=Category.COMMUNICATION, dies=len(trace.ops))
        if storage.category is Category.INPUT
        else storage
        for storage in trace.storages
    )
    return msgspec.structs.replace(trace, storages=storages)


class StageStep:
    """A traced pipeline stage that can be planned, with at most ``in_flight`` micro-batches between forward and the end of
    backward.

    Each finished micro-batch leaves ``left_bytes`` until the step ends. Then outputs of ``merged_bytes`` are concatenated.
    ``known_choices`` remembers the choices (what a module call keeps or recomputes) that were generated for other stages, which
    speeds up planning. The choices of this stage are added to it.
    """

    def __init__(
        self,
        traced: TracedStage,
        in_flight: int,
        *,
        left_bytes: int,
        merged_bytes: int,
        known_choices: KnownChoices,
    ) -> None:
        self.traced = traced
        self.planner = Planner(StepIndex(traced.trace, traced.costs, in_flight=in_flight), known_choices=known_choices)
        self._left_bytes = left_bytes
        self._merged_bytes = merged_bytes

    @property
    def range_bytes(self) -> tuple[int, int]:
        """The smallest and the largest budget of this stage alone, in bytes, that make a difference: its lowest reachable peak
        and its peak without a plan.
        """
        low = self.planner.floor.peak_bytes
        return low, max(low, self.planner.loosest.peak_bytes)

    def simulation(self, budget_bytes: int) -> Simulation:
        """Simulate the step under the best plan for a budget of this stage alone, and return the simulation."""
        if budget_bytes >= self.planner.loosest.peak_bytes:
            return self.planner.loosest
        return self.planner.best_within(budget_bytes).simulation or self.planner.floor

    def plan(self, budget_bytes: int) -> Plan:
        """Return the best plan for a budget of this stage alone."""
        budget_bytes = max(budget_bytes, self.planner.floor.peak_bytes)
        return solve(self.planner, budget_bytes=budget_bytes)

    def under(self, plan: Plan) -> Simulation:
        """Simulate the stage's step under a given plan, and return the simulation (bytes at each instant, and seconds)."""
        return run_choices(self.planner.index, choices_of(self.planner.index, plan.regions))

    def memory(self, simulation: Simulation) -> StageMemory:
        """Return the bytes that the stage takes under a simulated plan: in forward, between forward and backward, and in
        backward.
        """
        index = simulation.index
        held = held_bytes(simulation)
        steady_bytes = index.lasting_bytes + waiting_bytes(simulation)
        half_bytes, grown_bytes = split_backward(simulation)
        forward, backward = simulation.curve[: index.handover + 1], simulation.curve[index.handover :]
        return StageMemory(
            lasting_bytes=index.lasting_bytes,
            forward_bytes=max(0, int(forward.max()) - steady_bytes),
            held_bytes=held,
            backward_bytes=max(0, int(backward.max()) - steady_bytes),
            input_gradient_bytes=max(0, half_bytes - steady_bytes),
            between_bytes=held + grown_bytes,
            left_bytes=self._left_bytes,
            merged_bytes=self._merged_bytes,
        )

    def seconds(self, simulation: Simulation) -> ActionSeconds:
        """Return the seconds of one micro-batch's forward, backward and recomputation.

        Half of backward's seconds count for the gradients of inputs, the other half for the gradients of weights.
        """
        index = simulation.index
        forward = float(index.seconds_before[index.handover // 2])
        backward = index.base_seconds - forward
        return ActionSeconds(
            forward_seconds=forward,
            input_gradient_seconds=backward / 2,
            weight_gradient_seconds=backward / 2,
            recompute_seconds=max(0.0, simulation.seconds - index.base_seconds),
        )


def split_backward(simulation: Simulation) -> tuple[int, int]:
    """For a backward in two halves, return the peak bytes of the first half, and the bytes that it keeps for the second half.

    The first half runs like a whole backward, but frees nothing, and also holds what the second half needs. The second half
    computes the gradients of weights. It reads what the ops with weights saved (so recomputed values stay alive), and the
    gradients of these ops' outputs (torch holds them).
    """
    index = simulation.index
    calls = [
        (view.call.backward, _between(view, choice.kept))
        for view, choice in zip(index.views, simulation.choices, strict=True)
        if view.call.backward[0] >= 0
    ]
    peak_bytes = kept_bytes = grown_bytes = 0
    seen: set[int] = set()
    end = index.handover

    def reach(until: int, more_bytes: int) -> None:
        """Advance the running peak in memory to an instant of the step, where ``more_bytes`` exist in addition to the bytes of
        a whole backward.
        """
        nonlocal peak_bytes, end
        peak_bytes = max(peak_bytes, int(simulation.curve[end:until].max(initial=0)) + more_bytes)
        end = max(end, until)

    for (start, stop), found in sorted(calls, key=lambda call: call[0]):
        reach(2 * start, kept_bytes + grown_bytes)
        reach(2 * stop, kept_bytes + grown_bytes + found.gradient_bytes)
        kept_bytes += found.kept_bytes(seen)
        grown_bytes += found.rebuilt_bytes + found.gradient_bytes
    reach(index.last_wait, kept_bytes + grown_bytes)
    return peak_bytes, grown_bytes


@dataclass(frozen=True, slots=True)
class _Between:
    """Data: the bytes that one region (a managed module call) holds between the two halves of backward.

    ``kept`` maps each storage kept for backward to its bytes. The other fields are the bytes that are recomputed for the second
    half, and the bytes of gradients that it needs.
    """

    kept: dict[int, int]
    rebuilt_bytes: int
    gradient_bytes: int

    def kept_bytes(self, seen: set[int]) -> int:
        """Return the bytes of this region's kept storages, without those in ``seen``. Then add the storages to ``seen``.

        So each storage counts once over all regions (planned modules).
        """
        fresh = self.kept.keys() - seen
        seen |= fresh
        return sum(self.kept[storage] for storage in fresh)


def _between(view: RegionView, kept: frozenset[int]) -> _Between:
    graph = view.graph
    sizes = {value.storage: value.bytes for value in graph.values}
    weights = {value.id for value in graph.values if value.origin is Origin.PARAMETER}
    held = (view.forced - view.free) | kept
    rebuilt: set[int] = set()
    gradients: set[int] = set()
    for op in graph.ops:
        if weights.isdisjoint(op.reads):
            continue
        gradients.update(graph.values[value].storage for value in op.writes)
        # A norm saves its input and its statistics. No op with a weight saves its own first result.
        used = {*op.reads, *op.writes[1:]}
        rebuilt.update(graph.values[v].storage for v in view.droppable if v in used and v not in kept)
    return _Between(
        {graph.values[value].storage: sizes[graph.values[value].storage] for value in held},
        sum(map(sizes.__getitem__, rebuilt)),
        sum(map(sizes.__getitem__, gradients)),
    )
