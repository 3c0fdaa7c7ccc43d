"""What a training step may change, as it was before it: so that a step which ran out of memory can be run again.

Taken when a step begins: random states, buffers, module attributes and flags, gradients that are there, gradient scalers and
schedulers of learning rates. Parameters and the state of optimizers are written by optimizers alone, so these are copied when
an optimizer is about to step; no copy of them is there while forward and backward run. All copies lie in host memory.

What cannot be put back is noticed by its version: parameters that were written otherwise, tensors of the batch. A write
through ``.data`` is not noticed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plimsoll.tracing.ddp import begin_anew
from plimsoll.tracing.fsdp2 import KeptWaiting, every_parameter, release_gathered
from plimsoll.tracing.local_tensors import local_of, version_of
from plimsoll.tracing.meters.memory import instances_of
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.recorder.contents import contents_of, kind_of, refill, with_contents
from plimsoll.tracing.recorder.kept_modules import attributes_of
from plimsoll.tracing.recorder.untouched import KeptState, RandomState

_SMALL_BYTES = 2**16


class Companions:
    """Gradient scalers and schedulers of learning rates of this process. They have no hooks that tell of them, so they are
    looked for once, among all objects.
    """

    def __init__(self) -> None:
        gc.collect()
        self._found = [weakref.ref(thing) for thing in instances_of(GradScaler, LRScheduler)]

    def alive(self) -> list[Any]:
        """Those that are still there."""
        return [thing for reference in self._found if (thing := reference()) is not None]


class StepSnapshot:
    """The state before a step, for as long as it is entered; ``put_back`` afterwards makes it the state again."""

    def __init__(self, model: nn.Module, companions: Iterable[Any], given: Any) -> None:
        self._model = model
        self._given = KeptContents([given], with_tensors=False)
        self._random, self._state = RandomState(), KeptState(model, kept_copy)
        self._flags = [(module, module.training) for module in model.modules()]
        self._parameters = [(parameter, version_of(parameter)) for parameter in every_parameter(model)]
        self._batch = [(t, version_of(t)) for t in output_tensors(given) if not t.is_inference()]
        self._gradients = [(parameter, _KeptGradient(parameter.grad)) for parameter, _ in self._parameters]
        self._waiting = KeptWaiting(model)
        self._numbers = [_KeptGradient(gradient) for _, _, gradient in self._waiting.places]
        self._companions = KeptContents(map(vars, companions))
        # Buffers and parameters are kept above, whoever else holds them.
        parts = {id(tensor) for tensor in (*model.buffers(), *(parameter for parameter, _ in self._parameters))}
        values = [value for module in model.modules() for value in attributes_of(module).values()]
        self._attributes = KeptContents(values, left_out=parts)
        self._optimizers: dict[int, tuple[Optimizer, KeptContents]] = {}
        self._stepping: Optimizer | None = None
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
        """Whether an optimizer has begun its step and not ended it."""
        return self._stepping is not None

    def written(self) -> str:
        """What was written that is not kept, in words; empty where all can be put back."""
        kept = [contents for _, contents in self._optimizers.values()]
        for parameter, version in self._parameters:
            if version_of(parameter) != version and not any(parameter in contents for contents in kept):
                return f"a parameter of shape {tuple(parameter.shape)} was written, and not by an optimizer's step"
        for tensor, version in self._batch:
            if version_of(tensor) != version:
                return f"a tensor of shape {tuple(tensor.shape)} that the step was given was written in place"
        return ""

    def put_back(self) -> None:
        """Everything as it was before the step."""
        release_gathered(self._model)
        begin_anew(self._model)
        with torch.no_grad():
            for _, contents in self._optimizers.values():
                contents.put_back()
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
        self._state.put_back()
        self._random.put_back()

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(isinstance(p, FakeTensor) for group in optimizer.param_groups for p in group["params"]):
            return  # the stand-in of an optimizer whose step is traced
        self._stepping = optimizer
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = (optimizer, KeptContents([vars(optimizer)]))

    def _ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping = None


class _KeptGradient:
    """A gradient that is there when the step begins: the object and its numbers."""

    def __init__(self, gradient: torch.Tensor | None) -> None:
        self._gradient = gradient
        self._copy = None if gradient is None else kept_copy(gradient)

    def put_back(self) -> torch.Tensor | None:
        """The same object with the numbers that it had; a sparse one anew, as accumulating into it changes its size."""
        if self._gradient is None or self._copy is None:
            return None
        if self._gradient.layout is not torch.strided:
            return self._copy.to(self._gradient.device, copy=True)
        local_of(self._gradient).copy_(self._copy)
        return self._gradient


class KeptContents:
    """What containers hold, to any depth, and the numbers of the tensors in them."""

    def __init__(self, roots: Iterable[Any], *, with_tensors: bool = True, left_out: Collection[int] = ()) -> None:
        values = [value for known, value in with_contents(roots).items() if known not in left_out]
        self._containers = [(value, contents_of(value)) for value in values if kind_of(value) is not None]
        tensors = [value for value in values if isinstance(value, torch.Tensor)] if with_tensors else []
        self._tensors = {id(value): (local_of(value), kept_copy(value)) for value in tensors}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._tensors

    def put_back(self) -> None:
        """The same objects in the same containers, the same numbers in the tensors."""
        for container, contents in self._containers:
            refill(container, contents)
        for tensor, copy in self._tensors.values():
            tensor.copy_(copy)


def kept_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory. Nobody waits for it: what is enqueued on the stream later finds the tensor copied.

    A small tensor stays on its device.
    """
    source = local_of(tensor.detach())
    if source.device.type != "cuda" or source.nbytes <= _SMALL_BYTES or source.layout is not torch.strided:
        return source.clone()
    return torch.empty_like(source, device="cpu", pin_memory=True).copy_(source, non_blocking=True)
