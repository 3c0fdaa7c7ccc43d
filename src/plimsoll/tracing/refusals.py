"""An exception of a step in, the one clear error of ours out; out-of-memory and interrupts pass as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from plimsoll.errors import InvalidBatch, TracingFailed

_REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, ArithmeticError)
_DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException)
_WITHOUT_FAKE = (UnsupportedFakeTensorException, UnsupportedOperatorException)


@contextlib.contextmanager
def explain_forward(model: nn.Module) -> Iterator[None]:
    """Name what a forward pass refused.

    Raises:
        InvalidBatch: the model raised.
        TracingFailed: it needs values or kernels that fake tensors do not have.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*_DEPENDS_ON_DATA, *_WITHOUT_FAKE) as error:
        raise _not_fakeable(model, error) from error
    except _REFUSALS as error:
        raise InvalidBatch(
            f"{type(model).__name__} refused the batch: {type(error).__name__}: {first_line(error)}",
            why="the forward pass failed before anything was planned",
            next="check that model(*batch) (tuple), model(**batch) (dict) or model(batch) (tensor) works",
        ) from error


@contextlib.contextmanager
def explain_backward(model: nn.Module) -> Iterator[None]:
    """Name what a backward pass refused.

    Raises:
        TracingFailed: whatever the reason; forward has already shown that the batch fits.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*_DEPENDS_ON_DATA, *_WITHOUT_FAKE) as error:
        raise _not_fakeable(model, error) from error
    except _REFUSALS as error:
        raise TracingFailed(
            f"The backward pass of {type(model).__name__} failed: {type(error).__name__}: {first_line(error)}",
            why="while tracing, backward reads zeros in place of saved activations; some formula could not use them",
            next="check that loss.backward() works without Plimsoll; if it does, please report this model",
        ) from error


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
