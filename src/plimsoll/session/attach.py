"""The verb ``attach``: keep the training of a model under a budget from its first step on, with no batch at hand.

The first call of the model in training is traced on the spot and runs under the plan with the lowest peak that there is.
What that step takes in truth (the user's loss, the optimizer's state) is measured until the next call, and the plan for
the budget is solved with the difference taken off. Later steps run that plan. A batch that is larger than any before it
starts this over.

On several ranks all of this is agreed, in the calls in which every rank calibrates. Later calls exchange nothing, unless
something happens: a larger batch, or an optimizer's first step. The rank that sees it waits a few seconds for the others to
see it too, in the same call. If all do, they start over together; if not, the plan stays. Batches may have another length on
every rank, unless ranks share the work on one: each traces its own, and the plan keeps every rank within its budget.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import nn

from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import Plan
from plimsoll.engine.apply import Handle
from plimsoll.engine.copies import ModelHook
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.agreement import Agreement, agreement_for, described
from plimsoll.session.calibration import (
    MeasuredStep,
    OptimizerWatch,
    as_batch,
    planned_state_bytes,
    refuse_optimizer_above,
    stand_in_loss,
    unseen_bytes,
)
from plimsoll.session.manage import manage_together
from plimsoll.session.options import Budget, PlanOptions, check_count
from plimsoll.session.rendezvous.exchange import TIMEOUT_SECONDS
from plimsoll.session.step_planner import StepPlanner, trace_and_cost
from plimsoll.session.task import BATCH, TrainingTask, check_model, detached
from plimsoll.session.tightest_rank import planner_for
from plimsoll.session.trial import error_scale
from plimsoll.tracing.fsdp2 import splits_activations
from plimsoll.tracing.recorder.calling import call_tensors
from plimsoll.tracing.recorder.fingerprint import fingerprint
from plimsoll.tracing.refusals import refuse_compiled
from plimsoll.tracing.torch_internals import is_profiled
from plimsoll.units import format_bytes

_MOST_TRIES = 3
"""So many first steps may fail, or be profiled by the user, before the plan is made without a measurement."""


class _Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank is in its calibration: its batch, whether it is the largest so far, and whether a step was measured."""

    signature: str
    is_larger: bool
    is_measured: bool


