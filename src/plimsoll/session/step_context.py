"""Warns if training calls run in another context than planned: another autocast, another mode, or a batch with NaN.

Shapes do not show any of them. Each is said once, in the first call that has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from plimsoll.engine.capturing import is_capturing
from plimsoll.engine.copies import ModelHook
from plimsoll.session.messages import warn
from plimsoll.tracing.open_graphs import is_in_backward
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.tracing.recorder.fingerprint import AUTOCAST, EVALUATION, casts_in_force
from plimsoll.tracing.torch_internals import peek_functorch


class CompileSafeHook(ModelHook):
    """A hook on a model's calls that does nothing while torch.compile traces the model. So the model can still be compiled.

    A plan that drops something refuses compilation by itself. Under a plan that keeps everything, this hook only watches.
    """

    def __call__(self, caller: nn.Module, *arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(caller, *arguments)


class ContextWatch:
    """Looks at the calls of one model that may lead to a backward.

    Under an applied plan, ``signature`` is the plan's, and calls are compared with it. Under ``attach`` it is ``None``: plans
    are made for every autocast, and no plans for calls in evaluation mode.
    """

    def __init__(self, model: nn.Module, signature: str | None) -> None:
        parts = (signature or "").split("; ")
        self._is_attached = signature is None
        self._planned_casts = [part for part in parts if part.startswith(AUTOCAST)]
        self._is_training_planned = EVALUATION not in parts
        self._said: set[str] = set()
        self._has_begun = self._is_away = False
        self._hook = model.register_forward_pre_hook(CompileSafeHook(model, self._look), with_kwargs=True)

    def remove(self) -> None:
        """Remove the watch from the model."""
        self._hook.remove()

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Ignore calls inside the ``with`` block.

        The search for NaN runs only in the first call. If a trace recorded it, the traces of later calls would differ, and be
        made and timed anew.
        """
        self._is_away = True
        try:
            yield
        finally:
            self._is_away = False

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_away or not torch.is_grad_enabled() or is_in_backward() or peek_functorch() is not None:
            return
        if not self._has_begun:
            self._has_begun = True
            self._look_for_nan(args, kwargs)
        if module.training is not self._is_training_planned:
            self._say_mode(module)
        casts = casts_in_force()
        if not self._is_attached and casts != self._planned_casts:
            planned, found = (", ".join(each) or "no autocast" for each in (self._planned_casts, casts))
            self._say(
                "autocast",
                f"the model runs with {found}, and its plan was made with {planned}",
                "autocast changes the bytes of most activations, so this step may exceed the budget, or take longer than "
                "necessary",
                "call plimsoll.plan inside the autocast context of the training loop, or use plimsoll.attach, which plans for "
                "the loop's own context",
            )

    def _look_for_nan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in output_tensors((args, kwargs)):
            is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
            # Reading a value waits for the device, which a CUDA graph capture forbids.
            if not is_plain or not tensor.is_floating_point() or is_capturing(tensor.device.type):
                continue
            if bool(tensor.isnan().any()):
                self._say(
                    "nan",
                    f"the first batch has NaN in {int(tensor.isnan().sum())} of {tensor.numel()} elements of a tensor",
                    "the loss and all gradients become NaN, with and without a plan; the plan itself does not depend on it",
                    "check the data before you look for the cause in the plan",
                )
                return

    def _say_mode(self, module: nn.Module) -> None:
        name = type(module).__name__
        if self._is_attached:
            self._say(
                "mode",
                f"{name} is in evaluation mode and was called with gradients enabled: no plan is made for this call",
                "plimsoll.attach plans for training calls only. The call runs under the last plan, and before the first plan "
                "it holds all its activations",
                "call model.train() before training, or evaluate under torch.no_grad()",
            )
            return
        found, planned = ("training", "evaluation") if module.training else ("evaluation", "training")
        self._say(
            "mode",
            f"{name} is in {found} mode, and its plan was made in {planned} mode",
            "dropout and normalisation save other tensors in the other mode, so this step may exceed the budget",
            f"call model.{'train' if planned == 'training' else 'eval'}() as in the loop that you planned, plan again in "
            f"{found} mode, or evaluate under torch.no_grad()",
        )

    def _say(self, what: str, found: str, why: str, next_: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(f"{found}.\n  why   {why}\n  next  {next_}")
