"""Applies a plan to a model, and replaces it by later plans, on all ranks together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ParamSpec, TypeVar

from torch import nn

from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.receipt import RegionOutcome
from plimsoll.engine.apply import Handle
from plimsoll.engine.larger_calls import Listener
from plimsoll.errors import PlanMismatch
from plimsoll.session.agreement import Agreement
from plimsoll.session.manage import manage_together

P = ParamSpec("P")
T = TypeVar("T")


class PlansAtWork:
    """Applies plans to one model, one after the other. ``plan`` is the plan that manages the model now, or ``None`` before the
    first one.
    """

    def __init__(self, agreement: Agreement, model: nn.Module, verify_every: int) -> None:
        self.plan: Plan | None = None
        self._agreement = agreement
        self._model = model
        self._verify_every = verify_every
        self._handle: Handle | None = None
        self._earlier_faults: tuple[Fault, ...] = ()
        self.on_larger_calls: Listener | None = None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults that ``verify_every`` has found so far, under all plans. A fault is a rebuilt value that differed from the
        true one.
        """
        return (*self._earlier_faults, *(() if self._handle is None else self._handle.faults))

    @property
    def recorded_calls(self) -> int:
        """The number of region calls (calls of managed modules) that the current plan's handle has recorded so far."""
        return 0 if self._handle is None else self._handle.recorded_calls

    def take_other_step(self) -> bool:
        """Return whether calls have made values that the current plan does not name, since this method was last called."""
        return self._handle is not None and self._handle.take_other_step()

    def outcomes(self) -> tuple[RegionOutcome, ...]:
        """Return how the calls of each region (managed module) were handled under the current plan: with recomputation, by
        keeping everything, or without hooks. The result is empty before the first plan.
        """
        return () if self._handle is None else self._handle.outcomes()

    def run(self, plan: Plan) -> bool:
        """Apply a plan in place of the current one, on all ranks together. Return True if the decisions of the two plans
        differ.
        """
        before, self.plan = self.plan, plan
        if self._handle is not None and before is not None:
            if before.regions is plan.regions or before.effect == plan.effect:
                return False
            # Switching keeps the records of regions. Under a plan that was applied before, nothing is recorded again.
            # The fingerprints differ too if other parameters are frozen. Regions still have records of both.
            is_for_this = plan.fingerprint != before.fingerprint and not self._handle.has_moved()
            try:
                self._handle.switch(plan, is_for_this=is_for_this)
            except PlanMismatch:  # the plan needs another link
                self.remove()
        if self._handle is None:
            self._handle = manage_together(self._agreement, self._model, plan, verify_every=self._verify_every)
            if self.on_larger_calls is not None:
                self._handle.on_larger_calls(self.on_larger_calls)
        self._handle.begin_step()
        return True

    def begin_step(self, region: str) -> None:
        """Prepare the plan's regions for a step that begins with a call of this region instead of the model."""
        if self._handle is not None:
            self._handle.keep_wrapped(region)
            self._handle.begin_step()

    @contextlib.contextmanager
    def trying(self, plan: Plan) -> Iterator[None]:
        """Apply another plan inside the ``with`` block. Recordings that regions make there are kept."""
        before = self.plan
        self.run(plan)
        try:
            yield
        finally:
            if before is not None:
                self.run(before)

    def has_moved(self) -> bool:
        """Return True if regions have other module paths than when the plan was applied, for instance because a list of layers
        was replaced.
        """
        return self._handle is not None and self._handle.has_moved()

    def remove(self) -> None:
        """Remove the plan from the model. Calling it twice does no harm."""
        if self._handle is not None:
            self._earlier_faults = self.faults
            self._handle.remove()
            self._handle = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model without a plan inside the ``with`` block, and apply the plan again at its end."""
        with contextlib.nullcontext() if self._handle is None else self._handle.paused():
            yield