class Attachment:
    """A budget at work on a model. ``plan`` is ``None`` until the first training step has begun, and final after it."""

    def __init__(
        self,
        model: nn.Module,
        budget: Budget,
        options: PlanOptions,
        agreement: Agreement,
        *,
        optimizer: torch.optim.Optimizer | None,
        verify_every: int,
    ) -> None:
        self.model = model
        self.plan: Plan | None = None
        self._budget = budget
        self._optimizer = optimizer
        self._options = options
        self._verify_every = verify_every
        self._agreement = agreement
        self._calls = 0
        self._largest_bytes = 0
        self._has_counted_state = False
        self._earlier_faults: tuple[Fault, ...] = ()
        self._planner: StepPlanner | None = None
        self._error_scale = 1.0
        self._handle: Handle | None = None
        self._watch: OptimizerWatch | None = None
        self._measuring: MeasuredStep | None = None
        self._measured: MeasuredStep | None = None
        self._is_calibrating = False
        self._is_tracing = False
        self._tries = 0
        self._excess_bytes = 0
        self._counted_state_bytes = 0
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(ModelHook(model, self._before_forward), with_kwargs=True, prepend=True),
            model.register_forward_hook(ModelHook(model, self._after_forward), always_call=True),
        ]

    @property
    def is_calibrating(self) -> bool:
        """Whether the plan for the budget is still to come: the model runs at its lowest peak."""
        return self._is_calibrating

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What ``verify_every`` has shown so far, under every plan that was at work."""
        return (*self._earlier_faults, *(() if self._handle is None else self._handle.faults))

    def remove(self) -> None:
        """Undo everything; harmless when called twice."""
        self._end_measuring()
        if self._watch is not None:
            self._watch.remove()
        self._drop_handle()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._is_calibrating = False

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_tracing:
            return
        self._end_measuring()  # whatever is called now, evaluation too, the step is over
        if not torch.is_grad_enabled() or not module.training:
            return
        try:
            self._manage(args, kwargs)
        except BaseException:
            self.remove()
            raise

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._measuring is not None and not self._is_tracing and output is None:  # it raised
            self._measuring.has_failed = True

    def _manage(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a training call: plan for it, or for what the one before it showed."""
        self._calls += 1
        batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in call_tensors(args, kwargs))
        if self._planner is None or self._is_calibrating:
            with self._agreement:
                self._calibrate(args, kwargs, batch_bytes)
        elif batch_bytes > self._largest_bytes:
            self._grow(args, kwargs, batch_bytes)
        elif self._has_new_state():
            self._count_state()

    def _calibrate(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch_bytes: int) -> None:
        """What every rank does in every call until the plan for the budget is there."""
        facts = self._facts(args, kwargs)
        if self._planner is None:
            self._agreement.same("the first batch", facts)
            self._begin(args, kwargs, batch_bytes)
            return
        here = _Situation(
            signature=str(facts),
            is_larger=batch_bytes > self._largest_bytes,
            is_measured=self._measured is not None,
        )
        told = self._agreement.all_of("calibrating", here, _Situation)
        if all(each.is_larger for each in told) and len({each.signature for each in told}) == 1:
            self._begin(args, kwargs, batch_bytes)
            return
        if here.is_larger:
            self._stay(batch_bytes)
        if all(each.is_measured for each in told) or self._tries == _MOST_TRIES:
            self._settle(self._measured)
        else:
            self._measure(args, kwargs)

    def _grow(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch_bytes: int) -> None:
        """A larger batch than ever: start over, if all ranks have one."""
        facts = self._facts(args, kwargs)
        told = self._agreement.gathered(f"larger batch in call {self._calls}", str(facts), str)
        if told is None or len(set(told)) > 1:
            self._stay(batch_bytes)
            return
        with self._agreement:
            self._begin(args, kwargs, batch_bytes)

    def _stay(self, batch_bytes: int) -> None:
        """Go on under the plan that all ranks have, although this rank's batch is larger than those that it is for."""
        self._largest_bytes = batch_bytes
        warnings.warn(
            f"plimsoll: the batch of this rank ({format_bytes(batch_bytes)}) is larger than any before it, and not so on "
            "all ranks alike: the plan at work stays, and may take more than the budget. Pad batches to the same shape, or "
            "train on every rank's largest one first",
            stacklevel=6,
        )

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch_bytes: int) -> None:
        """Trace this very call, and let it run at the lowest peak, measured."""
        self._drop_handle()
        if is_profiled():
            warnings.warn(
                "plimsoll: this training call is traced, which takes torch's profiler: yours records nothing of it",
                stacklevel=6,
            )
        self._is_tracing = True
        try:
            self._planner = self._plan_for(self._task(args, kwargs))
        finally:
            self._is_tracing = False
        self._largest_bytes = batch_bytes
        # Once for the budget itself: where it is below the floor, this step must not begin.
        floor_bytes = self._solve(self._planner.budget_bytes).floor_bytes
        self._run(self._solve(floor_bytes))
        self._is_calibrating, self._tries, self._has_counted_state = True, 0, False
        self._measure(args, kwargs)

    def _facts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
        """What has to be the same on all ranks: the batch too where ranks share the work on one."""
        facts = self._task(args, kwargs).facts()
        return facts if splits_activations(self.model) else {what: it for what, it in facts.items() if what != BATCH}

    def _task(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingTask:
        """The step of this very call, whose loss is not known."""
        batch = detached(as_batch(self.model, args, kwargs))
        return TrainingTask(model=self.model, batch=batch, loss=stand_in_loss)

    def _plan_for(self, task: TrainingTask) -> StepPlanner:
        """Trace the step, look for other forms of its values where they are allowed, and see how far off errors are."""
        with self._agreement.stepping():
            traced = trace_and_cost(dataclasses.replace(task, optimizer=self._optimizer), self._options)
        budget_bytes = self._budget.bytes_on(traced[1])
        planner = planner_for(self._agreement, traced, self._options, budget_bytes)
        planner.try_forms(task.step)
        self._error_scale = 1.0
        if planner.gradients is not None:
            self._error_scale = error_scale(
                planner.solve(planner.budget_bytes), functools.partial(planner.run, task.step())
            )
        return planner

    def _solve(self, budget_bytes: int | None, excess_bytes: int = 0) -> Plan:
        assert self._planner is not None
        return self._planner.solve(budget_bytes, excess_bytes=excess_bytes, error_scale=self._error_scale)

    def _measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tries += 1
        self._measured = None
        if self._watch is not None:
            self._watch.remove()
        self._measuring = step = MeasuredStep(self.model, args, kwargs)
        self._watch = OptimizerWatch(self.model.parameters(), self._optimizer, step.note_optimizer)

    def _settle(self, measured: MeasuredStep | None) -> None:
        """The first step is over: the plan for the budget, with what the trace did not see taken off."""
        assert self.plan is not None
        assert self._watch is not None
        assert self._planner is not None
        assert self._planner.own_budget_bytes is not None
        self._counted_state_bytes = max(self._watch.bytes_after, planned_state_bytes(self.plan))
        self._has_counted_state = self._watch.has_stepped
        if measured is None:
            warnings.warn(
                "plimsoll: the first steps could not be measured (they failed, or a profiler was running); the plan "
                "relies on its trace alone",
                stacklevel=5,
            )
            self._excess_bytes = self._counted_state_bytes - planned_state_bytes(self.plan)
        else:
            refuse_optimizer_above(
                self._planner.own_budget_bytes, measured.optimizer_peak_bytes + self._watch.bytes_before
            )
            self._excess_bytes = unseen_bytes(measured, self._watch, self._planner.own(self.plan))
        self._run(self._solve_for_budget(0))
        self._is_calibrating = False

    def _solve_for_budget(self, more_bytes: int) -> Plan:
        """The plan for the budget less what was measured on any rank, and less ``more_bytes`` from now on."""
        assert self._planner is not None
        self._excess_bytes += more_bytes
        self._counted_state_bytes += more_bytes
        excess_bytes = self._planner.excess_bytes(self._excess_bytes)
        try:
            return self._solve(self._planner.budget_bytes, excess_bytes)
        except BudgetBelowFloor as error:
            raise BudgetBelowFloor(
                error.found,
                why=f"{error.why}; the first step ran at the lowest peak and was measured to take "
                f"{format_bytes(excess_bytes)} more than its trace (the loss, the optimizer's state, gradients "
                "that stay)",
                next=error.next,
            ) from error

    def _has_new_state(self) -> bool:
        """Whether an optimizer has made its first step since the plan was made."""
        return self._watch is not None and self._watch.has_stepped and not self._has_counted_state

    def _count_state(self) -> None:
        """Take optimizer state that has come up off the budget, where all ranks have seen their optimizer step."""
        assert self._watch is not None
        self._has_counted_state = True
        new_bytes = max(0, self._watch.bytes_after - self._counted_state_bytes)
        told = self._agreement.gathered(f"first step of the optimizer before call {self._calls}", new_bytes, int)
        if told is None:
            warnings.warn(
                f"plimsoll: the optimizer of this rank has stepped ({format_bytes(new_bytes)} of new state), and not on all "
                "ranks: the plan at work stays, and does not count that state. Pass optimizer= to plimsoll.attach",
                stacklevel=5,
            )
        elif any(told):
            with self._agreement:
                self._run(self._solve_for_budget(new_bytes))

    def _run(self, plan: Plan) -> None:
        self._drop_handle()
        self._handle = manage_together(self._agreement, self.model, plan, verify_every=self._verify_every)
        self.plan = plan
        self._handle.begin_step()

    def _drop_handle(self) -> None:
        self._earlier_faults = self.faults
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _end_measuring(self) -> None:
        """Stop the meter, if it runs; the step counts if it was measured from its forward to its end."""
        step, self._measuring = self._measuring, None
        if step is not None and step.end():
            self._measured = step


def attach(
    model: nn.Module,
    budget: int | str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    regions: Sequence[str] | None = None,
    allow: Collection[str] | str = ("recompute",),
    max_error: float | str = 0.0,
    host_budget: int | str | None = None,
    overrides: Sequence[str] = (),
    link: str | None = None,
    verify_every: int = 0,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Attachment:
    """Keep the training of ``model`` under ``budget`` without a batch at hand.

    The first training step calibrates at the lowest memory that the engine can reach; from the second on the model runs
    the plan that is cheapest under the budget. Evaluation (``model.eval()`` or no gradients) is left alone. A batch that
    is larger than every one before it is traced and calibrated anew.

    On several ranks (torchrun) all attach alike, and every rank runs the identical plan. Their batches may have other lengths;
    only tensor parallel ranks, which share one batch, have to have the same. A later batch that is larger on all ranks is
    planned for anew; one that is larger on some ranks only is run under the plan that is there, with a warning.

    Args:
        model: the model as it will be trained.
        budget: as for ``plimsoll.plan``.
        optimizer: lets the plan count its state before it exists; without it the first step measures it.
        regions: as for ``plimsoll.plan``.
        allow: as for ``plimsoll.plan``; and so are ``max_error``, ``host_budget``, ``overrides`` and ``link``. Where they
            open other forms, the first training call takes one or two more steps' time to try them.
        max_error: the relative error of the gradient; expectations are scaled to what one trial step measures.
        host_budget: bytes at the other end of the link.
        overrides: decisions by pattern.
        link: ``host`` or ``disk``.
        verify_every: as for ``plimsoll.apply``.
        ranks: as for ``plimsoll.plan``.
        timeout_seconds: as for ``plimsoll.plan``.

    Returns:
        An attachment with ``plan``, ``faults`` and ``remove()``; also a context manager.

    Raises:
        InvalidBudget, InvalidModel, InvalidOption: at once.
        BudgetBelowFloor, InvalidRegions, …: in the training call that shows it (the first, or the second, when the first
            step has been measured), with the model unmanaged and unchanged.
        RanksDiffer, RankFailed, RankMissing: as for ``plimsoll.plan``, at once or in a training call.

    Example:
        >>> handle = plimsoll.attach(model, budget="8GiB")  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss = model(**batch).loss
        ...     loss.backward()
    """
    with agreement_for(model, "attach", ranks=ranks, timeout_seconds=timeout_seconds) as agreement:
        check_model(model, optimizer)
        refuse_compiled(model)
        check_count("verify_every", verify_every, least=0)
        limit = Budget.required(budget)
        options = PlanOptions.read(
            regions=regions, allow=allow, max_error=max_error, host_budget=host_budget, overrides=overrides, link=link
        )
        trained = {"model": fingerprint(model), "optimizer": type(optimizer).__name__}
        agreement.same("what to attach", {**trained, **options.facts(), **described(verify_every=verify_every)})
        return Attachment(model, limit, options, agreement, optimizer=optimizer, verify_every=verify_every)
