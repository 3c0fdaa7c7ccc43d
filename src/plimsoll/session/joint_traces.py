"""Decides in which training calls steps of new shapes are traced: where traces talk to other ranks, in the same calls on all.

A trace runs the model once more. Where that runs collectives (sharded or split models; not under DDP, whose reducer does not
see traces), a rank that traces alone would wait for ever. So in the calls that follow a trace all ranks tell each other whether
one of them meets a shape that it does not know. If so all trace, each its own batch. After a few calls in which nobody
needed it they stop asking, and no call exchanges anything.

Later a rank that meets an unknown shape waits some seconds for the others to meet one too, in the same call (the short last
batch, a longer sequence from now on). If all do, all begin to ask again. If not, it has waited in vain, which it does a few
times and no more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Trace
from plimsoll.session.agreement import SOLVING_SECONDS, Agreement
from plimsoll.session.batch_shapes import Shapes
from plimsoll.session.shapes import ShapePlans
from plimsoll.session.step_watch import warn_of_unknown
from plimsoll.session.task import BATCH, TrainingTask
from plimsoll.tracing.fsdp2 import holds_gradients_back, splits_activations, waiting_gradients
from plimsoll.tracing.recorder.collectives import names_collective

_CALM_CALLS = 4
"""After so many calls on end in which no rank needed a trace, nobody asks any more."""
_MOST_VAIN = 3
"""So often a rank waits for others that do not come."""


class _Need(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a rank meets a shape that it does not know, and what has to be alike on all for their traces to fit together."""

    is_needed: bool
    facts: dict[str, str]


class JointTraces:
    """Traces what plans for every shape need to know: on all ranks of an agreement together, or for a process on its own.

    Made in the training call whose step is traced first.
    """

    def __init__(self, agreement: Agreement, model: nn.Module) -> None:
        self._agreement = agreement
        self._model = model
        self._turn = _turn_of(model)
        self._calm = self._vain = 0
        self._has_warned = False

    def among(self, trace: Trace) -> Agreement:
        """The ranks that have to trace together: all where one of them talks to others in it, else each by itself."""
        is_silent = not any(names_collective(op.cost_key) for op in trace.ops)
        if self._agreement.every("silent traces", holds=is_silent):
            self._agreement = Agreement(None, "attach")
        return self._agreement

    def begin_anew(self) -> None:
        """Ask again from the next call on; all ranks alike."""
        self._calm = 0

    def plan_for(self, call: int, shapes: Shapes, plans: ShapePlans, task: Callable[[], TrainingTask]) -> Plan:
        """The plan for a training call, asked once. It is traced before if a rank that traces with this one needs that."""
        is_needed = plans.lacks(shapes)
        if not self._is_due(call, task, is_needed=is_needed):
            if is_needed and self._calm >= _CALM_CALLS and not (self._has_warned or plans.bounds(shapes)):
                self._has_warned = True
                warn_of_unknown(shapes)
            return plans.choose(shapes, lambda: task().signature())
        with self.together():
            plans.trace(shapes, task())
            return plans.choose(shapes, lambda: task().signature())

    def _is_due(self, call: int, task: Callable[[], TrainingTask], *, is_needed: bool) -> bool:
        if self._agreement.size == 1:
            return is_needed
        is_asking = self._calm < _CALM_CALLS or (is_needed and self._vain < _MOST_VAIN)
        if not is_asking or _turn_of(self._model) != self._turn:
            return False
        mine = _Need(is_needed=is_needed, facts=facts_of(task()))
        told = self._agreement.gathered(f"shapes in call {call}", mine, _Need)
        if told is None:  # the others make other calls, or know their shapes
            self._calm = _CALM_CALLS
            self._vain += is_needed
            return False
        is_due = any(each.is_needed for each in told) and all(each.facts == mine.facts for each in told)
        self._calm = 0 if is_due else self._calm + 1
        return is_due

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Trace and plan in the block. One rank may plan for longer: the others wait, so that nobody waits in vain after it."""
        return self._agreement.together("planned", more_seconds=SOLVING_SECONDS)


def facts_of(task: TrainingTask) -> dict[str, str]:
    """What has to be the same on ranks that step together: the batch too where they share the work on one."""
    return {what: it for what, it in task.facts().items() if what != BATCH or splits_activations(task.model)}


def _turn_of(model: nn.Module) -> tuple[bool, bool]:
    """Which micro-batch of a step comes, where gradients wait for a later reduction: traces of others are not alike."""
    return holds_gradients_back(model), any(True for _ in waiting_gradients(model))
