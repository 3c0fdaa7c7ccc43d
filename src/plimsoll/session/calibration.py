"""What ``attach`` needs to calibrate on a user's own training step: the call as a batch, a loss for it, and its bytes.

The peak is measured from the model's forward to the next call of the model, in two windows: until the optimizer steps, and
from there on. The optimizer is noticed by torch's global step hooks, which are taken out again when the step has been seen.
On a CPU measuring needs torch's profiler, which there is one of: a user's own always has precedence, and a step during
which it ran counts as not measured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Category, Phase
from plimsoll.errors import BudgetBelowFloor, InvalidLoss
from plimsoll.tracing.ddp import bucket_bytes, inner_module
from plimsoll.tracing.meters.memory import MeasurementLost, PeakMeter, storage_bytes
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.torch_internals import is_profiled, is_profiler_on
from plimsoll.units import format_bytes

_BEFORE_OPTIMIZER = "start"
_OPTIMIZER = "optimizer"


class OptimizerWatch:
    """Notices the first step of an optimizer that trains one of the given parameters, and the state that it has then."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        on_step: Callable[[], None],
    ) -> None:
        self._parameters = frozenset(map(id, parameters))
        self._on_step = on_step
        self.has_stepped = False
        self.bytes_before = _state_bytes(optimizer)
        self.bytes_after = self.bytes_before
        self._hooks: list[Any] = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Take the hooks out; harmless when called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.has_stepped and self._is_ours(optimizer):
            self.bytes_before = _state_bytes(optimizer)
            self._on_step()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self.has_stepped = True
            self.bytes_after = _state_bytes(optimizer)
            self.remove()

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(
            id(parameter) in self._parameters for group in optimizer.param_groups for parameter in group["params"]
        )


class MeasuredStep:
    """The bytes of one step from the forward of the model on, which is about to run. ``end`` says whether there is a
    measurement.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._parameters = list(model.parameters())
        self._device = self._parameters[0].device
        batch = output_tensors((args, kwargs))
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self._versions = [parameter._version for parameter in self._parameters]
        held = [*self._parameters, *model.buffers(), *gradients, *batch]
        self.static_bytes = storage_bytes(held, self._device) + bucket_bytes(model)
        self.has_failed = False
        self.has_trained = False
        """Set by those who know; otherwise gradients, or parameters that were written, tell."""
        self._meter: PeakMeter | None = None
        if not is_profiled():
            self._meter = PeakMeter(self._device)
            self._meter.__enter__()

    def note_optimizer(self) -> None:
        """The optimizer is about to step."""
        if self._meter is not None:
            self._meter.mark(_OPTIMIZER)

    def end(self) -> bool:
        """Stop measuring; whether a whole step, forward and backward, was measured."""
        meter = self._meter
        if meter is None:
            return False
        if self._device.type == "cpu" and (is_profiled() or not is_profiler_on()):
            self._meter = None  # somebody else's profiler has taken over; stopping ours would stop theirs
            return False
        try:
            meter.__exit__(None, None, None)
        except MeasurementLost:
            self._meter = None
            return False
        return not self.has_failed and (self.has_trained or self._has_trained())

    @property
    def step_peak_bytes(self) -> int:
        """The peak until the optimizer stepped, all that was there before included, but for optimizer state."""
        assert self._meter is not None
        return self.static_bytes + self._meter.window(_BEFORE_OPTIMIZER).peak_bytes

    @property
    def optimizer_peak_bytes(self) -> int:
        """The peak from the optimizer's step on, without the state that was there before; 0 where none stepped."""
        assert self._meter is not None
        peaks = [window.peak_bytes for window in self._meter.windows if window.name == _OPTIMIZER]
        return self.static_bytes + peaks[-1] if peaks else 0

    @property
    def left_bytes(self) -> int:
        """What the step left behind, optimizer state included."""
        assert self._meter is not None
        return self._meter.resident_bytes

    def _has_trained(self) -> bool:
        """Whether there are gradients, or were: parameters have been written since."""
        return any(parameter.grad is not None for parameter in self._parameters) or any(
            parameter._version != version for parameter, version in zip(self._parameters, self._versions, strict=True)
        )


def unseen_bytes(step: MeasuredStep, watch: OptimizerWatch, plan: Plan) -> int:
    """By how much the coming steps will exceed the plan's prediction: what its trace did not see, and what stays.

    The step was measured under this plan, whose prediction includes the state of the optimizer that it was made with,
    if any.
    """
    state_bytes = max(watch.bytes_after, planned_state_bytes(plan))
    over_bytes = step.step_peak_bytes + state_bytes - _predicted_before_optimizer(plan)
    left_bytes = max(0, step.left_bytes - (watch.bytes_after - watch.bytes_before))
    return max(0, over_bytes + left_bytes)


def planned_state_bytes(plan: Plan) -> int:
    """The optimizer state that a plan counts."""
    return plan.classes.get(Category.OPTIMIZER_STATE, 0)


def _predicted_before_optimizer(plan: Plan) -> int:
    peaks = [point.bytes for point in plan.timeline if not point.moment.startswith(Phase.OPTIMIZER)]
    return max(peaks, default=plan.predicted_peak_bytes)


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    tensors = output_tensors(list(optimizer.state.values()))
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    return sum(storage_bytes(tensors, device) for device in {device.type for device in devices})


def as_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as a batch; where some are positional and some are not, by the names of ``forward``."""
    if args and kwargs:
        return dict(inspect.signature(inner_module(model).forward).bind(*args, **kwargs).arguments)
    return args if args else kwargs


def refuse_optimizer_above(budget_bytes: int, optimizer_peak_bytes: int) -> None:
    """Refuse a budget that the optimizer's step alone exceeds: no decision about activations changes that."""
    if optimizer_peak_bytes > budget_bytes:
        raise BudgetBelowFloor(
            f"budget {format_bytes(budget_bytes)} is below what the optimizer's step takes, "
            f"{format_bytes(optimizer_peak_bytes)}.",
            why="parameters, gradients, the optimizer's state and its temporaries are there together in its step, and no "
            "decision about activations changes that",
            next=f'budget "{optimizer_peak_bytes}B", or an optimizer with less state, or foreach=False',
        )


def stand_in_loss(output: Any) -> torch.Tensor:
    """The model's own loss; else a sum of what it returns, since the user's loss is not known in its first call.

    Raises:
        InvalidLoss: nothing that it returns can be trained.
    """
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
