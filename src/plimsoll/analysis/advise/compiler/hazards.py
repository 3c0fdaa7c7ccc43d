"""A trace in, the ops out that keep its step from being captured as a CUDA graph: what torch itself says of each op.

A CUDA graph replays kernels with fixed shapes and without the host. Ops whose result the host reads (``.item()``), and ops
whose output shape depends on values (``nonzero``, indexing with a mask), cannot be in one; torch tags both kinds.
"""

from __future__ import annotations

from collections import Counter

import torch

from plimsoll.artifacts.advice import CaptureHazard
from plimsoll.artifacts.trace import Phase, Trace, TraceOp

_MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Indexing waits for values only where an index is a mask."""
_MASK_TYPES = ("b8[", "u8[")


def find_hazards(trace: Trace) -> tuple[CaptureHazard, ...]:
    """The ops of the step that the host has to wait for, by kind and place, most frequent first.

    Args:
        trace: of a device or fake; fake tensors give values to no one, so a fake trace has only hazards of shape.
    """
    found: Counter[tuple[str, str]] = Counter()
    for op in trace.ops:
        what = _hazard(op)
        if what:
            found[what, _place(op)] += 1
    return tuple(CaptureHazard(what=what, where=where, count=count) for (what, where), count in found.most_common())


def _place(op: TraceOp) -> str:
    where = op.module or "the model itself"
    return where if op.phase is Phase.FORWARD else f"{op.phase.value} of {where}"


def _hazard(op: TraceOp) -> str:
    if op.name in _MASKED:
        indices = op.cost_key.partition(";")[2].partition("]]")[0]
        return f"{op.name} with a mask" if any(name in indices for name in _MASK_TYPES) else ""
    packet = getattr(torch.ops.aten, op.name, None)
    if packet is None or "." in op.name:
        return ""
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
    if op.phase is Phase.OPTIMIZER and op.name == "_local_scalar_dense":
        return "the optimizer reads its step count on the host (capturable=True keeps it on the device)"
    if torch.Tag.data_dependent_output in tags:
        return f"{op.name} reads a value on the host (.item(), a branch on data)"
    if torch.Tag.dynamic_output_shape in tags:
        return f"{op.name} makes a shape that depends on values"
    return ""
