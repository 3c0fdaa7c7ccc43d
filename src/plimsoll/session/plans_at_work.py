"""Puts one plan after another to work on a model, on all ranks alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import Plan
from plimsoll.engine.apply import Handle
from plimsoll.errors import PlanMismatch
from plimsoll.session.agreement import Agreement
from plimsoll.session.manage import manage_together

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
