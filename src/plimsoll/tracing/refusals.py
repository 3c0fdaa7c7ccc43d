"""What cannot be traced, and why: models without a training step, and exceptions of a step as one clear error of ours.

Out-of-memory errors and interrupts pass as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.nn.parameter import UninitializedParameter

from plimsoll.errors import InvalidBatch, InvalidModel, PlimsollError, TracingFailed
from plimsoll.tracing.fsdp2 import has_flat_parameters, sharded_parameters
from plimsoll.tracing.local_tensors import is_sharded

_REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, ArithmeticError)
_DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException)
_WITHOUT_FAKE = (UnsupportedFakeTensorException, UnsupportedOperatorException)


def check_traceable(model: nn.Module) -> None:
    """Refuse a model that has no training step.

    Raises:
        InvalidModel: no parameters, parameters without a shape, nothing to train, sharded by FSDP1.
        TracingFailed: gradients are switched off.
    """
    parameters = list(model.parameters())
    name = type(model).__name__
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise InvalidModel(
            f"{name} has parameters without a shape.",
            why="lazy modules get their parameters in their first forward pass",
            next="run the model once on a batch",
        )
    if has_flat_parameters(model):
        raise InvalidModel(
            "This model is sharded by FullyShardedDataParallel (FSDP1).",
            why="its parameters are views of flat ones and change from call to call, so what they hold cannot be followed",
            next="shard it with torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    if not parameters:
        raise InvalidModel(
            f"{name} has no parameters.",
            why="a training step without parameters has no gradients to make",
            next="pass the module that is trained",
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise InvalidModel(
            f"No parameter of {name} is trainable.",
            why=f"requires_grad is False on all {len(parameters)} of them",
            next="unfreeze what is to be trained: parameter.requires_grad_(True)",
        )
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise TracingFailed(
            "Gradients are switched off here.",
            why="the call is inside torch.no_grad() or torch.inference_mode(): nothing would be saved for backward",
            next="call Plimsoll outside of it",
        )


def refuse_shards(model: nn.Module) -> None:
    """Refuse to trace with fake tensors what is split over ranks, before FSDP2's first forward sets itself up with
    them.
    """
    if any(is_sharded(parameter) for parameter in (*sharded_parameters(model), *model.parameters())):
        raise InvalidModel(
            f"{type(model).__name__} is split over ranks, and its step is to be traced without its device.",
            why="its parameters would be stand-ins without values: FSDP2 could not gather them, nor DTensors compute with them",
            next="plan on the device itself, without device_profile=; or before it is split: "
            'plimsoll.estimate(model, batch, layout="dp=8,zero=3")',
        )


def explain_forward(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Name what a forward pass refused: the batch, or values and kernels that fake tensors do not have."""
    return _explained(
        model,
        lambda found: InvalidBatch(
            f"{type(model).__name__} refused the batch: {found}",
            why="the forward pass failed before anything was planned",
            next="check that model(*batch) (tuple), model(**batch) (dict) or model(batch) (tensor) works",
        ),
    )


def explain_backward(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Name what a backward pass refused; forward has already shown that the batch fits."""
    return _explained(
        model,
        lambda found: TracingFailed(
            f"The backward pass of {type(model).__name__} failed: {found}",
            why="while tracing, backward reads zeros in place of saved activations; some formula could not use them",
            next="check that loss.backward() works without Plimsoll; if it does, please report this model",
        ),
    )


@contextlib.contextmanager
def _explained(model: nn.Module, refusal: Callable[[str], PlimsollError]) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*_DEPENDS_ON_DATA, *_WITHOUT_FAKE) as error:
        raise _not_fakeable(model, error) from error
    except _REFUSALS as error:
        raise refusal(f"{type(error).__name__}: {first_line(error)}") from error


def _not_fakeable(model: nn.Module, error: Exception) -> TracingFailed:
    if isinstance(error, _DEPENDS_ON_DATA):
        op = getattr(error, "func", "an op")
        return TracingFailed(
            f"{type(model).__name__} cannot be traced without data: the result of {op} depends on values.",
            why="a fake trace knows shapes only; routing, masking by content and .item() on activations need numbers",
            next="trace on the device itself (real parameters, no device_profile), "
            "or pass index and mask tensors of the batch as real tensors on the CPU",
        )
    return TracingFailed(
        f"{type(model).__name__} runs an op that has no fake form: {first_line(error)}",
        why="the op has no meta kernel, so its output shapes are not known without running it",
        next="register one with torch.library.register_fake, or trace on the device itself",
    )


def first_line(error: BaseException) -> str:
    """The first line of an exception's text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
