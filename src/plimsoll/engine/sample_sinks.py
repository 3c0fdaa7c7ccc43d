"""Choose which dropped values to sample. Samples of rebuilt values detect wrong recomputation. Few values are chosen, such that
each dropped value is sampled or shows in a sampled value.

A value *shows* in the result of an op if a wrong value makes the result wrong. The walk goes from the last op to the first, and
samples each dropped value that does not show in a sampled value: the sinks of the graph. Some ops read a value, and yet it does
not show: a dropout mask uses only the shape of a tensor, ``x > 0`` keeps one bit of each element, a slice some of the elements.

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
"""A pattern for names of ops that read the shape of a tensor, but not its elements."""
_FILL = r"(fill|zero|bernoulli|cauchy|exponential|geometric|log_normal|normal|random|uniform)_"
"""A pattern for names of ops that write to the memory of a tensor without reading its elements."""
_ROUND = r"(round|floor|ceil|trunc)_?|floor_divide|sign|sgn|heaviside|bernoulli|binomial|poisson|fake_quantize_\w+"
"""A pattern for names of ops that map many numbers to one number."""
_PICK = r"a?(max|min)|aminmax|(nan)?median|kthvalue|mode|topk|index|index_select|gather|take|embedding|\w*max_pool\w+"
"""A pattern for names of ops that read some elements and skip others."""
_HIDES = re.compile("|".join((_LIKE, _FILL, _ROUND, _PICK)))
"""Names of torch's ops whose results do not show every difference in the tensors that they read."""


def sinks(
    graph: RegionGraph,
    recording: RecordedRegion,
    replayed: Iterable[int],
    dropped: Set[int],
    filled: Callable[[Geometry], Geometry],
) -> frozenset[int]:
    """Return the values to sample, as ids of the region's graph. A wrong dropped value then shows in at least one sample.

    If ``sin``, ``tanh`` and ``* mask`` run one after the other and all results are dropped, only the product is sampled. If the
    product is not dropped, the result of ``tanh`` and the mask are sampled.

    Args:
        graph: the graph of the region.
        recording: the recorded ops and values of the region.
        replayed: the ops that run again. Values that only other ops read are not rebuilt.
        dropped: the values that come back bit for bit, so that they can be sampled.
        filled: a function that replaces the unknown numbers in a geometry.
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
    """Return whether several views on one storage together show all of the storage.

    Views that start at the same place are assumed to show the same elements.
    """
    sizes: dict[int, int] = {}
    for part in parts:
        start = part.offset * part.dtype.itemsize
        sizes[start] = max(sizes.get(start, 0), _bytes(part))
    return sum(sizes.values()) >= _bytes(whole)


def _main_result(op: RecordedOp, recording: RecordedRegion) -> int | None:
    """Return the id of an op's first result, if an error in any tensor that the op reads makes this result wrong, else
    ``None``.

    Other results may depend on fewer tensors: the mean of a layer norm does not depend on its weight. For operators from
    outside of torch, and for results in lists, it is unknown what shows, so the function returns ``None``.
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
    """Return whether elements of this dtype are floating-point or complex numbers, not masks or indices."""
    return dtype.is_floating_point or dtype.is_complex


def _bytes(geometry: Geometry) -> int:
    """Return the size in bytes of the distinct elements of a view. An expanded dimension repeats the same elements."""
    sizes = zip(geometry.size, geometry.stride, strict=True)
    return math.prod(size for size, stride in sizes if stride) * geometry.dtype.itemsize
