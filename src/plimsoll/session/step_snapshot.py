"""A copy of all state that a training step may change, so that a step that ran out of memory can be run again.

When a step begins, these are copied: random states, buffers, module attributes and flags, existing gradients, gradient scalers,
learning-rate schedulers, and the hyperparameters of optimizers. Parameters and optimizer state are written only by optimizers,
so they are copied when an optimizer is about to step. During forward and backward no copy of them exists. Copies from a GPU are
in host memory, except small ones.

Two kinds of changes cannot be undone: other code than an optimizer writes to a parameter, or the step writes to a tensor of the
batch. Version counters detect them. A write through ``.data`` is not detected.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Container, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plimsoll.engine.optimizer_state.away import OffloadedStates
from plimsoll.tracing.ddp import begin_anew
from plimsoll.tracing.fsdp2 import KeptWaiting, every_parameter, release_gathered
from plimsoll.tracing.local_tensors import gradient_of, local_of, version_of
from plimsoll.tracing.meters.memory import instances_of
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.recorder.contents import contents_of, kind_of, refill, with_contents
from plimsoll.tracing.recorder.kept_modules import attributes_of
from plimsoll.tracing.recorder.untouched import KeptMemory, KeptState, RandomState

_SMALL_BYTES = 2**16
"""Tensors of at most this size are copied on their own device."""


class Companions:
    """Gradient scalers, learning-rate schedulers and optimizers of this process.

    They cannot be found by hooks, so all objects of the process are searched for them, once.
    """

    def __init__(self) -> None:
        gc.collect()
        self._found = [weakref.ref(thing) for thing in instances_of(GradScaler, LRScheduler, Optimizer)]

    def alive(self) -> list[Any]:
        """Return the objects that still exist."""
        return [thing for reference in self._found if (thing := reference()) is not None]


class _KeptHyperparameters:
    """The values of an optimizer's parameter group when the step begins, apart from its parameters: a loop may change the
    learning rate before the optimizer steps.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._group, self._values = group, {name: value for name, value in group.items() if name != "params"}
        self._contents = KeptContents(self._values.values())

    def put_back(self) -> None:
        """Restore the values."""
        self._group.update(self._values)
        self._contents.put_back()


class StepSnapshot:
    """A copy of the state that a step may change. Use it as a context manager around the step; ``put_back`` restores the state
    afterwards.
    """

    def __init__(self, model: nn.Module, companions: Collection[Any], given: Any) -> None:
        self._model = model
        self._given = KeptContents([given], with_tensors=False)
        self._random, self._state = RandomState(), KeptState(model, kept_copy)
        self._flags = [(module, module.training) for module in model.modules()]
        self._parameters = [(parameter, version_of(parameter)) for parameter in every_parameter(model)]
        self._batch = [(t, version_of(t)) for t in output_tensors(given) if not t.is_inference()]
        self._trains = [(parameter, parameter.requires_grad) for parameter, _ in self._parameters]
        trained = {id(parameter): parameter for parameter, _ in self._parameters}
        # The same optimizer may train a learned loss, outside of the model. Its gradients would be added up twice.
        trained |= {id(other): other for each in companions for other in _trained_with(each, trained.keys())}
        self._gradients = [(parameter, _KeptGradient(gradient_of(parameter))) for parameter in trained.values()]
        self._waiting = KeptWaiting(model)
        self._numbers = [_KeptGradient(gradient) for _, _, gradient in self._waiting.places]
        optimizers = [each for each in companions if isinstance(each, Optimizer)]
        self._companions = KeptContents([vars(each) for each in companions if not isinstance(each, Optimizer)])
        groups = [group for each in optimizers for group in vars(each).get("param_groups", ())]
        self._hyperparameters = [_KeptHyperparameters(group) for group in groups]
        # Buffers and parameters are copied above, even if other objects hold them too.
        parts = {id(tensor) for tensor in (*model.buffers(), *(parameter for parameter, _ in self._parameters))}
        values = [value for module in model.modules() for value in attributes_of(module).values()]
        self._attributes = KeptContents(values, left_out=parts)
        self._optimizers: dict[int, tuple[Optimizer, KeptContents]] = {}
        self._stepping: Optimizer | None = None
        self._has_offloaded = False
        """Whether an optimizer has stepped whose state is offloaded."""
        self._hooks: list[Any] = []

    def __enter__(self) -> StepSnapshot:
        self._hooks = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ended),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def is_in_optimizer(self) -> bool:
        """True while an optimizer runs its step. It stays True if that step failed."""
        return self._stepping is not None

    def written(self) -> str:
        """Return a text that describes a write that cannot be undone, or "" if everything can be restored."""
        if self._has_offloaded:
            return "an optimizer has stepped whose state is offloaded"
        kept = [contents for _, contents in self._optimizers.values()]
        for parameter, version in self._parameters:
            if version_of(parameter) != version and not any(parameter in contents for contents in kept):
                return f"code other than an optimizer's step wrote to a parameter of shape {tuple(parameter.shape)}"
        for tensor, version in self._batch:
            if version_of(tensor) != version:
                return f"the step wrote in place to a tensor of shape {tuple(tensor.shape)}, one of its arguments"
        return ""

    def put_back(self) -> None:
        """Restore everything to the state before the step."""
        # The failed backward left FSDP2's parameters gathered, and DDP's reducer in the middle of its buckets.
        release_gathered(self._model)
        begin_anew(self._model)
        with torch.no_grad():
            for _, contents in self._optimizers.values():
                contents.put_back()
            for hyperparameters in self._hyperparameters:
                hyperparameters.put_back()
            self._companions.put_back()
            self._attributes.put_back()
            self._given.put_back()
            for parameter, gradient in self._gradients:
                parameter.grad = gradient.put_back()
            self._waiting.put_back()
            for numbers in self._numbers:
                numbers.put_back()
        for module, flag in self._flags:
            module.training = flag
        for parameter, is_trained in self._trains:
            parameter.requires_grad_(is_trained)
        self._state.put_back()
        self._random.put_back()

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(isinstance(p, FakeTensor) for group in optimizer.param_groups for p in group["params"]):
            return  # a fake copy of an optimizer: tracing runs its step
        self._stepping = optimizer
        if isinstance(optimizer.state, OffloadedStates):
            self._has_offloaded = True  # a copy of all its state would not fit on the device
        elif id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = (optimizer, KeptContents([vars(optimizer)]))

    def _ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping = None


