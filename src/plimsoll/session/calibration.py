"""What ``attach`` needs to calibrate on the user's own training step: the call as a batch, a stand-in loss, and measured bytes.

The peak is measured from the model's forward to the next call of the model, in two windows: until the optimizer steps, and from
there on. Torch's global step hooks report the optimizer's step; they are removed once the step was seen. On a CPU, measuring
needs torch's profiler, and only one can run at a time. A user's own profiler always has precedence, and a step during which it
ran counts as not measured.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.trace import Category, Phase
from plimsoll.errors import InvalidLoss
from plimsoll.session.task import TrainingTask, detached
from plimsoll.tracing.ddp import bucket_bytes, has_rebuilt_buckets, inner_module
from plimsoll.tracing.fsdp2 import Gathered, every_gradient, every_parameter
from plimsoll.tracing.local_tensors import beside_weights, dense_parts, gradient_of
from plimsoll.tracing.meters.memory import (
    MeasurementLost,
    PeakMeter,
    instances_of,
    live_tensors,
    storage_bytes,
    storage_of,
)
from plimsoll.tracing.meters.workspaces import release_library_workspaces
from plimsoll.tracing.recorder.calling import output_tensors, own_loss
from plimsoll.tracing.recorder.untouched import returned_tensors
from plimsoll.tracing.torch_internals import is_profiled, is_profiler_on
from plimsoll.tracing.zero import held_by_deepspeed, optimizer_inside

FORWARD, LOSS, BACKWARD, OPTIMIZER = "forward", "loss", "backward", "optimizer"
"""The parts of a measured step. LOSS lasts from the end of a forward until gradients reach the forward's output."""
_SEEN: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
"""The optimizer that `optimizer_in_view` found for each model."""


