"""A training task: the user's model, batch, loss and optimizer, checked once at the public verb.

All code behind the verb receives a `TrainingTask` and checks nothing again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from plimsoll.artifacts.plan import Plan
from plimsoll.engine.region import ManagedRegion
from plimsoll.errors import (
    InvalidLoss,
    InvalidModel,
    PlimsollError,
    TracingFailed,
)
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.compiled.units import CompileCall, Unit, find_units, in_place
from plimsoll.tracing.ddp import inner_module
from plimsoll.tracing.recorder.calling import Context, Loss, name_of, own_loss, split_batch
from plimsoll.tracing.recorder.fingerprint import fingerprint, signature
from plimsoll.tracing.recorder.untouched import returned_tensors
from plimsoll.tracing.refusals import refuse_without_shape
from plimsoll.tracing.torch_internals import is_profiled, warn_if_untried

BATCH = "batch, mode and loss"
"""The name of the fact that ranks compare to see whether their batches have the same shapes, and their steps the same modes and
losses.
"""
_OF_OURS = (PlimsollError, torch.OutOfMemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """One training step as a user describes it, as data. ``read`` checks the user's arguments and returns the task.

    ``batch`` is detached from the graph that made it. ``loss`` raises ``InvalidLoss`` if the user's function fails.
    """

    model: nn.Module
    batch: Any
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    units: tuple[Unit, ...] = ()
    """The parts of the model that torch.compile compiles."""
    compile_options: dict[str, Any] | None = None
    """Options of torch.compile if the plan itself compiles the model. They are ``None`` otherwise, also if the user compiles
    it.
    """

    @classmethod
    def read(
        cls,
        model: nn.Module,
        batch: Any,
        *,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        compile: bool | Mapping[str, Any] | None = None,  # noqa: A002 - torch's word
    ) -> TrainingTask:
        """Check the user's arguments and return the task.

        Raises:
            InvalidModel: the model is not a module or is managed already, or the optimizer is not an optimizer.
            InvalidBatch: neither a tensor, nor a tuple, nor a mapping.
            InvalidLoss: it cannot be called.
            TracingFailed: a profiler runs.
        """
        check_model(model, optimizer)
        refuse_profiler(model)
        units = units_of(model, compile)
        return cls(
            model=model,
            batch=detached(batch),
            loss=explained_loss(loss),
            optimizer=optimizer,
            units=units,
            compile_options=dict(compile) if isinstance(compile, Mapping) else {} if compile else None,
        )

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        """Compile the model inside the ``with`` block with the options of this task, as `compiled_units` does."""
        with compiled_units(self.units):
            yield

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments of the model's call."""
        return split_batch(self.batch)

    def step(self, context: Context = contextlib.nullcontext, written: Collection[str] = ()) -> TrainingStep:
        """Return the step, which runs from the current state of the model and random generators.

        ``context`` is called for each forward and backward, and returns the context that they run in. Parameters named in
        ``written`` are part of that state.
        """
        return TrainingStep(
            self.model, *self.call(), loss=self.loss, optimizer=self.optimizer, context=context, written=written
        )

    def signature(self) -> str:
        """Return the text that identifies a batch in plans and receipts: shapes, dtypes, mode and loss."""
        return signature(self.model, *self.call(), loss=self.loss)

    def facts(self) -> dict[str, str]:
        """Return the facts that must be equal on ranks that plan one step together, as text by name. The contents of batches
        may differ.
        """
        return {
            "model": fingerprint(self.model),
            BATCH: self.signature(),
            "optimizer": type(self.optimizer).__name__,
            "device": ", ".join(sorted({parameter.device.type for parameter in self.model.parameters()})),
        }


def units_of(model: nn.Module, wanted: Any = None) -> tuple[Unit, ...]:
    """Return the parts of a model that are compiled or will be.

    Raises:
        InvalidModel: ``compile=`` asks to compile a model that is compiled already, or it is compiled in an unsupported way.
        InvalidOption: ``compile=`` does not hold valid arguments of torch.compile.
    """
    found = find_units(model)
    if wanted is None or wanted is False:
        return found
    if found:
        raise InvalidModel(
            f"{type(model).__name__} is already compiled by torch.compile, and compile= asks to compile it.",
            why="it would be compiled twice, one compilation inside the other",
            next="leave compile= out, or pass the model before torch.compile",
        )
    return (Unit("", inner_module(model), CompileCall.of(wanted)),)


@contextlib.contextmanager
def compiled_units(units: Sequence[Unit]) -> Iterator[None]:
    """Compile the model that ``units_of`` found inside the ``with`` block. The model is then compiled even if it is called
    without torch.compile's wrapper.
    """
    bare = [unit for unit in units if unit.module._compiled_call_impl is None and unit.path == ""]
    alone = [dataclasses.replace(unit, wrapper=None) for unit in bare]
    with in_place(alone, lambda unit: functools.partial(unit.call.compile(), unit.module)):
        yield


def compiled_by(plan: Plan, model: nn.Module) -> dict[str, Any] | None:
    """Return torch.compile's options if the plan itself compiles the model; ``None`` if not, or if the user has compiled it."""
    return None if find_units(check_module(model)) else plan.own_compilation


