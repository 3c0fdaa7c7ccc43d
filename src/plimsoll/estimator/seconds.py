"""The trace of one rank and its costs in, the seconds of one micro-batch by what they are spent on out."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.trace import Category, Phase, Trace

_DATA_PARALLEL = ("dp", "shards")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Seconds of one micro-batch, without recomputation, data-parallel collectives and the optimizer's step.

    ``weight_gradient_seconds`` is the part of backward that makes gradients of parameters, ``communication_seconds`` the
    part of forward and backward that collectives take, ``model_flops`` the arithmetic of both.
    """

    forward_seconds: float
    backward_seconds: float
    weight_gradient_seconds: float
    communication_seconds: float
    model_flops: int


def measure_rank(trace: Trace, costs: Costs) -> RankSeconds:
    """Add up the seconds of a rank's ops by phase."""
    makers = {storage.born for storage in trace.storages if storage.category is Category.GRADIENT and storage.born >= 0}
    seconds = dict.fromkeys(Phase, 0.0)
    weight_gradient = communication = 0.0
    flops = 0
    for tick, op in enumerate(trace.ops):
        spec = trace.specs.get(op.cost_key)
        cost = costs.ops.get(op.cost_key)
        if cost is None or op.phase is Phase.OPTIMIZER or (spec is not None and spec.group in _DATA_PARALLEL):
            continue
        seconds[op.phase] += cost.seconds
        if tick in makers:
            weight_gradient += cost.seconds
        if spec is not None:
            communication += cost.seconds if spec.group else 0.0
            flops += 0 if spec.group else spec.flops
    return RankSeconds(
        forward_seconds=seconds[Phase.FORWARD],
        backward_seconds=seconds[Phase.BACKWARD],
        weight_gradient_seconds=weight_gradient,
        communication_seconds=communication,
        model_flops=flops,
    )