class CallStanding(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one rank's calibration.

    ``is_new``: its batch is not covered by a traced one. ``is_same``: its batch has the traced shapes. ``is_measured``: the
    first step was measured. ``in_flight``: how many graphs waited for a backward.
    """

    signature: str
    is_new: bool
    is_same: bool
    is_measured: bool
    in_flight: int


_ABANDONED: list[Any] = []
"""Hooks of watches that were garbage-collected. They do nothing and are removed when the next watch is made: torch may be
iterating over its hooks at the moment when a watch is collected.
"""


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls the method without keeping the method's object alive."""
    found = weakref.WeakMethod(method)

    def hook(*given: Any) -> None:
        living = found()
        if living is not None:
            living(*given)

    return hook


class OptimizerWatch:
    """Watches the steps of optimizers that train one of the given parameters, and the size of their state.

    ``on_step`` is called before the first step of an optimizer, ``after_step`` after every step. Neither may remove optimizer
    hooks, because torch is iterating over them at that moment.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizers: Iterable[Optimizer] = (),
        on_step: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self._parameters = frozenset(map(id, parameters))
        self._on_step, self._after_step = on_step, after_step
        self.has_stepped = False
        self.is_settled = False
        """Whether the last step did not change the size of the state."""
        self._growth_bytes = 0
        self._before = weakref.WeakKeyDictionary({each: _state_bytes(each) for each in optimizers})
        self._now = weakref.WeakKeyDictionary(self._before)
        while _ABANDONED:
            _ABANDONED.pop().remove()
        # Torch keeps hooks of all optimizers forever. Weak hooks let a model be freed together with its budget.
        self._hooks: list[Any] = [
            register_optimizer_step_pre_hook(_weakly(self._begins)),
            register_optimizer_step_post_hook(_weakly(self._ends)),
        ]
        weakref.finalize(self, _ABANDONED.extend, self._hooks).atexit = False

    def remove(self) -> None:
        """Remove the hooks. Calling it twice does no harm."""
        while self._hooks:
            self._hooks.pop().remove()

    @property
    def bytes_before(self) -> int:
        """State before the first step that was seen."""
        return sum(self._before.values())

    @property
    def bytes_now(self) -> int:
        """State after the last step that was seen."""
        return sum(self._now.values())

    @property
    def bytes_after(self) -> int:
        """State after the last step that was seen; if steps still add to it, the state expected after the next step."""
        return self.bytes_now + self._growth_bytes

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer) and not self.has_stepped:
            self._before[optimizer] = self._now[optimizer] = _state_bytes(optimizer)
            if self._on_step is not None:
                self._on_step()

    def _ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        known_bytes = self._now.get(optimizer, 0)
        self._now[optimizer] = now_bytes = _state_bytes(optimizer)
        self.is_settled = self.has_stepped and now_bytes == known_bytes
        self._growth_bytes = max(0, now_bytes - known_bytes) if known_bytes else 0
        self.has_stepped = True
        if self._after_step is not None:
            self._after_step()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return trains(optimizer, self._parameters)


class CountedState:
    """The optimizer state that was subtracted from the budget."""

    def __init__(self) -> None:
        self.bytes = 0
        self._has_stepped = False

    def begin(self, watch: OptimizerWatch, plan: Plan) -> None:
        """Start with the state that exists now, or with the state that the plan counts if that is larger."""
        self.bytes, self._has_stepped = max(watch.bytes_after, planned_state_bytes(plan)), watch.has_stepped

    def is_behind(self, watch: OptimizerWatch) -> bool:
        """True if there is more state now, or if an optimizer has made its first step since."""
        return watch.has_stepped and (not self._has_stepped or watch.bytes_after > self.bytes)

    def take_new(self, watch: OptimizerWatch) -> int:
        """Count the additional state and return its bytes."""
        new_bytes = max(0, watch.bytes_after - self.bytes)
        self._has_stepped = True
        self.bytes += new_bytes
        return new_bytes

    def take_found(self, found_bytes: int) -> int:
        """Count optimizer state that was found, and return how many bytes of it are new."""
        new_bytes = max(0, found_bytes - self.bytes)
        self.bytes += new_bytes
        return new_bytes


def trains(optimizer: Optimizer, parameters: Container[int]) -> bool:
    """True if an optimizer holds one of the parameters, given by ``id``."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


def state_bytes_of(model: nn.Module) -> int:
    """Return the bytes of state of all optimizers in this process that train a parameter of the model."""
    parameters = frozenset(map(id, every_parameter(model)))
    found = (thing for thing in instances_of(Optimizer) if "param_groups" in vars(thing))
    return sum(_state_bytes(optimizer) for optimizer in found if trains(optimizer, parameters))


def optimizer_in_view(model: nn.Module, named: Optimizer | None = None) -> Optimizer | None:
    """The optimizer that the user has named, else the only one in this process that trains ``model``: its state can be counted
    ahead.

    The named one held a parameter of the model once. A model that has exchanged all of them since trains on without it.
    One that was found before is not looked for again: collecting garbage and going through all objects takes as long as a
    small step.
    """
    inside = optimizer_inside(inner_module(model))
    if inside is not None:
        return inside
    parameters = frozenset(map(id, every_parameter(model)))
    if named is not None and trains(named, parameters):
        return named
    before = _SEEN[model]() if model in _SEEN else None
    if before is not None and trains(before, parameters):
        return before
    gc.collect()
    # Wrappers around optimizers do not have their own parameter groups.
    found = [thing for thing in instances_of(Optimizer) if "param_groups" in vars(thing)]
    ours: list[Optimizer] = [optimizer for optimizer in found if trains(optimizer, parameters)]
    if len(ours) != 1:
        return None
    _SEEN[model] = weakref.ref(ours[0])
    return ours[0]


class Carried:
    """Finds the tensors that a loop keeps from step to step outside of model and optimizer, such as a list of perturbed
    weights.

    These are storages that did not exist at ``note_before``. Other batches that wait to be trained on do not count.
    """

    def __init__(self) -> None:
        self._before: dict[int, StorageWeakRef] = {}

    def note_before(self, device: torch.device) -> None:
        """Remember all storages that exist now. They are not the loop's, or the user subtracts them from the budget."""
        live = live_tensors(device.type)
        self._before = {storage_of(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in live}

    def found(self, device: torch.device, batch: Any) -> list[torch.Tensor]:
        """Return the tensors whose storage was made since `note_before`.

        The weak references in `_before` keep the addresses of earlier storages from being reused, so an address identifies one.
        """
        states = (
            output_tensors(list(each.state.values())) for each in instances_of(Optimizer) if "state" in vars(each)
        )
        known = {storage_of(part) for tensors in states for tensor in tensors for part in dense_parts(tensor)}
        looks = {(tensor.shape, tensor.dtype) for tensor in output_tensors(batch)}
        return [
            tensor
            for tensor in live_tensors(device.type)
            if storage_of(tensor) not in self._before
            and storage_of(tensor) not in known
            and (tensor.shape, tensor.dtype) not in looks
        ]


class MeasuredStep:
    """Measures the bytes of one step from the model's forward on, which is about to run. ``end`` returns whether it
    succeeded.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], carried: Carried | None = None
    ) -> None:
        self._parameters = every_parameter(model)
        self._device = self._parameters[0].device
        self._versions = [parameter._version for parameter in self._parameters]
        held = held_tensors(model, args, kwargs)
        held += [] if carried is None else carried.found(self._device, (args, kwargs))
        self._model = model
        self._bucket_bytes, self._has_rebuilt_before = bucket_bytes(model), has_rebuilt_buckets(model)
        self._replaced_bytes = 0
        self.static_bytes = storage_bytes(held, self._device) + self._bucket_bytes
        self.has_failed = False
        self.has_trained = False
        """Set by the owner if a backward has run. Otherwise `end` looks for gradients or for parameters that were written."""
        self._meter: PeakMeter | None = None
        if not (self._device.type == "cpu" and (is_profiled() or is_profiler_on())):
            release_library_workspaces(self._device)
            self._meter = PeakMeter(self._device, held=held)
            self._meter.__enter__()

    def note(self, part: str) -> None:
        """Attribute what follows to ``part``. After a backward that is OPTIMIZER, until another forward or backward begins."""
        if self._meter is not None:
            self._meter.mark(part)

    def end(self) -> bool:
        """Stop measuring. Return True if a whole step, forward and backward, was measured."""
        meter = self._meter
        if meter is None:
            return False
        if self._device.type == "cpu" and (is_profiled() or not is_profiler_on()):
            self._meter = None  # the user's profiler has taken over; stopping ours would stop theirs
            return False
        try:
            meter.__exit__(None, None, None)
        except MeasurementLost:
            self._meter = None
            return False
        if self._device.type == "cpu" and has_rebuilt_buckets(self._model) and not self._has_rebuilt_before:
            self._replaced_bytes = self._bucket_bytes
            self.static_bytes -= self._bucket_bytes
        return not self.has_failed and (self.has_trained or self._has_trained())

    @property
    def step_peak_bytes(self) -> int:
        """The peak until the last backward ended, including all that existed before, without optimizer state."""
        assert self._meter is not None
        *before, last = self._meter.windows
        parts = before if last.name == OPTIMIZER else [*before, last]
        return self.static_bytes + max(window.peak_bytes for window in parts)

    @property
    def loss_peak_bytes(self) -> int:
        """The peak between forwards and their backwards, without optimizer state."""
        assert self._meter is not None
        peaks = [window.peak_bytes for window in self._meter.windows if window.name == LOSS]
        return self.static_bytes + max(peaks, default=0)

    @property
    def optimizer_peak_bytes(self) -> int:
        """The peak from the last backward on, without the optimizer state that existed before; 0 if the optimizer was not
        seen.
        """
        assert self._meter is not None
        last = self._meter.windows[-1]
        return self.static_bytes + last.peak_bytes if last.name == OPTIMIZER else 0

    @property
    def left_bytes(self) -> int:
        """The bytes that the step left behind, including optimizer state."""
        assert self._meter is not None
        return self._meter.resident_bytes - self._replaced_bytes

    def _has_trained(self) -> bool:
        """True if there are gradients, or if parameters were written since (the optimizer has stepped)."""
        return any(gradient_of(parameter) is not None for parameter in self._parameters) or any(
            parameter._version != version for parameter, version in zip(self._parameters, self._versions, strict=True)
        )


def held_tensors(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return what exists before a step and counts for it: parameters, buffers, existing gradients, and the batch."""
    gathered = (tensor for _, tensor in Gathered(model).tensors())
    beside = (holder[key] for _, holder, key in beside_weights(model))
    held = (
        *every_parameter(model),
        *held_by_deepspeed(model),
        *beside,
        *gathered,
        *model.buffers(),
        *every_gradient(model),
    )
    return [*held, *output_tensors((args, kwargs))]


@dataclass(frozen=True, slots=True)
class Taken:
    """What a measured step took. ``lasting_bytes`` are what it left behind without optimizer state, mostly gradients."""

    bytes: int = 0
    """A lower bound for the coming steps, which include the optimizer state that this step made."""
    most_bytes: int = 0
    """An upper bound: includes what this step left behind, as if recording took nothing."""
    optimizer_bytes: int = 0
    """The peak during the optimizer's step."""
    lasting_bytes: int = 0


def taken_bytes(step: MeasuredStep, watch: OptimizerWatch, plan: Plan, recording_bytes: int = 0) -> Taken:
    """Return what a step took under a plan. The plan may count optimizer state that does not exist yet.

    If the step recorded the plan, up to ``recording_bytes`` of its peak do not recur in the coming steps.
    """
    state_bytes = max(watch.bytes_after, planned_state_bytes(plan))
    optimizer_bytes = step.optimizer_peak_bytes + watch.bytes_before
    lasting_bytes = max(0, step.left_bytes - (watch.bytes_after - watch.bytes_before))
    return Taken(
        max(step.step_peak_bytes + max(watch.bytes_before, state_bytes - recording_bytes), optimizer_bytes),
        max(step.step_peak_bytes + state_bytes, optimizer_bytes) + lasting_bytes,
        optimizer_bytes,
        lasting_bytes,
    )


def unseen_bytes(step: MeasuredStep, watch: OptimizerWatch, plan: Plan) -> int:
    """Return by how much the coming steps will exceed the plan's prediction: what the trace missed, and what a step leaves.

    The step was measured under this plan. Its prediction includes the state of the optimizer that it was made with, if any.
    """
    step_bytes = step.step_peak_bytes + max(watch.bytes_after, planned_state_bytes(plan))
    return max(0, step_bytes - predicted_before_optimizer(plan) + taken_bytes(step, watch, plan).lasting_bytes)


def planned_state_bytes(plan: Plan) -> int:
    """Return the bytes of optimizer state that a plan counts."""
    return plan.classes.get(Category.OPTIMIZER_STATE, 0)


def predicted_optimizer_bytes(plan: Plan) -> int:
    """Return the predicted peak of the optimizer's step; 0 if the plan was made without an optimizer."""
    return max((point.bytes for point in plan.timeline if point.moment.startswith(Phase.OPTIMIZER)), default=0)


def predicted_before_optimizer(plan: Plan) -> int:
    """Return the predicted peak of forward and backward."""
    peaks = [point.bytes for point in plan.timeline if not point.moment.startswith(Phase.OPTIMIZER)]
    return max(peaks, default=plan.predicted_peak_bytes)


def beside_bytes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], allocated_bytes: int) -> int:
    """Return how many of the allocated bytes on a GPU do not belong to the training step that is about to begin."""
    optimizer = optimizer_in_view(model)
    state_bytes = 0 if optimizer is None else _state_bytes(optimizer)
    device = next(model.parameters()).device
    return (
        allocated_bytes
        - storage_bytes(held_tensors(model, args, kwargs), device)
        - bucket_bytes(model)
        - state_bytes
        - release_library_workspaces(device)
    )