def check_module(model: object) -> nn.Module:
    """Refuse anything but a module. Also warn of an untested torch version: every public verb calls this function."""
    warn_if_untried()
    if not isinstance(model, nn.Module):
        raise InvalidModel(
            f"model= has the type {type(model).__name__}, not a torch.nn.Module.",
            why="Plimsoll manages the regions of a torch.nn.Module",
            next="pass the module that is trained",
        )
    return model


def check_model(model: object, optimizer: object = None) -> None:
    """Refuse a model that is not a module or is managed already, and an optimizer that is not one."""
    model = check_module(model)
    refuse_without_shape(model)
    managed = next((name for name, module in model.named_modules() if is_managed(module)), None)
    if managed is not None:
        raise InvalidModel(
            f"{type(model).__name__} is already managed by a plan: {managed or 'the model itself'}.",
            why="while a plan is applied, the memory of a step without a plan cannot be measured",
            next="call handle.remove() first, or make this call before plimsoll.apply",
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidModel(
            f"optimizer= has the type {type(optimizer).__name__}, not a torch.optim.Optimizer.",
            why="the optimizer's step is run to find its state and its memory",
            next="pass the optimizer itself, or leave it out to plan for forward, backward and gradients only",
        )


def refuse_profiler(model: nn.Module) -> None:
    """Raise an error if a profiler runs and memory must be measured on a CPU. That measurement needs torch's profiler, and only
    one can run.
    """
    if is_profiled() and any(parameter.device.type == "cpu" for parameter in model.parameters()):
        raise TracingFailed(
            "A profiler is running.",
            why="on a CPU, memory is measured with torch's profiler, and only one can run: yours would lose its records",
            next="call Plimsoll before the profiler starts; training under a plan can be profiled",
        )


def is_managed(module: nn.Module) -> bool:
    """Return True if a plan manages this module itself (not only a module around it)."""
    return isinstance(module.__dict__.get("forward"), ManagedRegion)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


def detached(batch: Any) -> Any:
    """Return a copy of the batch whose tensors are detached from the autograd graph that made them. Otherwise the backward of a
    run that only measures a plan would enter that graph.

    Raises:
        InvalidBatch: neither a tensor, nor a tuple, nor a mapping.
    """
    if isinstance(batch, torch.Tensor):
        return _detached(batch)
    args, kwargs = tree_map_only(torch.Tensor, _detached, split_batch(batch))
    return kwargs or args


def explained_loss(loss: object) -> Loss | None:
    """Return the loss, wrapped so that its errors become ``InvalidLoss``. Refuse a loss that cannot be called."""
    if loss is None:
        return None
    if not callable(loss):
        raise InvalidLoss(
            f"loss= has the type {type(loss).__name__}, which cannot be called.",
            why="it is called with the model's output, and must return one number",
            next="pass loss=lambda output: ..., or leave it out if the model's output contains the loss",
        )

    def explained(output: Any) -> torch.Tensor:
        try:
            value: torch.Tensor = loss(output)
        except _OF_OURS:
            raise
        except Exception as error:  # a user's function may raise anything
            raise InvalidLoss(
                f"loss= raised an error: {type(error).__name__}: {error}",
                why=f"it was called with the model's output, a {type(output).__name__}",
                next="check that loss(model(...)) works without Plimsoll",
            ) from error
        return value

    # The signature of a step contains this name. A loss without a name (an nn.Module, a partial) gets the name of its class.
    explained.__qualname__ = name_of(loss)
    explained.__wrapped__ = loss  # type: ignore[attr-defined]
    return explained


def as_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a call as a batch. If some are positional and some are named, use the names of ``forward``."""
    if args and kwargs:
        return dict(inspect.signature(inner_module(model).forward).bind(*args, **kwargs).arguments)
    return args if args else kwargs


def task_of_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingTask:
    """Return the task of a training call, with a loss that replaces the user's. If a wrapper was called, the arguments get the
    names of the inner model.
    """
    return TrainingTask(model=model, batch=detached(as_batch(inner_module(model), args, kwargs)), loss=stand_in_loss)


def stand_in_loss(output: Any) -> torch.Tensor:
    """Return the model's own loss, or else a sum over its outputs: in the first call, the user's loss is not known yet.

    Raises:
        InvalidLoss: no output depends on a trainable parameter, or ``forward`` is a generator or a coroutine.
    """
    own = own_loss(output)
    if isinstance(own, torch.Tensor) and own.numel() == 1 and own.requires_grad:
        return own
    parts = [
        (t.abs() if t.is_complex() else t).float().sum() for t in returned_tensors(output) if t.requires_grad
    ]  # autograd gives gradients to floats and complex numbers only
    if isinstance(output, Iterator | Awaitable):
        raise InvalidLoss(
            f"forward returned a {type(output).__name__}, so the model runs only after forward has returned.",
            why="attach traces the first call of forward, which ends before any layer of this model has run",
            next="return a tuple or a list, or call plimsoll.plan with a loss= that reads what forward returns, and apply",
        )
    if not parts:
        raise InvalidLoss(
            f"The output of the model ({type(output).__name__}) does not depend on any trainable parameter.",
            why="attach plans with the first training call, and this call does not compute a gradient",
            next="unfreeze parameters, or use plimsoll.plan with loss=",
        )
    return torch.stack(parts).sum()
