"""A model that trains in, the step and the part of it that a rank is in when an error is raised out.

An error of forward or of the optimizer shows the module in its traceback, and costs nothing before. Backward runs in C++: there
the output of every region carries a hook that notes the region's name when its gradient arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.regions import find_regions

_BACKWARD: frozenset[CodeType] = frozenset(
    run.__code__ for run in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
)


class Whereabouts:
    """Where a rank is. Use ``remove`` to take the hooks out.

    Args:
        model: as it is trained.
        optimizer: whose steps are counted.
        step: the number of the first step.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.step = step
        self._backward_of = ""
        self._model = inner_module(model)
        self._hooks: list[Any] = [optimizer.register_step_post_hook(self._count)]
        for name, region in find_regions(model).items():
            self._hooks.append(region.register_forward_hook(_OutputHook(self._arrive, name)))

    def remove(self) -> None:
        """Take the hooks out; harmless when called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def describe(self, trace: TracebackType | None) -> str:
        """The part of the step in which an error was raised.

        Args:
            trace: the error's.
        """
        names = {id(module): name or "the model" for name, module in self._model.named_modules()}
        module = ""
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            if frame.f_code in _BACKWARD:
                return f"in backward of {self._backward_of}" if self._backward_of else "in backward"
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.optim.Optimizer):
                return "in the optimizer's step"
            module = names.get(id(owner), "") or module
        return f"in forward of {module}" if module else "outside of the model"

    def _arrive(self, name: str) -> None:
        self._backward_of = name

    def _count(self, *_: Any) -> None:
        self.step += 1
        self._backward_of = ""


class _OutputHook:
    """Notes when gradients of a region's outputs arrive. Copies and pickles of the model get a hook that does nothing."""

    def __init__(self, arrive: Callable[[str], None] | None = None, name: str = "") -> None:
        self._arrive = arrive
        self._name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._arrive is None or not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._note)

    def _note(self, gradient: torch.Tensor) -> None:
        if self._arrive is not None:
            self._arrive(self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _OutputHook:
        return _OutputHook()

    def __reduce__(self) -> tuple[type[_OutputHook], tuple[()]]:
        return (_OutputHook, ())
