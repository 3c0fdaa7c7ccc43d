"""Adds up the seconds of one rank's micro-batch, with data-parallel collectives overlapping its ops, without torch.

There are two streams. One computes, and runs the collectives of tensor, context and expert parallelism, which its ops wait for.
The other runs the data-parallel collectives, one after the other.

    all_gather, forward    may start when the previous gather was copied out: the host is one block ahead
    all_gather, backward   may start at its place in the trace, one block before the block that needs it
    both                   the copy-out that follows waits for them
    reduce_scatter         starts when its gradients were copied in; the next copy-in and the end of backward wait for it
    all_reduce             starts when its bucket is full; the end of the last backward waits
    all_gather, optimizer  follows the step; nothing hides it, or the next forward does (Megatron's overlap_param_gather)

Source: FSDP2 and DDP of torch 2.13. Known weaknesses: collectives do not slow overlapping kernels (in fact they occupy some
multiprocessors and bandwidth), gathers and reductions share one stream here but have one each in FSDP2, and the host is
never late.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.trace import Category, Phase, Trace
from plimsoll.estimator.parallelism.editing import BESIDE
from plimsoll.planning.costing.host import HOST_COPY
from plimsoll.planning.costing.roofline import is_product

_COPY_OUT = "split_with_sizes_copy"
_COPY_IN = "chunk_cat"
_ALL_REDUCE = "all_reduce"
_ALL_GATHER = "all_gather"
_REDUCE_SCATTER = "reduce_scatter"


@dataclass(frozen=True, slots=True)
class OverlappedSeconds:
    """One rank's seconds, as data: forward and backward of one micro-batch, and the additional time per step.

    ``reduction_seconds`` is what the all-reduce of replicated gradients adds to the last micro-batch's backward,
    ``optimizer_seconds`` is the optimizer's step and the gather that follows it. Data-parallel collectives of forward and
    backward take ``communication_seconds``; of this time, compute waits during ``exposed_seconds``.
    """

    forward_seconds: float
    backward_seconds: float
    reduction_seconds: float
    optimizer_seconds: float
    communication_seconds: float
    exposed_seconds: float

    @property
    def hidden_share(self) -> float:
        """The share of the data-parallel collectives' time in forward and backward during which something is computed.

        It is 1 without such collectives.
        """
        return 1.0 - self.exposed_seconds / self.communication_seconds if self.communication_seconds else 1.0


def overlapped_seconds(trace: Trace, costs: Costs, *, gathers_late: bool = False) -> OverlappedSeconds:
    """Return the seconds of one rank whose data-parallel collectives run at the same time as compute.

    With ``gathers_late``, the gather after the optimizer's step runs during the next forward.

    Example:
        >>> seconds = overlapped_seconds(trace, roofline_costs(trace, device, layout))  # doctest: +SKIP
        >>> f"{seconds.hidden_share:.0%} of the collectives are hidden"  # doctest: +SKIP
        '97% of the collectives are hidden'
    """
    every = _Streams(trace, costs, reduces=False, gathers_late=gathers_late)
    last = _Streams(trace, costs, reduces=True, gathers_late=gathers_late)
    computing = dict.fromkeys(Phase, 0.0)
    communicating = 0.0
    for op in trace.ops:
        seconds = costs.seconds_of(op.cost_key)
        if not _is_shared(trace, op.cost_key):
            computing[op.phase] += seconds
        elif op.phase is not Phase.OPTIMIZER and op.name != _ALL_REDUCE:
            communicating += seconds
    forward_seconds = every.ends[Phase.FORWARD]
    backward_seconds = every.ends[Phase.BACKWARD] - forward_seconds
    return OverlappedSeconds(
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        reduction_seconds=max(0.0, last.ends[Phase.BACKWARD] - every.ends[Phase.BACKWARD]),
        optimizer_seconds=every.ends[Phase.OPTIMIZER] - every.ends[Phase.BACKWARD],
        communication_seconds=communicating,
        exposed_seconds=max(0.0, every.ends[Phase.BACKWARD] - computing[Phase.FORWARD] - computing[Phase.BACKWARD]),
    )


def _is_shared(trace: Trace, cost_key: str) -> bool:
    spec = trace.specs.get(cost_key)
    return spec is not None and spec.group in BESIDE


class _Streams:
    """Walks through a trace with one clock for compute and one for collectives. ``ends`` is the time when each phase ends."""

    def __init__(self, trace: Trace, costs: Costs, *, reduces: bool, gathers_late: bool) -> None:
        self.now = 0.0
        self.gathers_late = gathers_late
        self.late = 0.0
        self.busy_until = 0.0
        self.copied_out = 0.0
        self.gathered: list[float] = []
        self.scattered = 0.0
        self.reduced = 0.0
        self.ends: dict[Phase, float] = {}
        phase = Phase.FORWARD
        for op in trace.ops:
            if op.phase is not phase:
                self._leave(phase)
                phase = op.phase
            seconds = costs.seconds_of(op.cost_key)
            if not _is_shared(trace, op.cost_key):
                self._compute(op.name, seconds)
            elif op.name != _ALL_REDUCE or reduces:
                self._communicate(op.name, phase, seconds)
        self._leave(phase)
        for each in Phase:
            self.ends.setdefault(each, self.now)
        self.ends[Phase.OPTIMIZER] += max(0.0, self.late - self.ends[Phase.FORWARD])

    def _compute(self, name: str, seconds: float) -> None:
        if name == _COPY_OUT and self.gathered:
            self.now = max(self.now, self.gathered.pop(0))
        if name == _COPY_IN:
            self.now = max(self.now, self.scattered)
        self.now += seconds
        if name == _COPY_OUT:
            self.copied_out = self.now

    def _communicate(self, name: str, phase: Phase, seconds: float) -> None:
        if self.gathers_late and phase is Phase.OPTIMIZER and name == _ALL_GATHER:
            self.late += seconds
            return
        is_gather = name in (_ALL_GATHER, HOST_COPY)
        may_start = self.copied_out if is_gather and phase is Phase.FORWARD else self.now
        end = self.busy_until = max(may_start, self.busy_until) + seconds
        if phase is Phase.OPTIMIZER:
            self.now = end
        elif name == HOST_COPY:
            return  # later collectives on the stream wait for it
        elif name == _ALL_GATHER:
            self.gathered.append(end)
        elif name == _REDUCE_SCATTER:
            self.scattered = end
        else:
            self.reduced = end

    def _leave(self, phase: Phase) -> None:
        """Record the current time as the end of a phase (forward, backward or optimizer). The end of backward waits for the
        reductions of gradients.
        """
        if phase is Phase.BACKWARD:
            self.now = max(self.now, self.scattered, self.reduced)
        self.ends[phase] = self.now


_DATA_PARALLEL = ("dp", *BESIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """The seconds of one micro-batch, without recomputation, data-parallel collectives and the optimizer's step.

    ``weight_gradient_seconds`` is the part of backward that makes gradients of parameters, ``communication_seconds`` the part
    of forward and backward in collectives. ``model_flops`` counts the arithmetic of both phases, ``product_seconds`` the time
    of matrix products, convolutions and attention.
    """

    forward_seconds: float
    backward_seconds: float
    weight_gradient_seconds: float
    communication_seconds: float
    model_flops: int
    product_seconds: float


def measure_rank(trace: Trace, costs: Costs) -> RankSeconds:
    """Add up the seconds of a rank's ops by phase and kind."""
    makers = {storage.born for storage in trace.storages if storage.category is Category.GRADIENT and storage.born >= 0}
    seconds = dict.fromkeys(Phase, 0.0)
    weight_gradient = communication = products = 0.0
    flops = 0
    for tick, op in enumerate(trace.ops):
        spec = trace.specs.get(op.cost_key)
        op_seconds = costs.seconds_of(op.cost_key)
        if op.phase is Phase.OPTIMIZER or (spec is not None and spec.group in _DATA_PARALLEL):
            continue
        seconds[op.phase] += op_seconds
        if tick in makers:
            weight_gradient += op_seconds
        if spec is not None:
            communication += op_seconds if spec.group else 0.0
            flops += 0 if spec.group else spec.flops
            products += op_seconds if is_product(spec.name) else 0.0
    return RankSeconds(
        forward_seconds=seconds[Phase.FORWARD],
        backward_seconds=seconds[Phase.BACKWARD],
        weight_gradient_seconds=weight_gradient,
        communication_seconds=communication,
        model_flops=flops,
        product_seconds=products,
    )
