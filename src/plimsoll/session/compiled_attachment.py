"""A budget at work on a model that torch.compile compiles, where no batch is at hand: the first training call makes the plan.

The call's own arguments are the batch. What lies outside of the model is not seen in it: the user's loss, where the model
returns none. Where blocks are compiled one by one, a step that exceeds the budget is warned of.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import Plan
from plimsoll.engine.apply import Handle
from plimsoll.session.agreement import Agreement
from plimsoll.session.calibration import as_batch, optimizer_in_view, stand_in_loss
from plimsoll.session.compiled import plan_compiled
from plimsoll.session.joint_traces import facts_of
from plimsoll.session.manage import manage_together
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.retry import AppliedPlan, can_retry
from plimsoll.session.shapes import told
from plimsoll.session.step_watch import BudgetWatch
from plimsoll.session.task import TrainingTask
from plimsoll.session.training_step import gradients_as_if
from plimsoll.tracing.compiled.units import PlannedCall, Unit, install
from plimsoll.tracing.ddp import inner_module, is_without_reduction

P = ParamSpec("P")
T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class CompiledAttachment:
    """A budget at work on a model with compiled parts."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        budget: Budget,
        options: PlanOptions,
        *,
        optimizer: torch.optim.Optimizer | None,
        agreement: Agreement,
        verify_every: int = 0,
    ) -> None:
        self.model = model
        self._agreement = agreement
        self._verify_every = verify_every
        self._budget, self._options, self._optimizer = budget, options, optimizer
        self._handle: Handle | None = None
        self._watch: BudgetWatch | None = None
        self._is_trying = False
        self._leave: Callable[[], None] = self._wait_for_a_call(units)

    @property
    def plan(self) -> Plan | None:
        """The plan at work; ``None`` until the first training step has begun."""
        return None if self._handle is None else self._handle.plan

    @property
    def is_calibrating(self) -> bool:
        """Whether the plan is still to come."""
        return self._handle is None

    @property
    def is_trying(self) -> bool:
        """Whether the model runs for a plan to be made."""
        return self._is_trying

    @property
    def peak_bytes(self) -> int:
        """The most that a step was measured to take; 0 until one was: where blocks are compiled, one unlike the first."""
        return 0 if self._watch is None else self._watch.peak_bytes

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What has been seen to be wrong so far."""
        return () if self._handle is None else self._handle.faults

    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `plimsoll.engine.apply.Handle.step`, once there is a plan."""
        return function(*args, **kwargs) if self._handle is None else self._handle.step(function, *args, **kwargs)

    def remove(self) -> None:
        """Undo everything; harmless when called twice."""
        self._leave()
        self._leave = _nothing
        if self._handle is not None:
            self._handle.remove()

    def __enter__(self) -> CompiledAttachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _wait_for_a_call(self, units: Sequence[Unit]) -> Callable[[], None]:
        """Notice the model's next training call; returns what stops that.

        What is compiled as a whole is noticed from outside of its compilation, which would take a hook in.
        """
        whole = next((unit for unit in units if not unit.path), None)
        if whole is None:
            return self.model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True).remove
        compiled: Any = whole.module._compiled_call_impl if whole.wrapper is None else whole.wrapper.forward

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and module.training:
                put_back()
                self._begin(args, kwargs)
                return module(*args, **kwargs)
            return compiled(*args, **kwargs)

        put_back = install(whole, PlannedCall(called, whole.module))
        return put_back

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and inner_module(self.model).training:
            self._leave()  # planning calls the model
            self._leave = _nothing
            self._begin(args, kwargs)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan for the call that comes, and put the plan to work."""
        inner = inner_module(self.model)
        task = TrainingTask.read(
            self.model,
            as_batch(inner, args, kwargs),
            loss=stand_in_loss,
            optimizer=self._optimizer or optimizer_in_view(inner),
        )
        # Where gradients are left to a later reduction, more micro-batches come, which begin with them.
        is_first_of_several = is_without_reduction(self.model)
        accumulating = gradients_as_if(inner, are_there=True) if is_first_of_several else contextlib.nullcontext()
        self._is_trying = True
        try:
            with self._agreement as agreement:
                agreement.same("the first batch", facts_of(task))
                with accumulating:
                    plan = plan_compiled(agreement, task, self._options, self._budget, "auto")
                self._handle = handle = manage_together(agreement, self.model, plan, verify_every=self._verify_every)
        except BaseException:
            self.remove()
            raise
        finally:
            self._is_trying = False
        if can_retry(self.model, plan):
            handle.retry_with(AppliedPlan(handle, self.model, plan, self._agreement).run)
        if plan.budget_bytes is not None and not any(unit.path == "" for unit in plan.compiled):
            budget_bytes = plan.budget_bytes_of_ranks.get(str(self._agreement.rank), plan.budget_bytes)
            self._watch = BudgetWatch(self.model, plan, budget_bytes)
            handle.remove_with_me(self._watch)
        _LOG.info(told(plan, 0))


def _nothing() -> None:
    """Nothing to leave any more."""
