"""A stage's trace, a layout and an optimizer in, the trace of one rank with everything that it holds out. No torch here.

What is added to the trace: ZeRO's shards and gathered copies, buffers of collectives and the collectives themselves as ops,
gradients that last over micro-batches, optimizer state, master weights, and the optimizer's step as one op at the end. The
trace stays that of one micro-batch; ``overlap`` says what happens once per step and what hides behind computing.
"""

from __future__ import annotations

from plimsoll.artifacts.layout import Layout
from plimsoll.artifacts.optimizer_use import OptimizerUse
from plimsoll.artifacts.trace import Category, OpSpec, Phase, Trace
from plimsoll.estimator.parallelism.editing import Edit
from plimsoll.estimator.parallelism.gradients import gradients_of
from plimsoll.estimator.parallelism.replicated import accumulate, reduce_in_buckets
from plimsoll.estimator.parallelism.units import find_units
from plimsoll.estimator.parallelism.zero import Sharding

_GRADIENT_SHARDS = 2
_PARAMETER_SHARDS = 3
"""The stages of ZeRO that shard them."""


def rank_trace(stage_trace: Trace, layout: Layout, optimizer: OptimizerUse | None = None) -> Trace:
    """The step of one rank of a stage.

    Args:
        stage_trace: one stage's micro-batch, without an optimizer step.
        layout: ``dp``, ``cp``, ``ep``, ``zero`` and ``micro_batches`` are read; what ``tp`` and ``sp`` do is in the trace.
        optimizer: what it needs for ``rank_parameters(stage_trace, layout)``; ``None``: no state and no step.

    Returns:
        The trace of a rank with full shards. Its collectives over the data-parallel ranks are ops of the group ``shards``,
        their buffers storages of the category COMMUNICATION, its parameters those that the rank updates.

    Example:
        >>> trace = rank_trace(stage.trace, Layout(dp=8, zero=3), use)  # doctest: +SKIP
        >>> sum(p.bytes for p in trace.parameters)  # doctest: +SKIP
        2007565312

    Source: Rajbhandari et al. 2020 (ZeRO), section 5; buffers and their order as in torch 2.13's FSDP2 and DDP (``zero``,
    ``replicated``). ZeRO-1 and -2 cut every parameter along its first dimension, as FSDP2 does; DeepSpeed cuts the flattened
    whole, ZeroRedundancyOptimizer gives whole parameters to ranks: the sums are the same up to rounding.
    """
    edit = Edit(stage_trace)
    units = find_units(stage_trace, layout)
    sharding = Sharding(edit, layout, units)
    gradients = gradients_of(stage_trace, units)
    alone = [each for each in gradients if each.unit.ranks == 1]
    spread = [each for each in gradients if each.unit.ranks > 1]
    parameters = stage_trace.parameters
    if layout.zero == _PARAMETER_SHARDS:
        parameters = sharding.shard_parameters()
        sharding.gather_in_forward()
    if layout.zero >= _GRADIENT_SHARDS:
        sharding.run_backward(spread, is_gathering=layout.zero == _PARAMETER_SHARDS)
    elif spread:
        reduce_in_buckets(edit, spread)
    if layout.micro_batches > 1:
        accumulate(edit, alone)
    if optimizer is not None:
        _step(edit, optimizer)
    if 0 < layout.zero < _PARAMETER_SHARDS:
        sharding.gather_after_step()
    return edit.finish(parameters=parameters, notes=_notes(layout, optimizer))


def _step(edit: Edit, optimizer: OptimizerUse) -> None:
    """State and master weights from the start; the step as one op, with what is alive together at its highest moment."""
    for name, size in optimizer.state_bytes.items():
        edit.add(size, Category.OPTIMIZER_STATE, f"optimizer state:{name}", -1, None)
    for name, size in optimizer.master_bytes.items():
        edit.add(size, Category.OPTIMIZER_STATE, f"master weight:{name}", -1, None)
    spec = OpSpec(name="optimizer_step", flops=optimizer.flops, moved_bytes=optimizer.moved_bytes, dtype="f32")
    key = f"optimizer_step({optimizer.name};{optimizer.form};{optimizer.flops};{optimizer.moved_bytes})"
    step = edit.op(edit.last_tick, optimizer.name, key, spec, Phase.OPTIMIZER)
    for temporary in optimizer.temporaries:
        edit.add(temporary.bytes, Category.TEMPORARY, f"{optimizer.name}: {temporary.label}", step, step.done)


def sharding_notes(layout: Layout) -> tuple[str, ...]:
    """How ZeRO and expert parallelism are taken to run where there is a choice, in words."""
    notes = []
    if layout.zero == _PARAMETER_SHARDS:
        notes.append(
            "FSDP2's defaults: every block and the model sharded, blocks resharded after forward, the rest after backward"
        )
    if layout.zero >= _GRADIENT_SHARDS and layout.micro_batches > 1:
        notes.append("gradients are reduce-scattered after every micro-batch")
    if layout.ep > 1:
        ranks = layout.shards // layout.ep
        notes.append(
            f"experts are sharded over {ranks} ranks; their collectives are priced as those of {layout.shards}"
        )
    return tuple(notes)


def _notes(layout: Layout, optimizer: OptimizerUse | None) -> tuple[str, ...]:
    return (f"one rank of {layout}", *sharding_notes(layout), *(optimizer.notes if optimizer is not None else ()))
