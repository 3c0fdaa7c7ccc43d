"""Choose the dropped values to sample: as few as possible, such that every dropped value is sampled or shows in a sampled
value.

A value *shows* in the result of an op if a wrong value makes the result wrong. The walk goes from the last op to the first, and
samples each dropped value that does not show in a sampled one: the sinks of the graph. Some ops read a value without showing
it: a dropout mask uses only the shape of a tensor, ``x > 0`` keeps one bit of each element, a slice some of the elements.

Known weakness: if an op maps many inputs to the same output (``relu`` of negative numbers, ``x + y`` with a tiny ``y``), small
differences show in some elements only, and samples may miss them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Set
from typing import Any

import torch

from plimsoll.artifacts.region import RegionGraph
from plimsoll.engine.replay_code import RecordedRegion
from plimsoll.tracing.recorder.recorder import RecordedOp, Ref
from plimsoll.tracing.recorder.storages import Geometry

_LIKE = r"(empty|zeros|ones|full|rand|randn|randint)_like|new_\w+"
"""Read the shape of a tensor, but not its elements."""
_FILL = r"(fill|zero|bernoulli|cauchy|exponential|geometric|log_normal|normal|random|uniform)_"
"""Write to the memory of a tensor without reading its elements."""
_ROUND = r"(round|floor|ceil|trunc)_?|floor_divide|sign|sgn|heaviside|bernoulli|binomial|poisson|fake_quantize_\w+"
"""Map many numbers to one."""
_PICK = r"a?(max|min)|aminmax|(nan)?median|kthvalue|mode|topk|index|index_select|gather|take|embedding|\w*max_pool\w+"
"""Read some elements and skip others."""
_HIDES = re.compile("|".join((_LIKE, _FILL, _ROUND, _PICK)))
"""Names of torch's ops whose results do not show every difference in the tensors that they read."""


def sinks(
    graph: RegionGraph,
    recording: RecordedRegion,
    replayed: Iterable[int],
    dropped: Set[int],
    filled: Callable[[Geometry], Geometry],
) -> frozenset[int]:
    """Return the values to sample. If ``sin``, ``tanh`` and ``* mask`` run in a row and all results are dropped, that is the
    product. If the product is not dropped, it is the result of ``tanh`` and the mask.

    Args:
        graph: the region.
        recording: its ops and values.
        replayed: ops that run again; what others read is not rebuilt.
        dropped: values that come back bit for bit, and can be sampled.
        filled: puts numbers in the place of unknown ones in a geometry.
    """
    chosen: set[int] = set()
    shown: dict[int, list[Geometry]] = {}

    def is_shown(value: int) -> bool:
        return value in chosen or covers(shown.get(value, ()), filled(recording.values[value].base))

    for op in sorted(replayed, reverse=True):
        recorded = recording.ops[op]
        for value in graph.ops[op].writes:
            if value in dropped and not is_shown(value):
                chosen.add(value)
        made = _main_result(recorded, recording)
        if made is None or not is_shown(made):
            continue
        is_number = _is_number(recording.values[made].base.dtype)
        for ref in _tensors(recorded):
            read = recording.to_local[ref.value]
            if is_number or not _is_number(ref.geometry.dtype):
                shown.setdefault(read, []).append(filled(ref.geometry))
    return frozenset(chosen)


def covers(parts: Iterable[Geometry], whole: Geometry) -> bool:
    """Whether views on one storage together show all of it. Views that start at the same place are assumed to show the same
    elements.
    """
    sizes: dict[int, int] = {}
    for part in parts:
        start = part.offset * part.dtype.itemsize
        sizes[start] = max(sizes.get(start, 0), _bytes(part))
    return sum(sizes.values()) >= _bytes(whole)


def _main_result(op: RecordedOp, recording: RecordedRegion) -> int | None:
    """The first result of an op if it shows all tensors that the op reads, else ``None``.

    Other results may depend on fewer tensors: the mean of a layer norm does not depend on its weight. Operators from outside of
    torch and results in lists are unknown, so they give ``None``.
    """
    first = op.outputs[0] if op.outputs else None
    if first is None or op.func.namespace != "aten" or _HIDES.fullmatch(op.func._schema.name.split("::")[1]):
        return None
    if any(isinstance(each.type, torch.ListType) for each in op.func._schema.returns):
        return None
    return recording.to_local.get(first.value)


def _tensors(op: RecordedOp) -> list[Ref]:
    found: list[Ref] = []

    def collect(value: Any) -> None:
        if isinstance(value, Ref):
            found.append(value)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    collect((op.args, tuple(op.kwargs.values())))
    return found


def _is_number(dtype: torch.dtype) -> bool:
    """Whether elements are floating-point numbers, not masks or indices."""
    return dtype.is_floating_point or dtype.is_complex


def _bytes(geometry: Geometry) -> int:
    """Bytes of the distinct elements; an expanded dimension repeats the same elements."""
    sizes = zip(geometry.size, geometry.stride, strict=True)
    return math.prod(size for size, stride in sizes if stride) * geometry.dtype.itemsize
