"""Computes which share of a step the compiler captured, gives advice, and finds ops that a CUDA graph cannot capture.

The eager run and the run under the compiler execute nearly the same ops in the same order; a few differ (a mask that is folded
to a constant, heads that are not repeated). So captured ops are found by aligning the two sequences of op keys (``difflib``)
and filling the holes.

A CUDA graph replays kernels with fixed shapes and without the host. So it cannot contain ops whose result the host reads
(``.item()``), or ops whose output shape depends on values (``nonzero``, indexing with a mask). torch tags both kinds.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise

import msgspec
import torch

from plimsoll.artifacts.advice import Capture, CaptureHazard, CompilerCoverage
from plimsoll.artifacts.costs import Costs
from plimsoll.artifacts.trace import Phase, Trace, TraceOp

RELY_ON_COMPILER = 0.9
"""If the compiler captures more than this share of the step's time, the compiler's own recomputation sees nearly the whole
step."""
_SHOWN = 4
_MODEL = "the model itself"
_LITTLE = 0.01
"""The modules of uncaptured ops are named only if these ops take more than this share of the step's time."""
_DROPOUT = re.compile(r";0\.0*[1-9]")
"""Finds the dropout probability in the key of a fused attention op: the positional number between 0 and 1.

The scale is a keyword argument, so it does not match.
"""
_MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Indexing ops. They make the host wait for values only if an index is a boolean mask."""
_MASK_TYPES = ("b8[", "u8[")


def judge_coverage(trace: Trace, costs: Costs, capture: Capture) -> CompilerCoverage:
    """Return which share of the step's ops and time the compiler captured, and the advice that follows.

    ``trace`` is of the eager step, ``capture`` is of the same step under the compiler.
    """
    if not capture.is_asked:
        return CompilerCoverage(is_measured=False, note=capture.failure)
    ticks = [tick for tick, op in enumerate(trace.ops) if op.phase is not Phase.OPTIMIZER]
    seconds = {tick: costs.seconds_of(trace.ops[tick].cost_key) for tick in ticks}
    captured = set() if capture.failure else captured_ticks(trace, capture)
    why = capture.failure or ("" if capture.graphs else "torch.compile found no graph in this model")
    found = CompilerCoverage(
        is_measured=True,
        note=f"nothing is captured: {why}" if why else "",
        ops=len(ticks),
        captured_ops=len(captured),
        seconds=sum(seconds.values()),
        captured_seconds=sum(seconds[tick] for tick in captured),
        graphs=capture.graphs,
        breaks=capture.breaks,
    )
    missed: Counter[str] = Counter()
    for tick in ticks:
        if tick not in captured:
            missed[trace.ops[tick].module or _MODEL] += round(seconds[tick] * 1e9)
    names = tuple(name for name, _ in missed.most_common(_SHOWN)) if found.time_share < 1 - _LITTLE else ()
    return msgspec.structs.replace(found, uncaptured=names, advice=_advice(found, trace, captured))


def captured_ticks(trace: Trace, capture: Capture) -> set[int]:
    """Return the positions in ``trace.ops`` of the captured ops.

    These are the forward ops that ran in a captured graph, and the backward ops whose autograd node was made in such a graph.
    """
    return _captured_forward(trace, capture) | _captured_backward(trace, capture)


def _captured_forward(trace: Trace, capture: Capture) -> set[int]:
    """Return the positions in ``trace.ops`` of forward ops that ran in a captured graph.

    Every op between the first and the last matched op of a graph belongs to that graph, even an op without a match.
    """
    ticks = [tick for tick, op in enumerate(trace.ops) if op.phase is Phase.FORWARD]
    runs = [run for run, keys in enumerate(capture.forward) for _ in keys]
    spans: dict[int, tuple[int, int]] = {}
    for place, other in _aligned(trace, ticks, [key for keys in capture.forward for key in keys]):
        first, _ = spans.get(runs[other], (place, place))
        spans[runs[other]] = (first, place)
    return {tick for first, last in spans.values() for tick in ticks[first : last + 1]}


def _captured_backward(trace: Trace, capture: Capture) -> set[int]:
    """Return the positions in ``trace.ops`` of captured backward ops.

    An op without a match counts as captured if the matched ops before and after it are captured.
    """
    ticks = [tick for tick, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD]
    pairs = _aligned(trace, ticks, [op.cost_key for op in capture.backward])
    found: set[int] = set()
    for (place, other), (next_place, next_other) in pairwise([*pairs, (len(ticks), -1)]):
        if capture.backward[other].is_captured:
            is_inside = next_other < 0 or capture.backward[next_other].is_captured
            found.update(ticks[place : next_place if is_inside else place + 1])
    return found


def _aligned(trace: Trace, ticks: Sequence[int], keys: Sequence[str]) -> list[tuple[int, int]]:
    """Find which ops of the trace are the ops that the compiler recorded, and return pairs of positions in ascending order.

    A pair has a position in ``ticks`` (ops of the trace) and the position of the same op in ``keys`` (recorded ops).
    """
    matcher = SequenceMatcher(None, [trace.ops[tick].cost_key for tick in ticks], keys, autojunk=False)
    return [
        (block.a + offset, block.b + offset) for block in matcher.get_matching_blocks() for offset in range(block.size)
    ]


def _advice(found: CompilerCoverage, trace: Trace, captured: set[int]) -> tuple[str, ...]:
    """Return sentences that say what to do about the part of the step that the compiler captured, and about what it missed."""
    missed = dict.fromkeys(
        call.name
        for call in trace.regions
        if sum(tick in captured for tick in range(*call.forward)) < RELY_ON_COMPILER * len(range(*call.forward))
    )
    regions = f"--regions for {', '.join([*missed][:_SHOWN])}" if missed else ""
    if not found.captured_ops:
        return ("Manage the eager model with a plan: the compiler's own recomputation has nothing to work on here.",)
    if found.time_share <= RELY_ON_COMPILER:
        return (
            f"Less than {RELY_ON_COMPILER:.0%} of the time is captured: the compiler cannot see the whole step. Manage the "
            f"uncaptured part{f': {regions}' if regions else ' by a plan on the eager model'}, or remove the breaks first.",
        )
    lines = [
        f"More than {RELY_ON_COMPILER:.0%} of the time is captured: if you train with torch.compile, let it recompute "
        "(torch._functorch.config.activation_memory_budget below 1.0), and do not put a plan around compiled layers: "
        "hooks around a compiled region unpack everything at once."
    ]
    if any(_draws(op) for op in trace.ops if op.phase is Phase.FORWARD):
        lines.append(
            "But this model draws random numbers (dropout): below 1.0 that setting draws them anew in backward, and the "
            "gradients are wrong (an open PyTorch defect). Keep it at 1.0, or train eager under a plan."
        )
    return (*lines, f"Manage what it missed: {regions}.") if regions else tuple(lines)


def _draws(op: TraceOp) -> bool:
    """Return True if the op draws random numbers. torch tags fused attention too, which draws only if its dropout is not 0."""
    is_attention = "scaled_dot_product" in op.name
    return bool(_DROPOUT.search(op.cost_key)) if is_attention else torch.Tag.nondeterministic_seeded in _tags(op.name)


@functools.cache
def _tags(name: str) -> frozenset[torch.Tag]:
    """Return the tags that torch puts on the overloads of an ATen op; an empty set for an op that is not ATen's."""
    packet = None if "." in name else getattr(torch.ops.aten, name, None)
    overloads = () if packet is None else packet.overloads()
    return frozenset(tag for overload in overloads for tag in getattr(packet, overload).tags)


