"""A model and a budget in; the model managed from its first training step on, with no batch at hand, out.

The first call of the model in training is traced on the spot and runs under the plan with the lowest peak that there is.
What that step allocates in truth (the user's loss, the optimizer's state) is measured until the next call, and the plan
for the budget is solved with the difference taken off. Later steps run that plan.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Category, Trace
from plimsoll.errors import BudgetBelowFloor, InvalidLoss
from plimsoll.measuring.memory import PeakMeter
from plimsoll.pipeline.plans import resolve_budget, trace_and_cost
from plimsoll.planning.solve import solve
from plimsoll.recording.calling import output_tensors
from plimsoll.runtime.apply import Handle, apply_plan
from plimsoll.units import format_bytes, parse_bytes


class Attachment:
    """A budget at work on a model. ``plan`` is ``None`` until the first training step has begun, and final after it."""

    def __init__(
        self,
        model: nn.Module,
        budget: int | str,
        *,
        optimizer: torch.optim.Optimizer | None,
        regions: Sequence[str] | None,
    ) -> None:
        self.model = model
        self.plan: Plan | None = None
        self._budget = budget
        self._asked_bytes = None if budget == "auto" else parse_bytes(budget)
        self._optimizer = optimizer
        self._regions = regions
        self._handle: Handle | None = None
        self._meter: PeakMeter | None = None
        self._finished: PeakMeter | None = None
        self._traced: tuple[Trace, Costs] | None = None
        self._is_tracing = False
        self._hook: Any = model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)

    @property
    def is_calibrating(self) -> bool:
        """Whether the first step is still under way."""
        return self._meter is not None

    def remove(self) -> None:
        """Undo everything; harmless when called twice."""
        self._stop_meter()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_tracing or not torch.is_grad_enabled() or not module.training:
            return
        if self._traced is None:
            self._begin(args, kwargs)
        elif self.is_calibrating:
            self._settle()

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace this very call and let it run at the lowest peak, measured."""
        self._is_tracing = True
        try:
            self._traced = trace_and_cost(
                self.model,
                _as_batch(self.model, args, kwargs),
                loss=_stand_in_loss,
                optimizer=self._optimizer,
                regions=self._regions,
                progress=None,
            )
        finally:
            self._is_tracing = False
        trace, costs = self._traced
        budget_bytes = resolve_budget(self._budget, self._asked_bytes, costs)
        assert budget_bytes is not None
        self._budget_bytes = budget_bytes
        self.plan = self._lowest(trace, costs)
        self._handle = apply_plan(self.model, self.plan)
        self._handle.begin_step()
        if torch.autograd.profiler._is_profiler_enabled:
            warnings.warn("plimsoll: a profiler is running, so the first step is not measured", stacklevel=2)
            self._settle()
            return
        self._meter = PeakMeter(next(self.model.parameters()).device)
        self._meter.__enter__()

    def _lowest(self, trace: Trace, costs: Costs) -> Plan:
        """The plan with the smallest peak: the budget's own optimum is at the floor."""
        probe = solve(trace, costs, budget_bytes=None, strategy="none")
        return solve(trace, costs, budget_bytes=max(probe.floor_bytes, 1))

    def _settle(self) -> None:
        """The first step is over: solve for the budget with what the trace did not see taken off."""
        assert self._traced is not None
        assert self.plan is not None
        trace, costs = self._traced
        excess_bytes = self._unseen_bytes(self.plan)
        try:
            final = solve(trace, costs, budget_bytes=self._budget_bytes, excess_bytes=excess_bytes)
        except BudgetBelowFloor as error:
            self._hook.remove()
            self._hook = None
            raise BudgetBelowFloor(
                error.found,
                why=f"{error.why}; measured in the first step, which ran at the lowest peak"
                f" and needed {format_bytes(excess_bytes)} more than its trace",
                next=error.next,
            ) from error
        assert self._handle is not None
        self._handle.remove()
        self.plan = final
        self._handle = apply_plan(self.model, final)
        self._handle.begin_step()

    def _unseen_bytes(self, calibration: Plan) -> int:
        """What the first step took beyond its prediction, and what it left behind (optimizer state, kept gradients)."""
        if self._meter is None:
            return 0
        static_bytes = sum(
            size
            for category, size in calibration.classes.items()
            if category in (Category.PARAMETER, Category.BUFFER, Category.INPUT)
        )
        self._stop_meter()
        meter = self._finished
        assert meter is not None
        known_state = calibration.classes.get(Category.OPTIMIZER_STATE, 0)
        left_bytes = max(0, meter.resident_bytes - known_state)
        over_bytes = static_bytes + known_state + meter.peak_bytes - calibration.predicted_peak_bytes
        return max(0, over_bytes, left_bytes)

    def _stop_meter(self) -> None:
        self._finished, self._meter = self._meter, None
        if self._finished is not None:
            self._finished.__exit__(None, None, None)


def attach(
    model: nn.Module,
    budget: int | str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    regions: Sequence[str] | None = None,
) -> Attachment:
    """Keep the training of ``model`` under ``budget`` without a batch at hand.

    The first training step calibrates at the lowest memory that the engine can reach; from the second on the model runs
    the plan that is cheapest under the budget. Evaluation (``model.eval()`` or no gradients) is left alone.

    Args:
        model: the model as it will be trained.
        budget: as for ``plimsoll.plan``.
        optimizer: lets the plan count its state before it exists; without it the first step measures it.
        regions: as for ``plimsoll.plan``.

    Returns:
        An attachment with ``plan`` and ``remove()``; also a context manager.

    Raises:
        InvalidBudget: at once.
        BudgetBelowFloor, InvalidModel, …: in the first training call, with the model unmanaged and unchanged.

    Example:
        >>> handle = plimsoll.attach(model, budget="8GiB")  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss = model(**batch).loss
        ...     loss.backward()
    """
    return Attachment(model, budget, optimizer=optimizer, regions=regions)


def _as_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and kwargs:
        return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    return args if args else kwargs


def _stand_in_loss(output: Any) -> torch.Tensor:
    """The model's own loss; else a sum of what it returns, since the user's loss is not known in its first call."""
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.numel() == 1 and own.requires_grad:
        return own
    parts = [t.float().sum() for t in output_tensors(output) if t.requires_grad and t.is_floating_point()]
    if not parts:
        raise InvalidLoss(
            f"The output of the model ({type(output).__name__}) does not depend on any parameter.",
            why="attach calibrates on the first training call, and nothing in it can be trained",
            next="unfreeze parameters, or use plimsoll.plan with loss=",
        )
    return torch.stack(parts).sum()
