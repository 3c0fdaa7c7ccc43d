"""Turns a traced step into the same step under a technique: another loss kernel, another type of arithmetic. No torch here.

What a technique changes in a rank's state, gradients and collectives is where these are (``parallelism/rank``,
``optimizers``); here is what it changes in the model's own ops and tensors, before the step is cut into stages.
"""

from __future__ import annotations

from msgspec.structs import replace

from plimsoll.artifacts.job import Techniques
from plimsoll.artifacts.trace import OpSpec, Trace
from plimsoll.errors import InvalidOption
from plimsoll.planning.what_if import HeadAndLoss, find_head, with_chunked_loss

_PRODUCTS = frozenset(["mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear"])
_PASSES_OF_FUSED_LOSS = 3
"""A fused loss reads the logits for their largest and their sum, reads them again, and writes the gradient."""


def with_techniques(trace: Trace, how: Techniques) -> Trace:
    """The step of one micro-batch under techniques that change the model's own ops.

    Raises:
        InvalidOption: the loss is to be computed otherwise, and the step has none over classes.

    Example:
        >>> with_techniques(trace, Techniques(tf32=True))  # doctest: +SKIP
    """
    if how.tf32:
        specs = {key: _in_tf32(spec) for key, spec in trace.specs.items()}
        trace = replace(trace, specs=specs)
    if how.loss in ("chunked", "fused", "fused-linear"):
        head = find_head(trace)
        if head is None:
            raise InvalidOption(
                f"loss={how.loss}, but {trace.model} has no head with a loss over classes.",
                why="it is found as a log-softmax behind a matrix product, outside of the blocks; tensor parallelism has "
                "its own loss, which never holds all logits",
                next="leave loss= out",
            )
        if how.loss != "chunked":
            trace = _with_fused_loss(trace, head, how.loss)
        if how.loss != "fused":
            trace = with_chunked_loss(trace, head)
    return trace


def _in_tf32(spec: OpSpec) -> OpSpec:
    return replace(spec, dtype="tf32") if spec.dtype == "f32" and spec.name in _PRODUCTS else spec


def _with_fused_loss(trace: Trace, head: HeadAndLoss, name: str) -> Trace:
    """Logits once, the gradient in their place; one kernel instead of casts, log-softmax and their backwards."""
    end = max((trace.storages[s].born for s in head.all_gradients), default=head.loss_tick)
    logits, *others = sorted(head.logit_storages, key=lambda storage: trace.storages[storage].born)
    storages = list(trace.storages)
    storages[logits] = replace(storages[logits], dies=max(storages[logits].dies, end + 1))
    for storage in others:
        storages[storage] = replace(storages[storage], bytes=0)
    key, freed = f"{name}_loss({head.rows}x{head.classes})", "in_fused_loss()"
    least = head.rows * head.classes
    ops = list(trace.ops)
    for tick in range(head.first_tick + 1, end):
        spec = trace.specs[ops[tick].cost_key]
        is_product = spec.flops >= 2 * least * min(head.features, 2)
        if ops[tick].region < 0 and spec.moved_bytes >= least and not is_product:
            ops[tick] = replace(ops[tick], cost_key=key if tick + 1 == head.loss_tick else freed)
    moved_bytes = _PASSES_OF_FUSED_LOSS * head.bytes
    specs = {
        key: OpSpec(name="fused_cross_entropy", flops=0, moved_bytes=moved_bytes, dtype="f32"),
        freed: OpSpec(name="fused_cross_entropy", flops=0, moved_bytes=0, dtype="f32"),
    }
    return replace(trace, storages=tuple(storages), ops=tuple(ops), specs=trace.specs | specs)
