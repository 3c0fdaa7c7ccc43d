"""Warns if training under an applied plan exceeds the plan's budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from plimsoll.artifacts.plan import Plan
from plimsoll.engine.apply import Handle
from plimsoll.session.account import planned_state_bytes
from plimsoll.session.batch_shapes import shapes_of
from plimsoll.session.messages import log_recurrence, warn_of_overrun
from plimsoll.session.said_overruns import SaidOverruns
from plimsoll.session.situations import MeteredSituations, Situation, planned_situation
from plimsoll.session.step_context import CompileSafeHook
from plimsoll.session.step_levels import is_more
from plimsoll.session.step_watch import StepWatch
from plimsoll.tracing.ddp import inner_module


class BudgetWatch:
    """Measures training steps under an applied plan, and warns if a step exceeds the plan's budget. It warns again if the peak
    has grown, and logs other recurrences.

    The first step is always measured: a batch of the planned shape may still lead to larger sizes inside the model.
    """

    def __init__(self, model: nn.Module, handle: Handle, plan: Plan, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._said = SaidOverruns()
        self._state_bytes = planned_state_bytes(plan)
        self._metered = MeteredSituations([planned_situation(plan.signature, plan.in_flight)])
        self._metered.expect()
        self._held_bytes = 0
        self.is_due: Callable[[], bool] = lambda: True
        """Whether the next step runs as planned, so that its peak says something. A plan that steps parameters in backward
        first watches a step that does not.
        """
        self._handle = handle
        self._steps = StepWatch(
            model, self._before_call, self._after_step, self._before_parts, hook=CompileSafeHook, shapes=shapes_of
        )
        modules = {} if plan.compiled else dict(inner_module(model).named_modules())
        self._steps.watch_parts({each.name: modules[each.name] for each in plan.regions if each.name in modules})
        handle.on_larger_calls(self._steps.larger_call)

    @property
    def peak_bytes(self) -> int:
        """The highest measured peak of all steps so far, or 0 until a step was measured."""
        return self._steps.peak_bytes

    def remove(self) -> None:
        """Remove the watch from the model."""
        self._steps.end_step()
        self._steps.remove()

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        if not self.is_due():
            return
        held = self._steps.held
        held_bytes = held.bytes + held.batch_bytes + max(self._state_bytes, held.state_bytes)
        if is_more(held_bytes, self._held_bytes):
            self._held_bytes = held_bytes
            self._metered.expect()
        self._steps.meter_if_new(args, kwargs, situation, self._metered)

    def _before_parts(self, part: str, args: tuple[Any, ...], kwargs: dict[str, Any], situation: Situation) -> None:
        self._handle.begin_step()
        self._steps.meter_if_new(args, kwargs, situation, self._metered)

    def _after_step(self) -> None:
        peak_bytes, cause = self._steps.take_peak(self._state_bytes, self._metered, self._budget_bytes)
        levels = self._steps.levels
        levels.expected_peak_bytes = max(levels.expected_peak_bytes, peak_bytes)
        if peak_bytes <= self._budget_bytes:
            return
        if self._said.is_new(peak_bytes):
            warn_of_overrun(
                peak_bytes,
                self._budget_bytes,
                cause,
                "plan with such a step (if gradients accumulate, plan after the backward of the first micro-batch, so that "
                "existing gradients are counted), or use plimsoll.attach, which plans for such steps itself",
            )
        elif self._said.is_logged():
            log_recurrence(peak_bytes, self._budget_bytes, self._said.recurrences, cause)