def _trained_with(companion: object, parameters: Container[int]) -> list[nn.Parameter]:
    """Return all parameters of an optimizer that trains one of ``parameters`` (given by ``id``); for other objects, none."""
    if not isinstance(companion, Optimizer):
        return []
    found = [each for group in vars(companion).get("param_groups", ()) for each in group["params"]]
    return found if any(id(each) in parameters for each in found) else []


class _KeptGradient:
    """A gradient that exists when the step begins, as data: the tensor object and a copy of its numbers."""

    def __init__(self, gradient: torch.Tensor | None) -> None:
        self._gradient = gradient
        self._copy = None if gradient is None else kept_copy(gradient)
        self._memory = None if gradient is None else KeptMemory(gradient)

    def put_back(self) -> torch.Tensor | None:
        """Return the same tensor object with its old numbers. For a sparse gradient, return a new tensor, because accumulation
        changes its size.
        """
        if self._gradient is None or self._copy is None or self._memory is None:
            return None
        if self._gradient.layout is not torch.strided:
            return self._copy.to(self._gradient.device, copy=True)
        self._memory.put_back()
        local_of(self._gradient).copy_(self._copy)
        return self._gradient


class KeptContents:
    """A copy of the contents of containers (such as lists and dicts), to any depth, with the numbers of the tensors in them."""

    def __init__(self, roots: Iterable[Any], *, with_tensors: bool = True, left_out: Collection[int] = ()) -> None:
        values = [value for known, value in with_contents(roots).items() if known not in left_out]
        self._containers = [(value, contents_of(value)) for value in values if kind_of(value) is not None]
        tensors = [value for value in values if isinstance(value, torch.Tensor)] if with_tensors else []
        self._tensors = {id(value): (local_of(value), KeptMemory(value), kept_copy(value)) for value in tensors}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._tensors

    def put_back(self) -> None:
        """Put the same objects back into the same containers, and the same numbers into the tensors."""
        for container, contents in self._containers:
            refill(container, contents)
        for tensor, memory, copy in self._tensors.values():
            memory.put_back()
            tensor.copy_(copy)


def kept_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, or on the tensor's device if the tensor is small.

    From a GPU the copy is asynchronous. That is safe: work that is enqueued on the stream later, such as the optimizer's step,
    runs after it.
    """
    source = local_of(tensor.detach())
    if source.device.type != "cuda" or source.nbytes <= _SMALL_BYTES or source.layout is not torch.strided:
        return source.clone()
    return torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True)
