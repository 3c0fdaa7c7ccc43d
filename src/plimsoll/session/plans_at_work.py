"""Puts one plan after another to work on a model. Going back to decisions that were at work before records nothing again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from plimsoll.artifacts.fault import Fault
from plimsoll.artifacts.plan import Plan
from plimsoll.engine.apply import Handle
from plimsoll.session.agreement import Agreement
from plimsoll.session.manage import manage_together

_Decided = tuple[tuple[object, ...], ...]
_MOST_PAUSED = 4
"""So many plans besides the one at work keep what they have recorded; the one that was not used for longest goes first."""


class PlansAtWork:
    """The plan that manages a model now, and those that did before. ``plan`` is ``None`` before the first."""

    def __init__(self, agreement: Agreement, model: nn.Module, verify_every: int) -> None:
        self.plan: Plan | None = None
        self._agreement = agreement
        self._model = model
        self._verify_every = verify_every
        self._handle: Handle | None = None
        self._paused: dict[_Decided, Handle] = {}
        self._earlier_faults: tuple[Fault, ...] = ()

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What ``verify_every`` has shown so far, under every plan."""
        handles = [*self._paused.values(), *filter(None, [self._handle])]
        return (*self._earlier_faults, *(fault for handle in handles for fault in handle.faults))

    def run(self, plan: Plan) -> bool:
        """Put a plan to work, on all ranks alike; whether it decides otherwise than the one before it."""
        before, self.plan = self.plan, plan
        if self._handle is not None and before is not None and _decided(before) == _decided(plan):
            return False
        if self._handle is not None and before is not None:
            self._handle.pause()
            self._paused[_decided(before)], self._handle = self._handle, None
        known = self._paused.pop(_decided(plan), None)
        if self._agreement.every("plan is known", holds=known is not None):
            assert known is not None
            known.resume()
            self._handle = known
        else:
            if known is not None:
                self._drop(known)
            self._handle = manage_together(self._agreement, self._model, plan, verify_every=self._verify_every)
        while len(self._paused) > _MOST_PAUSED:
            self._drop(self._paused.pop(next(iter(self._paused))))
        self._handle.begin_step()
        return True

    def remove(self) -> None:
        """Undo everything; harmless when called twice."""
        for handle in [*self._paused.values(), *filter(None, [self._handle])]:
            self._drop(handle)
        self._handle, self._paused = None, {}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model unmanaged inside the block."""
        with contextlib.nullcontext() if self._handle is None else self._handle.paused():
            yield

    def _drop(self, handle: Handle) -> None:
        self._earlier_faults = (*self._earlier_faults, *handle.faults)
        handle.remove()


def _decided(plan: Plan) -> _Decided:
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
