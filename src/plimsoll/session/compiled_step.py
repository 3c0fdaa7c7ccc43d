"""Plans a model that torch.compile compiles, for ``attach``: the first training call makes the plan and compiles it.

The arguments of that call are the batch. Later calls choose among a few plans by their shapes; each plan is compiled once (see
``shapes``). If values may be compressed or offloaded, all calls follow the first plan, because such forms are measured at one
size only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.session.agreement import Agreement
from plimsoll.session.compiled import compiled_planner
from plimsoll.session.messages import log_planning_overrun
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.step_planner import StepPlanner
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import gradients_as_if
from plimsoll.tracing.compiled.units import PlannedCall, Unit, as_ours, install_alone


class CompiledStep:
    """A model with compiled parts under ``attach``. It wraps the model if necessary, traces it and makes its plans."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._units = tuple(units)
        whole = next((unit for unit in units if not unit.path), None)
        self._outside = None if whole is None else _Outside(whole)
        self.watched: nn.Module = self._outside or model
        """The module whose calls are training calls."""

    def away(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that removes our wrapper inside the ``with`` block, where the model is compiled again."""
        return contextlib.nullcontext() if self._outside is None else self._outside.away()

    def remove(self) -> None:
        """Remove the wrapper from the model. Calling it twice does no harm."""
        if self._outside is not None:
            self._outside.take_out()

    def with_units(self, task: TrainingTask) -> TrainingTask:
        """Return the task of a training call, completed with the model's compiled parts. Each trace needs to know these
        parts.
        """
        return dataclasses.replace(task, units=self._units)

    def plan(
        self, agreement: Agreement, task: TrainingTask, options: PlanOptions, budget: Budget, *, accumulates: bool
    ) -> tuple[StepPlanner, Plan, int]:
        """Make the plan for the budget. It is compiled and run to check its peak.

        Returns:
            The planner, its plan, and the largest difference in bytes between the measured peak of a trial (a run of a plan)
                and its predicted peak.
        """
        with gradients_as_if(task.model, are_there=True) if accumulates else contextlib.nullcontext(), task.compiled():
            planner = compiled_planner(agreement, task, options, budget, limit_bytes=budget.asked_bytes)
            step = functools.partial(task.step, written=planner.trace.written)
            planner.try_forms(step)
            plan = planner.plan("auto", step)
        agreement.same_plan(plan)
        if plan.budget_bytes is not None and planner.planning_peak_bytes > plan.budget_bytes:
            log_planning_overrun(
                planner.planning_peak_bytes,
                plan.budget_bytes,
                "one step ran without a plan, to read the compiled graphs and to measure the step",
                "if the blocks are compiled one by one, this call needs less memory",
            )
        return planner, plan, planner.unseen_bytes


class _Outside(nn.Module):
    """Wraps a model that is compiled as a whole, and is called in the model's place. Its hooks see the calls. Hooks on the
    model itself would be compiled with it.
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.inside = unit.module
        self._unit = unit
        self._compiled: Any = None
        self._put_back: Callable[[], None] = lambda: None
        self._put_in()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled model."""
        wrapper = self._unit.wrapper
        if self._compiled is None and wrapper is not None:
            # Before there is a plan (an evaluation), the user's compiled code runs. It calls the module. With this wrapper in
            # place, that call came back here and ended in a RecursionError.
            with self.away():
                return wrapper.forward(*args, **kwargs)
        with as_ours():
            return self._compiled(*args, **kwargs)

    def _called(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.training = module.training
        return self(*args, **kwargs)

    def _put_in(self) -> None:
        unit = self._unit
        self._compiled = unit.module._compiled_call_impl
        self._put_back = install_alone(unit, PlannedCall(self._called, unit.module))

    def take_out(self) -> None:
        """Remove the wrapper. Calling it twice does no harm."""
        self._put_back()
        self._put_back = lambda: None

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Return a context that removes the wrapper from the model inside the ``with`` block."""
        self.take_out()
        try:
            yield
        finally:
            self._put_in()
