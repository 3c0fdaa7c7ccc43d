"""Reads the costs of layers from a traced ``tf.function``: the bytes of tensors that they make and their gradients read, and
seconds.

Operations of a graph are in the order of their creation. So the operations of a layer's call, or of the gradient, are ranges of
that list. The bytes of the whole step are counted while it runs.

TensorFlow's allocator returns a whole free chunk if the chunk is less than twice as large as requested, and counts the whole
chunk. So the bytes of one step depend on what else the process holds and held. Another trace of the step may also run in
another order. So a plan's step is run in two traces while other tensors are alive, and the promised peak is the maximum plus a
margin for the spread.

Source: ``BFCAllocator::FindChunkPtr`` (``xla/tsl/framework/bfc_allocator.cc``).
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from plimsoll.artifacts.costs import CostSource
from plimsoll.errors import InvalidOption
from plimsoll.integrations.layers import LayeredStep, RerunLayer, calling, kinds_of
from plimsoll.planning.costing.devices import find_device

_SAME_BYTES = frozenset({"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient"})
_HARMLESS = frozenset({"ReadVariableOp", "VarHandleOp", "ResourceGather", "Placeholder", "PartitionedCall"})
"""Operations that TensorFlow marks as stateful, although they neither write nor draw random numbers."""
_NOT_MADE = frozenset({"ReadVariableOp", "Const"})
_FROM_OUTSIDE = frozenset({"Const", "Placeholder"})
"""Kinds of operations whose results do not get gradients: constants, and tensors that a graph captures."""
_EXPONENTIALS = frozenset({"Exp", "Tanh", "Sigmoid", "Erf", "Softmax", "Log", "Pow", "Rsqrt", "Sqrt"})
_PRODUCTS = {"MatMul": "transpose_a", "BatchMatMulV2": "adj_x", "BatchMatMulV3": "adj_x"}
"""Maps each kind of matrix product to its attribute that says whether the first operand is transposed."""
_RATE_SIDE = 512
_MOST_RUNS = 16
"""How often one step runs at most until its peak is known."""
_STATES, _DEVIATIONS = 4, 2
"""Two numbers of the function `bytes_in_any_state`: how often each trace of a step runs with other tensors alive, and how many
standard deviations of all runs are added to the maximum.
"""
_COUNTED_FROM = 256 * 1024
"""TensorFlow counts a tensor on a CPU if it has at least this many bytes. Smaller tensors are not counted."""
_BESIDE, _SHARE_BESIDE = 12, 8
"""Two numbers of the function `bytes_in_any_state`: how many other tensors are made before a run, and the divisor that gives
the largest one's bytes.

