"""Find the seconds that the kernels of a joint graph (forward and backward of a compiled function) take. Ops that inductor
calls directly are timed alone, and fused kernels are estimated from their bytes.

An op is timed once per distinct call, on arguments with its own shapes, strides and dtypes and random contents. Rows that it
divides among experts or sequences are divided evenly. A fused kernel is bound by memory, or on a CPU by exponentials and
similar ops. Its seconds are its bytes over the device's measured bandwidth, plus a measured time per element for each such op.
Known weakness: timing and estimate are both only models of the code that inductor generates.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from plimsoll.artifacts.trace import OpSpec
from plimsoll.tracing.compiled.joint import Kernel
from plimsoll.tracing.compiled.nodes import hinted, node_bytes, op_name
from plimsoll.tracing.meters.memory import free_bytes
from plimsoll.tracing.meters.timing import clock_for, one_thread
from plimsoll.tracing.recorder.flops import count_flops
from plimsoll.units import MIB

_REPEATS = 3
_PROBE_BYTES = 4 * MIB
_PROBE_BYTES_ON_CUDA = 256 * MIB
"""The size in bytes of the probe's tensors on CUDA. It is five times the second-level cache of an H100 (50 MB).

With 4 MiB, the probe would measure that cache.
"""
_PROBE_SHARE = 1 / 8
"""The share of the free memory that one tensor of the probe (a measurement of the bandwidth) may take: one eighth. The probe's
two tensors then take at most a quarter.
"""
_HEAVY = frozenset(
    [
        "cos",
        "cosh",
        "erf",
        "erfc",
        "exp",
        "expm1",
        "gelu",
        "log",
        "log1p",
        "log2",
        "pow",
        "rsqrt",
        "sigmoid",
        "silu",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    ]
)
"""Names of elementwise ops whose arithmetic takes noticeable time in addition to the time for reading and writing memory."""
_BOUNDARIES = re.compile("offs|offsets|cu_?seq.*|cum_seq.*")
"""A pattern for names of arguments that hold the boundaries between groups of rows.

If these were zeros, the op would have nothing to do.
"""
# A drawn number is priced as one exponential. Drawing alone takes longer, but storing a mask keeps inductor from using vectors
# and takes as long (docs/project/design/plans-inside-torch-compile.md).
_INDUCTOR_RANDOM = frozenset({"inductor_random", "inductor_randint", "native_dropout", "bernoulli"})


def kernel_key(kernel: Kernel) -> str:
    """Return a key that is equal for kernels that take the same time."""
    if not kernel.is_fused:
        node = kernel.nodes[-1]
        return f"{op_name(node)}({', '.join(map(_shown, node.args))})"
    return f"fused({kernel.moved_bytes} B, {_heavy_elements(kernel)} heavy)"


def kernel_spec(kernel: Kernel) -> OpSpec:
    """Return a kernel's FLOPs and moved bytes. A roofline model estimates the kernel's seconds from them."""
    value = kernel.writes[0].meta["val"]
    flops = 0 if kernel.is_fused else _flops(kernel.nodes[-1])
    return OpSpec(name=kernel.name, flops=flops, moved_bytes=kernel.moved_bytes, dtype=str(value.dtype)[6:])


def timed(kernels: Iterable[Kernel], device: torch.device) -> dict[str, tuple[float, ...]]:
    """Return the seconds that kernels take on a device, as a mapping from kernel key to samples. Each key is timed or estimated
    once.
    """
    found: dict[str, tuple[float, ...]] = {}
    generators = [device] if device.type == "cuda" else []
    with (
        torch.no_grad(),
        one_thread(),
        torch.random.fork_rng(generators),
    ):  # contents are random; restore the user's generators
        bytes_per_second, heavy_seconds = _probe(device)
        for kernel in kernels:
            key = kernel_key(kernel)
            if key in found:
                continue
            if kernel.is_fused:
                found[key] = (kernel.moved_bytes / bytes_per_second + _heavy_elements(kernel) * heavy_seconds,)
            else:
                found[key] = _samples(kernel.nodes[-1], device)
    return found


def _samples(node: fx.Node, device: torch.device) -> tuple[float, ...]:
    """Run an op several times on arguments like its own, and return the seconds of each run. If the op refuses these arguments,
    return an empty tuple.
    """
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    clock = clock_for(device)
    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), functools.partial(_like, device=device))
        _divide_rows(node.target, args, kwargs)
        target(*args, **kwargs)
        return tuple(clock.time(functools.partial(target, *args, **kwargs))[1] for _ in range(_REPEATS))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return ()


def _like(node: fx.Node, device: torch.device) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        shape, stride = [hinted(size) for size in value.shape], [hinted(step) for step in value.stride()]
        made = torch.empty_strided(shape, stride, dtype=value.dtype, device=device)
        # Fill the whole storage: an expanded tensor, such as the gradient of a sum, cannot be written through its own shape.
        whole = made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,))
        # torch cannot draw random numbers in dtypes of one byte
        whole.normal_() if made.is_floating_point() and made.element_size() > 1 else whole.zero_()
        return made
    return hinted(value)


def _divide_rows(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Overwrite those arguments of an op that are boundaries between groups of rows (in place), so that all groups have equally
    many rows.
    """
    schema = getattr(op, "_schema", None)
    named = {**dict(zip((each.name for each in schema.arguments), args, strict=False)), **kwargs} if schema else {}
    first, second = [*(each for each in named.values() if isinstance(each, torch.Tensor)), None, None][:2]
    # With two matrices the groups divide the summed dimension, as in the gradient of experts' weights.
    is_summed = first is not None and second is not None and first.dim() == second.dim() == 2
    for name, ends in named.items():
        if first is not None and isinstance(ends, torch.Tensor) and ends.dim() == 1 and _BOUNDARIES.fullmatch(name):
            ends.copy_(torch.linspace(0, first.shape[-1 if is_summed else 0], len(ends)))


def _shown(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor):
            sizes = "x".join(str(hinted(size)) for size in value.shape)
            steps = ",".join(str(hinted(step)) for step in value.stride())
            return f"{str(value.dtype)[6:]}[{sizes}|{steps}]"
        return str(hinted(value))
    return str(argument)


def _heavy_elements(kernel: Kernel) -> int:
    return sum(
        node_bytes(node) // node.meta["val"].element_size()
        for node in kernel.nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and op_name(node) in _HEAVY | _INDUCTOR_RANDOM
    )


def _flops(node: fx.Node) -> int:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    try:
        return count_flops(node.target, args, kwargs, node.meta.get("val")) or 0
    except (TypeError, AssertionError, RuntimeError):
        return 0


def probe_bytes(device: torch.device) -> int:
    """Return the size in bytes of a tensor that is too large for a device's caches and small enough for its free memory."""
    if device.type != "cuda":
        return _PROBE_BYTES
    return max(_PROBE_BYTES, min(_PROBE_BYTES_ON_CUDA, int(_PROBE_SHARE * free_bytes(device))))


@functools.cache
def _probe(device: torch.device) -> tuple[float, float]:
    """Return the bytes per second of an elementwise op, and the additional seconds per element that an exponential takes."""
    one = torch.rand(probe_bytes(device) // torch.float32.itemsize, dtype=torch.float32, device=device)
    out = torch.empty_like(one)
    clock = clock_for(device)

    def least(run: Callable[[], Any]) -> float:
        return min(clock.time(run)[1] for _ in range(5))

    copying = least(lambda: torch.add(one, 1.0, out=out))
    heavy = least(lambda: torch.exp(one, out=out))
    return 2 * one.numel() * one.element_size() / copying, max(0.0, heavy - copying) / one.numel()