def _state_bytes(optimizer: Optimizer) -> int:
    tensors = output_tensors(list(optimizer.state.values()))
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    devices = devices or {tensor.device for tensor in tensors}  # ZeRO-3's optimizer has parameters only while it steps
    return sum(storage_bytes(tensors, device) for device in {device.type for device in devices})


def as_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call as a batch. If some are positional and some are named, use the names of ``forward``."""
    if args and kwargs:
        return dict(inspect.signature(inner_module(model).forward).bind(*args, **kwargs).arguments)
    return args if args else kwargs


def task_of_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingTask:
    """Return the step of a training call with a stand-in loss. A wrapper's arguments get the names of the model inside."""
    return TrainingTask(model=model, batch=detached(as_batch(inner_module(model), args, kwargs)), loss=stand_in_loss)


def stand_in_loss(output: Any) -> torch.Tensor:
    """Return the model's own loss, or else a sum over its outputs: in the first call the user's loss is not known.

    Raises:
        InvalidLoss: no output depends on a trainable parameter.
    """
    own = own_loss(output)
    if isinstance(own, torch.Tensor) and own.numel() == 1 and own.requires_grad:
        return own
    parts = [
        (t.abs() if t.is_complex() else t).float().sum() for t in returned_tensors(output) if t.requires_grad
    ]  # autograd gives gradients to floats and complex numbers only
    if not parts:
        raise InvalidLoss(
            f"The output of the model ({type(output).__name__}) does not depend on any parameter.",
            why="attach calibrates on the first training call, and nothing in it can be trained",
            next="unfreeze parameters, or use plimsoll.plan with loss=",
        )
    return torch.stack(parts).sum()
