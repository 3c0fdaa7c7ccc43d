"""A trace that ends with an optimizer's step and another form of that optimizer in, the trace with that form's step out."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import msgspec
from torch import nn
from torch.optim import Optimizer

from plimsoll.artifacts.trace import Category, Phase, Trace
from plimsoll.tracing.assemble import optimizer_ops
from plimsoll.tracing.kernels import runs_gpu_kernels
from plimsoll.tracing.lives import optimizer_storages
from plimsoll.tracing.optimizer import trace_optimizer


def with_options(
    trace: Trace,
    optimizer: Optimizer,
    model: nn.Module,
    options: Mapping[str, object],
    without_gradient: frozenset[str],
) -> Trace:
    """The same forward and backward, and the step of the optimizer with other options in its groups.

    Args:
        trace: of the step, which may or may not end with the optimizer as it is.
        optimizer: over the model's parameters; it is only read.
        model: names the parameters.
        options: such as ``{"fused": True, "foreach": None}``.
        without_gradient: parameters that the step leaves without a gradient.

    Raises:
        InvalidModel, TracingFailed: as ``trace`` raises them.
    """
    other = copy.copy(optimizer)  # shares parameters and state
    other.param_groups = [{**group, **options} for group in optimizer.param_groups]
    log = trace_optimizer(other, model, without_gradient, on_gpu=runs_gpu_kernels(trace.device))
    first = next((t for t, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER), len(trace.ops))
    last, end = len(trace.ops), first + log.tracer.tick
    kept = [s for s in trace.storages if s.born < first and s.category is not Category.OPTIMIZER_STATE]
    assert [s.id for s in kept] == list(range(len(kept)))
    storages = [msgspec.structs.replace(s, dies=end if s.dies >= last else min(s.dies, first)) for s in kept]
    storages += optimizer_storages(log, first_id=len(kept), first_tick=first)
    return msgspec.structs.replace(
        trace,
        ops=(*trace.ops[:first], *optimizer_ops(log)),
        specs=trace.specs | log.tracer.specs,
        storages=tuple(storages),
    )
