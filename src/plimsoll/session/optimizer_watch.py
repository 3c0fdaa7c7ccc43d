"""Watches optimizers: when they step, and how many bytes of state they have.

Torch's global hooks report the steps of all optimizers in the process. They are removed after the first step that did not
change the size of the state.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Container, Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plimsoll.artifacts.plan import Plan
from plimsoll.session.account import planned_state_bytes
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.fsdp2 import every_parameter
from plimsoll.tracing.local_tensors import dense_parts
from plimsoll.tracing.meters.memory import (
    instances_of,
    storage_bytes,
    storage_of,
)
from plimsoll.tracing.optimizer import present_states
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.zero import optimizer_inside

_SEEN: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
"""The optimizer that `optimizer_in_view` found for each model."""

_PARAMETERS: weakref.WeakKeyDictionary[nn.Module, list[_Known]] = weakref.WeakKeyDictionary()
"""The parameters that each model had when it was looked at last and held no fast weights (tensors that replace parameters)."""

_ABANDONED: list[Any] = []
"""Hooks of watches that were garbage-collected. They do nothing, and are removed when the next watch is made. They cannot be
removed at once, because torch may be iterating over its hooks at the moment when a watch is collected.
"""


class _Known(NamedTuple):
    """A parameter, as data: the ``id`` of the tensor, and its storage. A weak reference to the tensor itself would make
    ``torch.utils.swap_tensors`` fail.
    """

    id: int
    storage: int
    reference: StorageWeakRef
    bytes: int


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls the method without keeping the method's object alive."""
    found = weakref.WeakMethod(method)

    def hook(*given: Any) -> None:
        living = found()
        if living is not None:
            living(*given)

    return hook


class OptimizerSteps:
    """Calls its methods when optimizers step that train at least one of the given parameters (their ``id``), and when others
    step. The methods may not remove optimizer hooks, because torch is iterating over them at that moment.
    """

    def __init__(self, parameters: Container[int]) -> None:
        self._parameters = parameters
        while _ABANDONED:
            _ABANDONED.pop().remove()
        # Torch keeps hooks of all optimizers forever. Weak hooks let a model be freed together with its budget.
        self._hooks: list[Any] = [
            register_optimizer_step_pre_hook(_weakly(self._begins)),
            register_optimizer_step_post_hook(_weakly(self._ends)),
        ]
        weakref.finalize(self, _ABANDONED.extend, self._hooks).atexit = False

    @property
    def is_watching(self) -> bool:
        """False after `remove`."""
        return bool(self._hooks)

    def remove(self) -> None:
        """Remove the hooks. Calling it twice does no harm."""
        while self._hooks:
            self._hooks.pop().remove()

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if trains(optimizer, self._parameters):
            self._own_begins(optimizer)
        else:
            self._other_begins()

    def _ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if trains(optimizer, self._parameters):
            self._own_ended(optimizer)

    def _own_begins(self, optimizer: Optimizer) -> None:
        """Called before each step of an optimizer that trains some of the parameters."""

    def _own_ended(self, optimizer: Optimizer) -> None:
        """Called after each step of an optimizer that trains some of the parameters."""

    def _other_begins(self) -> None:
        """Called before each step of an optimizer that trains none of the parameters."""


