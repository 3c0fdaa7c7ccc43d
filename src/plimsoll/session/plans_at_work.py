"""Puts one plan after another to work on a model, on all ranks alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import COLLECTIVES, Plan
from plimsoll.engine.apply import Handle, RemovedAtEnd
from plimsoll.errors import PlanMismatch
from plimsoll.session.agreement import Agreement
from plimsoll.session.manage import manage_together
from plimsoll.session.options import Budget, PlanOptions
from plimsoll.session.step_watch import MeteredSituations, StepWatch

Decided = tuple[tuple[object, ...], ...]


class PlansAtWork:
    """The plan that manages a model, and can be exchanged for another one. ``plan`` is ``None`` before the first."""

    def __init__(self, agreement: Agreement, model: nn.Module, verify_every: int) -> None:
        self.plan: Plan | None = None
        self._agreement = agreement
        self._model = model
        self._verify_every = verify_every
        self._handle: Handle | None = None
        self._earlier_faults: tuple[Fault, ...] = ()

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What ``verify_every`` has shown so far, under every plan."""
        return (*self._earlier_faults, *(() if self._handle is None else self._handle.faults))

    def run(self, plan: Plan) -> bool:
        """Put a plan to work, on all ranks alike; whether it decides otherwise than the one before it."""
        before, self.plan = self.plan, plan
        if self._handle is not None and before is not None:
            if before.regions is plan.regions or decided(before) == decided(plan):
                return False
            try:
                self._handle.switch(plan)
            except PlanMismatch:  # it needs another link
                self.remove()
        if self._handle is None:
            self._handle = manage_together(self._agreement, self._model, plan, verify_every=self._verify_every)
        self._handle.begin_step()
        return True

    @contextlib.contextmanager
    def trying(self, plan: Plan) -> Iterator[None]:
        """Have another plan at work inside the block. What regions record in it stays."""
        before = self.plan
        self.run(plan)
        try:
            yield
        finally:
            if before is not None:
                self.run(before)

    def remove(self) -> None:
        """Undo everything; harmless when called twice."""
        if self._handle is not None:
            self._earlier_faults = self.faults
            self._handle.remove()
            self._handle = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model unmanaged inside the block."""
        with contextlib.nullcontext() if self._handle is None else self._handle.paused():
            yield


class AttachedBudget(RemovedAtEnd):
    """A budget at work on a model whose batches are not known yet; how it plans is left to eager and to compiled models."""

    _steps: StepWatch

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
        self.model, self.agreement = model, agreement
        self.repeats_collectives = COLLECTIVES in options.allow
        self._budget, self._options, self._optimizer = budget, options, optimizer
        self._work = PlansAtWork(agreement, model, verify_every)
        self._metered = MeteredSituations()
        self._calls = 0

    @property
    def plan(self) -> Plan | None:
        """The plan at work; ``None`` until the first training step has begun, and final after it."""
        return self._work.plan

    @property
    def is_trying(self) -> bool:
        """Whether the model runs for a plan to be made: such runs are none of the training's."""
        return self._steps.is_looking_away

    @property
    def peak_bytes(self) -> int:
        """The most that a step was measured to take under a plan for the budget; 0 until one was measured."""
        return self._steps.peak_bytes

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What ``verify_every`` has shown so far, under every plan that was at work."""
        return self._work.faults


def decided(plan: Plan) -> Decided:
    """What a plan does to its regions, without what it says about that: prices and reasons change with the budget."""
    return tuple(
        (
            region.name,
            region.call,
            region.is_boundary_dropped,
            *((each.value, each.decision, each.form) for each in region.decisions),
        )
        for region in plan.regions
    )