The largest has up to 1/8 of the bytes of the step. A third of the tensors stay during the run.
"""


@dataclass(frozen=True)
class _Span:
    """Data: one call of a layer.

    It has the graph's operations ``first`` to ``stop``, and the ids of its input and output tensors.
    """

    first: int
    stop: int
    given: frozenset[int]
    results: frozenset[int]


@dataclass(frozen=True)
class Rates:
    """Data: the speed of a device as two rates: seconds per unit of arithmetic, and seconds per byte that an operation
    makes.
    """

    flop_seconds: float
    byte_seconds: float
    device: str
    source: CostSource


def rates_of(device: str | None) -> Rates:
    """Return the rates of a device of the catalogue. By default, the rates are measured on this machine."""
    if device is None:
        flop, byte = _measured_rates()
        return Rates(flop, byte, "GPU" if tf.config.list_physical_devices("GPU") else "CPU", CostSource.MEASURED)
    found = find_device(device)
    flop = 1.0 / (found.flops_per_second("f32") * found.achieved_arithmetic)
    byte = 2.0 / (found.bandwidth_bytes_per_second * found.achieved_bandwidth)
    return Rates(flop, byte, found.name, CostSource.ROOFLINE)


def read_layers(
    step: Callable[..., Any], args: Sequence[Any], layers: Sequence[Any], rates: Rates
) -> tuple[LayeredStep, Callable[[], object]]:
    """Read the costs of each layer from the graph of the step and its gradient. Layers are in the order of their calls.

    Returns:
        The layers, and a function that runs the traced step and its gradient.

    Raises:
        InvalidOption: the step does not call a layer, or calls one inside of another.
    """
    spans: dict[str, list[_Span]] = {}
    marks: list[int] = []

    def size() -> int:
        return len(tf.compat.v1.get_default_graph().get_operations())

    def observe(name: str, call: Callable[..., Any], inputs: Any, options: Any) -> Any:
        first = size()
        result = call(*inputs, **options)
        given = frozenset(map(id, tf.nest.flatten((inputs, options))))
        ids = frozenset(id(_root(each)) for each in tf.nest.flatten(result) if tf.is_tensor(each))
        spans.setdefault(name, []).append(_Span(first, size(), given, ids))
        return result

    def gradient(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            with calling(layers, observe):
                loss = step(*given)
            marks.append(size())
        return loss, tape.gradient(loss, tape.watched_variables())

    kinds = kinds_of(layers)
    given = [tf.convert_to_tensor(each) for each in args]
    traced = tf.function(gradient).get_concrete_function(*given)
    _check_calls([name for name in kinds if name not in spans], spans)
    operations = traced.graph.get_operations()
    saved = _saved_bytes(operations, marks[-1], spans)

    def seconds_of(some: Iterable[Any]) -> float:
        return sum(_flops(op) * rates.flop_seconds + _made_bytes(op) * rates.byte_seconds for op in some)

    found = []
    for name in sorted(spans, key=lambda each: spans[each][0].first):
        own = [op for span in spans[name] for op in operations[span.first : span.stop]]
        seconds = seconds_of(own)
        found.append(
            RerunLayer(
                name=name,
                kind=kinds[name],
                saved_bytes=saved.get(name, 0),
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
                obstacle=_obstacle(own, frozenset().union(*(span.given for span in spans[name]))),
            )
        )
    inside = sum(each.forward_seconds for each in found)
    forward, backward = seconds_of(operations[: marks[-1]]), seconds_of(operations[marks[-1] :])
    layered = LayeredStep(
        layers=tuple(found),
        rest_seconds=(max(forward - inside, 0.0), max(backward - 2 * inside, 0.0)),
        flops=sum(map(_flops, operations)),
        device=rates.device,
        source=rates.source,
        signature=" ".join(f"{each.dtype.name}{each.shape.as_list()}" for each in given),
    )
    return layered, functools.partial(traced, *given)


def _check_calls(missing: Sequence[str], spans: Mapping[str, Sequence[_Span]]) -> None:
    flat = sorted((span.first, span.stop) for found in spans.values() for span in found)
    is_nested = any(before[1] > after[0] for before, after in itertools.pairwise(flat))
    if missing or is_nested:
        raise InvalidOption(
            f"These layers cannot be planned: {', '.join(missing) or 'one layer is inside another'}.",
            why="the step does not call them"
            if missing
            else "recomputing a layer also recomputes every layer inside it",
            next="pass layers= that the step calls and that are not inside one another, such as the blocks of a network",
        )


def _saved_bytes(operations: Sequence[Any], mark: int, spans: Mapping[str, Sequence[_Span]]) -> dict[str, int]:
    """Return the bytes that each layer makes inside and the gradient reads, by the layer's name. Each tensor counts once.

    A layer's results do not count, because they are the next layer's input.
    """
    owner = {
        op: (name, span) for name, found in spans.items() for span in found for op in operations[span.first : span.stop]
    }
    read = {id(root): root for op in operations[mark:] for tensor in op.inputs for root in [_root(tensor)]}
    found: dict[str, int] = {}
    for tensor in read.values():
        name, span = owner.get(tensor.op, ("", None))
        if span is not None and id(tensor) not in span.results and tensor.op.type not in _NOT_MADE:
            found[name] = found.get(name, 0) + _bytes(tensor)
    return found


def _root(tensor: Any) -> Any:
    """Return the tensor that owns the memory of this tensor. A reshape, for example, has the memory of its input."""
    while tensor.op.type in _SAME_BYTES:
        tensor = tensor.op.inputs[0]
    return tensor


def _bytes(tensor: Any) -> int:
    return (tensor.shape.num_elements() or 0) * (tensor.dtype.size or 0)


def _made_bytes(op: Any) -> int:
    return 0 if op.type in _SAME_BYTES | _HARMLESS else sum(_bytes(each) for each in op.outputs)


def _flops(op: Any) -> int:
    """Return the arithmetic of one operation. An exponential or a similar function counts as eight."""
    made: int = sum(each.shape.num_elements() or 0 for each in op.outputs)
    if op.type in _PRODUCTS:
        axis = -2 if op.get_attr(_PRODUCTS[op.type]) else -1
        return 2 * made * int(op.inputs[0].shape[axis] or 1)
    if op.type == "Einsum":
        labels = op.get_attr("equation").decode().partition("->")[0].split(",")
        sizes: dict[str, int] = {}
        for text, each in zip(labels, op.inputs, strict=True):
            sizes |= {label: size or 1 for label, size in zip(text, each.shape.as_list(), strict=True)}
        return 2 * math.prod(sizes.values())
    if op.type in ("Conv2D", "DepthwiseConv2dNative"):
        height, width, channels, _ = op.inputs[1].shape.as_list()
        return int(2 * made * height * width * (channels if op.type == "Conv2D" else 1))
    return made * (8 if op.type in _EXPONENTIALS else 1)


def _obstacle(operations: Sequence[Any], given: Collection[int]) -> str:
    """Return why a layer with these operations and inputs cannot run again. The text is empty if the layer can."""
    own = set(operations)
    for op in operations:
        for tensor in op.inputs:
            is_known = tensor.op in own or id(tensor) in given or tensor.op.type in _FROM_OUTSIDE
            if tensor.dtype.is_floating and not is_known:
                return f"it reads {tensor.op.name}, which is not an argument: tf.recompute_grad would lose its gradient"
        if op.op_def is not None and op.op_def.is_stateful and op.type not in _HARMLESS:
            return f"{op.type} writes state or draws random numbers, and recomputing would repeat that"
    return ""


@functools.cache
def _measured_rates() -> tuple[float, float]:
    """Measure two rates on this device: seconds per unit of arithmetic in a matrix product, and per byte that an operation
    makes.
    """
    square = tf.ones((_RATE_SIDE, _RATE_SIDE))
    wide = tf.ones((4 * _RATE_SIDE, _RATE_SIDE))

    def least(run: Callable[[], Any]) -> float:
        found = []
        for _ in range(7):
            started = time.perf_counter()
            float(run()[0, 0])
            found.append(time.perf_counter() - started)
        return min(found)

    flop = least(lambda: tf.matmul(square, square)) / (2 * _RATE_SIDE**3)
    return flop, least(lambda: wide + wide) / (4 * 4 * _RATE_SIDE**2)


# Bytes of runs ----------------------------------------------------------------------------------------------------


def most_bytes(run: Callable[[], object]) -> int:
    """Return the maximum of the peaks of a few runs, without the bytes that were allocated before each run."""
    # The first run also makes what stays, such as constants and the kernels' own caches.
    run()
    peaks: list[int] = []
    while len(peaks) < _MOST_RUNS and (len(peaks) < 3 or (len(set(peaks)) > 1 and max(peaks) in peaks[-4:])):
        peaks.append(peak_bytes(run))
    return max(peaks)


def bytes_in_any_state(*runs: Callable[[], object]) -> int:
    """Return a bound for the peak of a step, whatever else the process holds: the maximum of its runs plus twice their standard
    deviation.

    Before each run, tensors of random sizes are made and most of them are freed, so that free chunks of other sizes exist.

    Args:
        runs: traces of one step, from ``gradient_run``; each runs six times.

    Raises:
        InvalidOption: TensorFlow does not count bytes on this device.
    """
    peaks: list[int] = []
    draw = random.Random(0)
    for run in runs:
        run()
        peaks.append(peak_bytes(run))
        largest = max(peaks[0] // _SHARE_BESIDE, 8 * _COUNTED_FROM)
        for at in range(_STATES):
            beside = [tf.zeros([draw.randint(_COUNTED_FROM, largest)], tf.int8) for _ in range(_BESIDE)]
            del beside[at % 3 :: 3], beside[at % 2 :: 2]
            peaks.append(peak_bytes(run))
    return max(peaks) + int(_DEVIATIONS * statistics.stdev(peaks))


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of one run, without the bytes that were allocated before."""
    device = f"{device_kind()}:0"
    try:
        before = tf.config.experimental.get_memory_info(device)["current"]
        tf.config.experimental.reset_memory_stats(device)
        run()
        peak = int(tf.config.experimental.get_memory_info(device)["peak"] - before)
    except ValueError as error:
        raise InvalidOption(
            f"TensorFlow does not report the memory that {device} allocates.",
            why=f"{error}; on a CPU only oneDNN's allocator counts",
            next="leave TF_ENABLE_ONEDNN_OPTS at its default, or plan on a GPU",
        ) from error
    if not peak:
        raise InvalidOption(
            "TensorFlow counted 0 bytes for this step.",
            why="on a CPU its allocator counts only tensors of at least 256 KiB",
            next="plan with a batch of the size that you train with",
        )
    return peak


def device_kind() -> str:
    """Return TensorFlow's name for the kind of device that steps run on."""
    return "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
