"""Gives the seconds of a jaxpr's operations: timed on this machine, or by the roofline of a device of the catalogue.

An operation that XLA fuses into its readers' loops never runs alone, so its seconds are the seconds of its arithmetic in such a
loop. The other operations (matrix products, reductions, loops) are timed one by one, each shape once.

To hold a value costs time too: it is written and read again, and its memory must be allocated first. On a CPU that is
expensive.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from plimsoll.artifacts.costs import CostSource
from plimsoll.artifacts.trace import OpSpec
from plimsoll.integrations.jax.program import ArrayProgram, FixedArray, Node, aval_bytes, shape_of
from plimsoll.integrations.jax.reading import flops_of, is_fused, is_shape_only
from plimsoll.planning.costing.devices import Device, find_device
from plimsoll.planning.costing.roofline import roofline_seconds

_LEAST_TIMED, _MOST_TIMED = 1e5, 6e9
"""Bounds on an operation's arithmetic. Operations with less than the first, or more than the second, are not timed
individually.

Their time is computed from measured rates.
"""
_PRODUCTS = ("dot_general", "conv_general_dilated")
_SAMPLE = 1 << 19
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


class Clock(Protocol):
    """Protocol of objects that give the seconds of operations, and the seconds of holding a byte from forward to backward."""

    source: CostSource
    device: str
    store_seconds_per_byte: float

    def seconds(self, node: Node, program: ArrayProgram) -> float:
        """Return the seconds of an operation that may run again."""
        ...

    def rough_seconds(self, node: Node, program: ArrayProgram) -> float:
        """Return the approximate seconds of an operation that runs exactly once under all plans, so that its time does not
        affect decisions.
        """
        ...


class RooflineClock:
    """Gives seconds on a device of the catalogue, which may be absent."""

    source = CostSource.ROOFLINE

    def __init__(self, device: Device) -> None:
        self.device = device.name
        self._device = device
        self.store_seconds_per_byte = 2.0 / (device.bandwidth_bytes_per_second * device.achieved_bandwidth)

    def seconds(self, node: Node, program: ArrayProgram) -> float:
        """Return the seconds of one operation, without the launch of a kernel if XLA fuses the operation into another one."""
        if is_shape_only(node):
            return 0.0
        launch = self._device.launch_seconds if is_fused(node) else 0.0
        return roofline_seconds(spec_of(node, program), self._device) - launch

    rough_seconds = seconds


class TimedClock:
    """Gives the seconds of one JAX operation on this machine's device. Operations of a common size are timed alone. The seconds
    of fused ones, and of very small or large ones, follow from the device's measured rates.
    """

    source = CostSource.MEASURED

    def __init__(self) -> None:
        self.device = jax.devices()[0].device_kind
        self._known: dict[str, float] = {}
        self.flop_seconds, self.store_seconds_per_byte = _rates()

    def seconds(self, node: Node, program: ArrayProgram) -> float:
        """Return the seconds of one operation. Each kind and shape is measured once."""
        if is_shape_only(node):
            return 0.0
        flops = flops_of(node, program)
        if is_fused(node) or not _LEAST_TIMED <= flops <= _MOST_TIMED:
            return self.rough_seconds(node, program)
        key = f"{node.name} {[str(program.avals[v]) for v in (*node.values, *node.writes)]} {_settings(node)}"
        if key not in self._known:
            self._known[key] = self._timed(node, program)
        return self._known[key]

    def rough_seconds(self, node: Node, program: ArrayProgram) -> float:
        """Return the seconds by arithmetic alone, without a measurement of this operation."""
        if is_shape_only(node):
            return 0.0
        flops = flops_of(node, program)
        return self._scaled(flops) if node.name in _PRODUCTS else flops * self.flop_seconds

    def _timed(self, node: Node, program: ArrayProgram) -> float:
        def run(*inputs: Any) -> list[Any]:
            given = iter(inputs)
            return node.bind([read.value if isinstance(read, FixedArray) else next(given) for read in node.reads])

        avals = [program.avals[value] for value in node.values]
        if any(not hasattr(aval, "shape") or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals):
            return 0.0
        return _least_seconds(run, [jnp.ones(aval.shape, aval.dtype) for aval in avals])

    def _scaled(self, flops: int) -> float:
        side = 512
        square = jnp.ones((side, side), jnp.float32)
        if "" not in self._known:
            self._known[""] = _least_seconds(jnp.matmul, [square, square]) / (2 * side**3)
        return flops * self._known[""]


@functools.cache
def timed_clock() -> TimedClock:
    """Return the clock of this process. Measurements for one plan are used again for the next."""
    return TimedClock()


def clock_for(device: str | None) -> Clock:
    """Return a clock for a device of the catalogue, by its roofline. By default, the clock times operations on this machine."""
    return timed_clock() if device is None else RooflineClock(find_device(device))


def spec_of(node: Node, program: ArrayProgram) -> OpSpec:
    """Return the arithmetic and the memory traffic of one operation."""
    written = sum(program.bytes(value) for value in node.writes)
    moved = written if is_fused(node) else written + sum(program.bytes(value) for value in node.values)
    dtype = str(getattr(program.avals[node.writes[0]], "dtype", "float32")) if node.writes else "float32"
    return OpSpec(name=node.name, flops=flops_of(node, program), moved_bytes=moved, dtype=_DTYPES.get(dtype, dtype))


def _settings(node: Node) -> str:
    plain = {key: value for key, value in node.params.items() if isinstance(value, int | str | tuple)}
    return str(sorted(plain.items(), key=lambda item: item[0]))


def _least_seconds(function: Callable[..., Any], inputs: Sequence[Any], times: int = 7) -> float:
    compiled = jax.jit(function).lower(*inputs).compile()
    jax.block_until_ready(compiled(*inputs))
    # On a CPU, use process time: it does not count other processes on the same processor.
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    found = []
    for _ in range(times):
        started = clock()
        jax.block_until_ready(compiled(*inputs))
        found.append(clock() - started)
    return min(found)


@functools.cache
def _rates() -> tuple[float, float]:
    """Measure two rates: seconds per unit of fused arithmetic, and per byte that one loop stacks and another loop reads."""
    values = jnp.linspace(0.0, 1.0, _SAMPLE)

    def exponentials(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jnp.exp(-x)
        return x

    def stacked(x: jax.Array) -> jax.Array:
        _, kept = jax.lax.scan(lambda carry, _: (carry + 1.0, carry), x, None, length=16)
        _, total = jax.lax.scan(lambda carry, each: (carry, (carry * each).sum()), x, kept, reverse=True)
        return total

    flop = _least_seconds(exponentials, [values]) / (8 * 8 * _SAMPLE)
    return flop, _least_seconds(stacked, [values]) / (16 * 4 * _SAMPLE)


def key_of_shapes(args: Sequence[Any]) -> str:
    """Return the shapes and dtypes of arguments as text.

    Example:
        >>> key_of_shapes([jax.numpy.ones((2, 3))])
        'float32[2,3]'
    """
    avals = [shape_of(jax.api_util.shaped_abstractify(arg)) for arg in args]
    total = sum(aval_bytes(aval) for aval in avals)
    texts = [f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]" for aval in avals]
    return " ".join(texts) if len(texts) <= 6 else f"{' '.join(texts[-4:])} and {len(texts) - 4} more, {total} bytes"
