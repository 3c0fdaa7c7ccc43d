"""Runs a training step again under a tighter plan if it runs out of memory. All state is put back first.

The step is a function because everything that a failed step has made must be freed before the next run. We can clear the local
variables of a function. We cannot clear the variables of a loop around a ``with`` block, and they would keep the failed step's
graph alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from plimsoll.artifacts.plan import COLLECTIVES, Plan
from plimsoll.engine.apply import Handle
from plimsoll.engine.copies import ModelHook
from plimsoll.errors import BudgetBelowFloor, InvalidModel
from plimsoll.session.agreement import Agreement
from plimsoll.session.compiled import compiled_planner
from plimsoll.session.optimizer_watch import optimizer_in_view
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.rendezvous.joint_step import JointStep
from plimsoll.session.rendezvous.world import find_participants
from plimsoll.session.step_planner import StepPlanner, first_planner
from plimsoll.session.step_snapshot import Companions, StepSnapshot
from plimsoll.session.task import task_of_call
from plimsoll.tracing import ddp, fsdp2
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.zero import steps_with_buckets
from plimsoll.units import format_bytes

P = ParamSpec("P")
T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_PATIENCE_SECONDS = 600.0
"""Seconds that ranks wait, in addition to the usual time, for a rank that must first leave its step."""


class TighterPlans(Protocol):
    """The interface that ``Retry`` uses: an applied plan that can be replaced by a plan with a lower peak."""

    agreement: Agreement
    """The ranks that replace the plan together."""
    repeats_collectives: bool
    """Whether recipes (the ops that rebuild values) may repeat collectives."""

    @property
    def plan(self) -> Plan | None:
        """The current plan, or ``None`` before the first one is applied."""
        ...

    def tighten(self, *, is_own: bool) -> bool:
        """Switch to a plan with a lower peak. Return True if some rank has such a plan. ``is_own`` says whether this rank ran
        out of memory.
        """
        ...

    def floor(self, *, is_optimizer: bool, is_own: bool) -> BudgetBelowFloor | None:
        """Return the error to raise if no plan has a lower peak; ``None`` if this rank has nothing to report."""
        ...


class Retry:
    """Runs a training step again until no rank runs out of memory in it, or until no plan has a lower peak."""

    def __init__(self, model: nn.Module, plans: TighterPlans) -> None:
        self._model = model
        self._plans = plans
        self._companions: Companions | None = None
        self._joint = JointStep(None)
        self.is_running = False
        """Whether a step that can be repeated is running."""

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function until it succeeds, and return its result.

        Raises:
            BudgetBelowFloor, torch.OutOfMemoryError, RankFailed, RankMissing: as for `plimsoll.engine.apply.Handle.step`.
            InvalidModel: other ranks train the model too, in a way that cannot be repeated.
        """
        if self.is_running:  # a nested call: the outer step is repeated as a whole
            return function(*args, **kwargs)
        if self._companions is None:
            refuse_unrepeatable(self._model, self._plans)
            self._companions, self._joint = Companions(), self._plans.agreement.joint_step()
        self.is_running, had_none_tighter = True, False
        try:
            while True:
                snapshot = StepSnapshot(self._model, self._companions.alive(), (args, kwargs))
                self._joint.begin()
                failure: Exception | None
                try:
                    with snapshot:
                        made = function(*args, **kwargs)
                except Exception as error:
                    failure = self._joint.failure(error)
                    if failure is None:
                        raise
                    _let_go(error)
                else:
                    failure = self._joint.failed_elsewhere()
                    if failure is None:
                        return made
                    del made
                is_last = had_none_tighter
                had_none_tighter = not self._go_back(snapshot, failure, is_last=is_last)
        finally:
            self.is_running = False

    def _go_back(self, snapshot: StepSnapshot, failure: Exception, *, is_last: bool) -> bool:
        """Called after a step ran out of memory. Restore the state from before the step and switch to a tighter plan. Return
        True if a tighter plan was found.

        If not, the step runs once more anyway. It may fit now, for two reasons: regions (managed modules) that the failed run
        has recorded are not recorded again, and the allocator's cache was emptied.
        """
        agreement = self._plans.agreement
        self._joint.renew()
        with agreement:
            written = snapshot.written()
            if any(agreement.all_of("what cannot be put back", written, str, more_seconds=_PATIENCE_SECONDS)):
                where = written or "see the other ranks"
                failure.add_note(
                    f"plimsoll: the step cannot run again, because not all of its changes can be undone: {where}."
                )
                raise failure
            snapshot.put_back()
            torch.clear_autocast_cache()
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            before = self._plans.plan
            is_own = isinstance(failure, torch.OutOfMemoryError)
            is_tighter = self._plans.tighten(is_own=is_own)
            if not is_tighter and is_last:
                floor = self._plans.floor(is_optimizer=snapshot.is_in_optimizer, is_own=is_own)
                raise floor or failure from failure
        _LOG.warning(_line(before, self._plans.plan if is_tighter else None))
        return is_tighter


