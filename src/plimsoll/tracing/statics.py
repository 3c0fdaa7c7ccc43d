"""A tracer, a model and the arguments of a call in; what is there before the step, made known to the tracer, out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import TraceParameter
from plimsoll.tracing.fsdp2 import waiting_gradients
from plimsoll.tracing.local_tensors import dense_parts, local_bytes
from plimsoll.tracing.recorder.calling import call_tensors
from plimsoll.tracing.recorder.opkey import dtype_name
from plimsoll.tracing.tracer import StepTracer


def register_statics(
    tracer: StepTracer, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> frozenset[int]:
    """Parameters, gradients that exist, buffers and the batch; the storages of the parameters."""
    parameters: set[int] = set()
    for name, parameter in model.named_parameters():
        parameters |= _add(tracer, parameter, Origin.PARAMETER, f"parameter:{name}")
        if parameter.grad is not None:
            _add(tracer, parameter.grad, Origin.EXTERNAL, f"gradient:{name}")
    for name, gradient in waiting_gradients(model):
        _add(tracer, gradient, Origin.EXTERNAL, f"gradient:{name}")
    for name, buffer in model.named_buffers():
        _add(tracer, buffer, Origin.BUFFER, f"buffer:{name}")
    for position, tensor in enumerate(call_tensors(args, kwargs)):
        _add(tracer, tensor, Origin.INPUT, f"batch:{position}")
    return frozenset(parameters)


def _add(tracer: StepTracer, tensor: torch.Tensor, origin: Origin, name: str) -> set[int]:
    """The storages of this process behind a tensor, made known."""
    return {tracer.values[tracer.add_static(part, origin, name)].storage for part in dense_parts(tensor)}


def gradient_storages(tracer: StepTracer, model: nn.Module) -> set[int]:
    """The storages of this process in which the gradients of the parameters are now."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return {tracer.table.find(part) for gradient in gradients for part in dense_parts(gradient)}


def listed_parameters(tracer: StepTracer, model: nn.Module) -> tuple[TraceParameter, ...]:
    """Every parameter once, with its storage in the tracer's table and its other names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(
        TraceParameter(
            name=name,
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
            bytes=local_bytes(parameter),
            storage=tracer.table.find(dense_parts(parameter)[0]),
            is_trainable=parameter.requires_grad,
            aliases=tuple(names[parameter][1:]),
        )
        for name, parameter in model.named_parameters()
    )
