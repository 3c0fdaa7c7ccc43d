"""A tracer, a model and the arguments of a call in; what is there before the step, made known to the tracer, out."""

from __future__ import annotations

from typing import Any

from torch import nn

from plimsoll.artifacts.region import Origin
from plimsoll.artifacts.trace import TraceParameter
from plimsoll.recording.calling import call_tensors
from plimsoll.recording.opkey import dtype_name
from plimsoll.tracing.tracer import StepTracer


def register_statics(
    tracer: StepTracer, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> frozenset[int]:
    """Parameters, gradients that exist, buffers and the batch; the storages of the parameters."""
    parameters: set[int] = set()
    for name, parameter in model.named_parameters():
        value = tracer.add_static(parameter, Origin.PARAMETER, f"parameter:{name}")
        parameters.add(tracer.values[value].storage)
        if parameter.grad is not None:
            tracer.add_static(parameter.grad, Origin.EXTERNAL, f"gradient:{name}")
    for name, buffer in model.named_buffers():
        tracer.add_static(buffer, Origin.BUFFER, f"buffer:{name}")
    for position, tensor in enumerate(call_tensors(args, kwargs)):
        tracer.add_static(tensor, Origin.INPUT, f"batch:{position}")
    return frozenset(parameters)


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
            bytes=parameter.numel() * parameter.element_size(),
            storage=tracer.table.find(parameter),
            is_trainable=parameter.requires_grad,
            aliases=tuple(names[parameter][1:]),
        )
        for name, parameter in model.named_parameters()
    )