def refuse_unrepeatable(model: nn.Module, plans: TighterPlans) -> None:
    """Raise an error if steps of this model cannot be repeated, because DeepSpeed or other ranks take part in them and their
    state cannot be reset.
    """
    inner = inner_module(model)
    if steps_with_buckets(inner):
        raise InvalidModel(
            f"{type(inner).__name__} is trained by DeepSpeed's engine, and handle.step cannot run its steps again.",
            why="backward puts gradients into DeepSpeed's buckets, and DeepSpeed counts which of them were reduced; if a step "
            "fails within backward, half of them would remain for the next step",
            next="call the engine without handle.step; a smaller budget leaves more memory for other uses of the device",
        )
    agreement, world = plans.agreement, find_participants(model).world
    if world is None:
        return
    backends = agreement.backends - {dist.Backend.GLOO}
    if agreement.size < world.size:
        why = f"ranks= names {agreement.size} of them, but all ranks must run a step again if one does"
    elif backends:
        why = f"their collectives run on {', '.join(backends)}, and only connections of gloo can be closed and opened again"
    elif own := [*ddp.own_reductions(model), *fsdp2.own_reductions(model)]:
        why = f"{', '.join(own)} may keep unsent gradients from step to step, and these cannot be restored"
    elif ddp.is_static(model):
        why = "static_graph=True counts steps, and a step that runs again would count twice"
    elif plans.repeats_collectives:
        why = "allow= lets recipes repeat collectives, and after an error within one, ranks are not at the same collective"
    else:
        return
    raise InvalidModel(
        f"{type(model).__name__} is trained by {world.size} ranks, and handle.step cannot run their steps again.",
        why=why,
        next="run the step without handle.step; a smaller budget leaves more memory for other uses of the device",
    )


def _line(before: Plan | None, after: Plan | None) -> str:
    """Return the line for the log that says that a step is repeated, with the plan before and the plan after."""
    if before is None:
        return "plimsoll: out of memory before the first plan was made; everything was put back, the step is run again"
    then = "no plan has a lower peak; the step is run once more"
    if after is not None:
        then = f"the step is run again with a plan of {format_bytes(after.predicted_peak_bytes)}"
    had = format_bytes(before.predicted_peak_bytes)
    if after is not None and after.signature != before.signature:  # the failed step may be larger than the planned one
        had += ", which was made for another step"
    return f"plimsoll: out of memory under a plan of {had}; everything was put back, {then}"


def _let_go(error: BaseException) -> None:
    """Clear the local variables of all frames that an error passed through. These variables hold the tensors of the failed
    step, which would need memory during the next run.
    """
    for each in _chain(error, set()):
        traceback.clear_frames(each.__traceback__)


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    if error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        yield from _chain(error.__cause__, seen)
        yield from _chain(error.__context__, seen)


def floor_of(planner: StepPlanner, excess_bytes: int, *, is_optimizer: bool) -> BudgetBelowFloor:
    """Return the error for a step that runs out of memory under the plan with the lowest peak. ``excess_bytes`` are added to
    the predicted peak.
    """
    lowest = planner.lowest()
    floor_bytes = lowest.predicted_peak_bytes + max(0, excess_bytes)
    told = planner.refusal(lowest, floor_bytes, is_optimizer=is_optimizer)
    found = f"Out of memory under the plan with the lowest peak of all plans, {format_bytes(floor_bytes)}."
    return _refusal(found, f"the device has less memory free for this step; {told.why}", floor_bytes)