class OptimizerWatch(OptimizerSteps):
    """Watches optimizers that train at least one of the given parameters: their steps, and the size of their state.

    ``on_step`` is called before the first step of such an optimizer, ``after_step`` after every step, and ``on_other_step``
    before every step of an optimizer that trains none of the parameters.
    """

    def __init__(
        self,
        parameters: Container[int],
        optimizers: Iterable[Optimizer] = (),
        on_step: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
        on_other_step: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(parameters)
        self._on_step, self._after_step, self._on_other_step = on_step, after_step, on_other_step
        self.has_stepped = False
        self.is_settled = False
        """True if the last step did not change the size of the state."""
        self._growth_bytes = 0
        self._before = weakref.WeakKeyDictionary({each: _state_bytes(each) for each in optimizers})
        self._now = weakref.WeakKeyDictionary(self._before)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that were passed or have stepped since, and that still exist."""
        return list(self._now)

    @property
    def bytes_before(self) -> int:
        """Bytes of optimizer state before the first step that was observed."""
        return sum(self._before.values())

    @property
    def bytes_now(self) -> int:
        """Bytes of optimizer state after the last step that was observed."""
        return sum(self._now.values())

    def count_running(self) -> None:
        """Count what an optimizer holds in a step that is running. Its state takes over most of it when the step ends."""
        for optimizer in list(self._now):
            self._now[optimizer] = max(self._now[optimizer], _state_bytes(optimizer))

    @property
    def bytes_after(self) -> int:
        """Bytes of optimizer state to expect after the next step. If the last observed step added some state, the next one is
        expected to add as much.
        """
        return self.bytes_now + self._growth_bytes

    def _own_begins(self, optimizer: Optimizer) -> None:
        # Each optimizer, also one that steps after another: a resumed run may train with Muon and AdamW.
        if optimizer not in self._before:
            self._before[optimizer] = _state_bytes(optimizer)
        if not self.has_stepped:
            self._now[optimizer] = self._before[optimizer]
            if self._on_step is not None:
                self._on_step()

    def _own_ended(self, optimizer: Optimizer) -> None:
        known_bytes = self._now.get(optimizer, 0)
        self._now[optimizer] = now_bytes = _state_bytes(optimizer)
        self.is_settled = self.has_stepped and now_bytes == known_bytes
        self._growth_bytes = max(0, now_bytes - known_bytes) if known_bytes else 0
        self.has_stepped = True
        if self._after_step is not None:
            self._after_step()

    def _other_begins(self) -> None:
        if self._on_other_step is not None:
            self._on_other_step()


class CountedState:
    """Remembers how many bytes of optimizer state were already subtracted from the budget, and finds state that was not."""

    def __init__(self) -> None:
        self.bytes = 0
        self._has_stepped = False

    def begin(self, watch: OptimizerWatch, plan: Plan) -> None:
        """Count the optimizer state that exists now, or the state that the plan counts if that is larger."""
        self.bytes, self._has_stepped = max(watch.bytes_after, planned_state_bytes(plan)), watch.has_stepped

    def is_behind(self, watch: OptimizerWatch) -> bool:
        """Return True if more state exists than was counted, or if an optimizer has made its first step since the last
        count.
        """
        return watch.has_stepped and (not self._has_stepped or watch.bytes_after > self.bytes)

    def take_new(self, watch: OptimizerWatch) -> int:
        """Count the state that was not counted yet, and return its bytes."""
        new_bytes = max(0, watch.bytes_after - self.bytes)
        self._has_stepped = True
        self.bytes += new_bytes
        return new_bytes

    def take_found(self, found_bytes: int) -> int:
        """Count ``found_bytes`` of optimizer state, and return how many of these bytes were not counted before."""
        new_bytes = max(0, found_bytes - self.bytes)
        self.bytes += new_bytes
        return new_bytes


def trains(optimizer: Optimizer, parameters: Container[int]) -> bool:
    """Return True if the optimizer holds at least one of the parameters. ``parameters`` has their ``id``."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


def optimized_parameters(model: nn.Module) -> frozenset[int]:
    """Return the ``id`` of the parameters of a model that optimizers may hold. Fast weights are not among them: the state of an
    optimizer that trained a MAML loop was not counted.
    """
    own, fast = _own_parameters(model), frozenset(map(id, fast_weights(model)))
    return frozenset([*map(id, every_parameter(model)), *(known.id for known in own)]) - fast


def fast_weights(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that are in the places of parameters now, as in ``torch.func.functional_call``."""
    return [each for each in model.parameters() if not isinstance(each, nn.Parameter)]


def displaced_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters that still exist although other tensors (fast weights) replace them in a
    call.
    """
    if not fast_weights(model):
        return 0
    in_place = {storage_of(part) for each in model.parameters() for part in dense_parts(each)}
    own = {known.storage: known.bytes for known in _own_parameters(model) if not known.reference.expired()}
    return sum(size for storage, size in own.items() if storage not in in_place)


def _own_parameters(model: nn.Module) -> list[_Known]:
    """Return the parameters of a model. While other tensors (fast weights) replace them in a call, return the parameters that
    were found before.
    """
    found = list(model.parameters())
    if model not in _PARAMETERS or all(isinstance(each, nn.Parameter) for each in found):
        _PARAMETERS[model] = [
            _Known(id(each), storage_of(part), StorageWeakRef(part.untyped_storage()), part.untyped_storage().nbytes())
            for each in found
            for part in dense_parts(each)
        ]
    return _PARAMETERS[model]


def state_bytes_of(model: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of state of the optimizers, counting only optimizers that train a parameter of the model."""
    parameters = optimized_parameters(model)
    return sum(_state_bytes(optimizer) for optimizer in optimizers if trains(optimizer, parameters))


def optimizer_in_view(model: nn.Module, named: Optimizer | None = None) -> Optimizer | None:
    """Return the optimizer that the user has passed, else the only optimizer in this process that trains ``model``, else None.
    Plans can count its state before the state exists.

    The user's optimizer counts only while it holds a parameter of the model: a model may exchange all its parameters and
    continue without it. An optimizer that was found is remembered, because collecting garbage and searching all objects of the
    process takes as long as a small step.
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
    gc.collect()  # an old optimizer in a reference cycle would count as a second one
    # Wrappers around optimizers do not have their own parameter groups.
    found = [thing for thing in instances_of(Optimizer) if "param_groups" in vars(thing)]
    ours: list[Optimizer] = [optimizer for optimizer in found if trains(optimizer, parameters)]
    if len(ours) != 1:
        return None
    _SEEN[model] = weakref.ref(ours[0])
    return ours[0]


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state. If its step is running and evaluates the model, as in L-BFGS, add the tensors
    that the step holds in local variables.
    """
    return [*output_tensors(list(present_states(optimizer).values())), *output_tensors(_locals_of_step(optimizer))]


def _locals_of_step(optimizer: Optimizer) -> list[Any]:
    """Return the local variables of the functions that the optimizer's running step consists of, or an empty list."""
    module = type(optimizer).__module__
    found: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            variables = frame.f_locals
            found += variables.values()
            is_step = frame.f_code.co_name == "step" and variables.get("self") is optimizer
            # Before Python 3.13 this is a copy that the frame holds. It kept vectors of L-BFGS alive until the step ended.
            if isinstance(variables, dict):
                variables.clear()
            if is_step:
                return found
        frame = frame.f_back
    return []


def _state_bytes(optimizer: Optimizer) -> int:
    tensors = state_tensors(optimizer)
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    devices = devices or {tensor.device for tensor in tensors}  # ZeRO-3's optimizer has parameters only while it steps
    return sum(storage_bytes(tensors, device) for device in {device.type for device in devices})
