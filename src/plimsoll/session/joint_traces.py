"""Decides which training calls trace new shapes. If traces run collectives, all ranks trace in the same calls.

A trace runs the model once more. If the model runs collectives, a rank that traces alone would wait for ever. This is so for
sharded and split models, and not for DDP, whose reducer does not see traces. So in the calls after a trace, all ranks exchange
whether one of them has a batch of unknown shape. If one does, all ranks trace, each its own batch. After a few calls without
such a batch, the ranks stop asking, and calls exchange nothing.

Later, a rank with an unknown shape waits some seconds for the others to have one in the same call (the short last batch, or a
longer sequence from now on). If all do, all ranks trace, and ask again in the next calls. If not all do, the wait was useless.
A rank waits like this at most three times.
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
from plimsoll.session.messages import warn_of_unknown
from plimsoll.session.shapes import ShapePlans
from plimsoll.session.task import BATCH, TrainingTask
from plimsoll.tracing.fsdp2 import holds_gradients_back, splits_activations, waiting_gradients
from plimsoll.tracing.recorder.collectives import names_collective

_CALM_CALLS = 4
"""After this many successive calls without a trace on any rank, the ranks stop asking."""
_MOST_VAIN = 3
"""A rank waits for the others at most this many times without an answer. Each wait takes some seconds of training."""


class _Need(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks send each other to decide whether they trace, as data: whether this rank has a batch of unknown shape, and
    facts that must be equal on all ranks that trace together.
    """

    is_needed: bool
    facts: dict[str, str]


class JointTraces:
    """Decides which training calls trace new shapes, and traces them. All ranks of an agreement trace together; a single
    process traces alone.

    Create it in the training call whose step is traced first.
    """

    def __init__(self, agreement: Agreement, model: nn.Module) -> None:
        self._agreement = agreement
        self._model = model
        self._turn = _turn_of(model)
        self._calm = self._vain = 0
        self._has_warned = False

    def among(self, trace: Trace) -> Agreement:
        """Return the ranks that must trace together: all ranks if any rank's trace runs collectives, else only this process."""
        is_silent = not any(names_collective(op.cost_key) for op in trace.ops)
        if self._agreement.every("silent traces", holds=is_silent):
            self._agreement = Agreement(None, "attach")
        return self._agreement

    def begin_anew(self) -> None:
        """Exchange again from the next call on whether some rank has an unknown shape. All ranks must call this together."""
        self._calm = 0

    def plan_for(self, call: int, shapes: Shapes, plans: ShapePlans, task: Callable[[], TrainingTask]) -> Plan:
        """Return the plan for a training call. If a rank that traces with this one has a batch of unknown shape, trace
        first.
        """
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
        # It is not enough to ask only if this rank needs a trace: a rank whose batches never change would never ask, and the
        # others would wait for it.
        is_asking = self._calm < _CALM_CALLS or (is_needed and self._vain < _MOST_VAIN)
        if not is_asking or _turn_of(self._model) != self._turn:
            return False
        mine = _Need(is_needed=is_needed, facts=facts_of(task()))
        told = self._agreement.gathered(f"shapes in call {call}", mine, _Need)
        if told is None:  # some rank makes other calls, or knows its shapes and does not ask
            self._calm = _CALM_CALLS
            self._vain += is_needed
            return False
        is_due = any(each.is_needed for each in told) and all(each.facts == mine.facts for each in told)
        self._calm = 0 if is_due else self._calm + 1
        return is_due

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for tracing and planning. At its end, wait for the other ranks.

        The wait allows for a rank that solves for longer. Otherwise the next exchange could time out.
        """
        return self._agreement.together("planned", more_seconds=SOLVING_SECONDS)


def facts_of(task: TrainingTask) -> dict[str, str]:
    """Return the facts of a step that must be equal on ranks that run it together, as text by name. They include the batch's
    shapes if the ranks split its activations.
    """
    return {what: it for what, it in task.facts().items() if what != BATCH or splits_activations(task.model)}


def _turn_of(model: nn.Module) -> tuple[bool, bool]:
    """Return the kind of the next micro-batch as two booleans: whether it leaves gradients that are reduced over ranks later,
    and whether such gradients wait already.

    Traces of different kinds differ, so all shapes are traced in the kind of the first trace.
    """
    return holds_gradients_back(model), any(True for _ in waiting_gradients(model))