def _refusal(found: str, why: str, floor_bytes: int) -> BudgetBelowFloor:
    return BudgetBelowFloor(
        found,
        why=why,
        next=f"free {format_bytes(floor_bytes)} for the step, use a smaller micro-batch, or allow the plan more "
        "(allow=('recompute', 'offload')); everything was put back to its state before the step",
    )


def can_retry(model: nn.Module, plan: Plan) -> bool:
    """True if steps under a plan can be repeated.

    They cannot if the whole model is one compiled unit without a wrapper, because the hook that sees its calls would be
    compiled too.
    """
    return inner_module(model) is not model or all(unit.path for unit in plan.compiled)


class AppliedPlan:
    """The plan that the user applied, and the tighter plans that replace it if a step runs out of memory. New plans are made
    for the step that failed.
    """

    def __init__(self, handle: Handle, model: nn.Module, plan: Plan, agreement: Agreement) -> None:
        self.plan: Plan | None = plan
        self.agreement = agreement
        self.repeats_collectives = COLLECTIVES in plan.allow
        self._first = plan
        # The handle refers to this object. A strong reference back would form a cycle, and a dropped plan would keep its link
        # to host memory or disk until the garbage collector runs.
        self._handle = weakref.proxy(handle)
        self._model = model
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._planner: StepPlanner | None = None
        self._retry = Retry(model, self)

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the step like `Retry.run`. Also remember its call of the model, to plan for that call if the step fails."""
        hook = self._model.register_forward_pre_hook(ModelHook(self._model, self._note), with_kwargs=True)
        try:
            return self._retry.run(function, *args, **kwargs)
        finally:
            hook.remove()
            self._call = None

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and inner_module(module).training:
            self._call = (args, kwargs)

    def tighten(self, *, is_own: bool) -> bool:
        """Switch to a plan with a lower peak, on all ranks together. Return True if one was found."""
        call, self._call = self._call, None
        # Tracing needs memory too, about as much as the lowest peak. If it fails in a single process, keep the plan. With
        # several ranks, all must learn of the failure, so it is raised.
        may_fail = (torch.OutOfMemoryError,) if self.agreement.size == 1 else ()
        if self.agreement.every("the step's call", holds=call is not None) and call is not None:
            with self._handle.paused(), contextlib.suppress(*may_fail):
                self._planner = self._plan_for(*call)
        planner = self._planner
        if planner is None or self.plan is None:
            return False
        room_bytes = planner.halfway_bytes(self.plan)
        if room_bytes is None:
            return False
        assert planner.budget_bytes is not None
        self.plan = planner.solve(planner.budget_bytes, excess_bytes=planner.budget_bytes - room_bytes)
        self._handle.switch(self.plan)
        return True

    def floor(self, *, is_optimizer: bool, is_own: bool) -> BudgetBelowFloor | None:
        """Return the error to raise if a step ran out of memory and no plan has a lower peak."""
        if self._planner is not None:
            return floor_of(self._planner, 0, is_optimizer=is_optimizer)
        floor_bytes = self._first.floor_bytes
        found = f"Out of memory, and the lowest peak that any plan reaches is {format_bytes(floor_bytes)}."
        return _refusal(
            found, "the step was traced to make a tighter plan, and that ran out of memory too", floor_bytes
        )

    def _plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepPlanner:
        """Return a planner for the step that failed, with the options of the applied plan."""
        first, own = self._first, self._first.budget_bytes_of_ranks.get(str(self.agreement.rank))
        options = PlanOptions(
            regions=tuple(dict.fromkeys(region.name for region in first.regions)) or None,
            allow=first.allow,
            max_error=first.max_error or 0.0,
            host_budget_bytes=first.host_budget_bytes,
            link=first.link,
            tiles=first.tiles,
            state=first.state,
            backward_steps=first.backward_steps,
        )
        optimizer = optimizer_in_view(inner_module(self._model))
        task = dataclasses.replace(task_of_call(self._model, args, kwargs), optimizer=optimizer)
        budget = Budget(own or first.budget_bytes or first.predicted_peak_bytes)
        if first.compiled:
            from plimsoll.engine.compiled.units import planned_units  # import inductor only if something is compiled

            units = planned_units(self._model, first.compiled)
            task = dataclasses.replace(task, units=units, compile_options=first.compiled[0].options)
            with task.compiled():
                return compiled_planner(self.agreement, task, options, budget)
        return first_planner(self.agreement, task, options, budget, optimizer_is_optional=True)[0]