def find_hazards(trace: Trace) -> tuple[CaptureHazard, ...]:
    """List the ops that a CUDA graph cannot capture, because the host waits for their values.

    Each entry has the kind of op, its module and its count; the most frequent comes first. Fake tensors do not have values to
    read, so a fake trace only shows ops whose output shape depends on values.
    """
    found: Counter[tuple[str, str]] = Counter()
    for op in trace.ops:
        what = _hazard(op)
        if what:
            found[what, _place(op)] += 1
    return tuple(CaptureHazard(what=what, where=where, count=count) for (what, where), count in found.most_common())


def _place(op: TraceOp) -> str:
    where = op.module or _MODEL
    return where if op.phase is Phase.FORWARD else f"{op.phase.value} of {where}"


def _hazard(op: TraceOp) -> str:
    if op.name in _MASKED:
        indices = op.cost_key.partition(";")[2].partition("]]")[0]
        return f"{op.name} with a mask" if any(name in indices for name in _MASK_TYPES) else ""
    if op.phase is Phase.OPTIMIZER and op.name == "_local_scalar_dense":
        return "the optimizer reads its step count on the host (capturable=True keeps it on the device)"
    tags = _tags(op.name)
    if torch.Tag.data_dependent_output in tags:
        return f"{op.name} reads a value on the host (.item(), a branch on data)"
    if torch.Tag.dynamic_output_shape in tags:
        return f"{op.name} makes a shape that depends on values"
    return ""
