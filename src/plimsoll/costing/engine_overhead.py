"""What the engine itself costs on this machine: seconds per managed slot and per replayed op, measured in under 0.2 s.

The stand-ins do what the engine does per slot and per op, and nothing else: a pack hook that keeps a reference and returns
a handle, an unpack hook that compares shape, strides and dtype, a replayed op that is called from Python and has its result
put into a table. Both are host work: on an accelerator they cost time only where the host is the bottleneck.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SLOTS = 100
_ROUNDS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOverhead:
    """Seconds that the engine adds per managed slot (pack, guard, unpack) and per op that it runs again, beyond the op."""

    slot_seconds: float
    replay_seconds: float


def measure_engine_overhead() -> EngineOverhead:
    """Time the engine's own work on this machine. RNG, grad mode and the number of threads are left as they are."""
    return EngineOverhead(slot_seconds=measure_slot_seconds(), replay_seconds=measure_replay_seconds())


def measure_slot_seconds() -> float:
    """Seconds that one saved tensor takes to go through a pair of Python hooks, on top of autograd's own work."""
    with torch.enable_grad():
        start = torch.ones(1, requires_grad=True)

        def run() -> None:
            value = start
            for _ in range(_SLOTS):
                value = value.sin()  # saves one tensor, its input
            value.backward(inputs=[start])
            start.grad = None

        def run_hooked() -> None:
            with torch.autograd.graph.saved_tensors_hooks(_Handle, _unpack):
                run()

        return _extra_seconds(run_hooked, run) / _SLOTS


def measure_replay_seconds() -> float:
    """Seconds around one replayed op, beyond what timing that op from inside a dispatch mode already contains."""
    one = torch.ones(1)
    func = torch.ops.aten.add.Tensor

    def replay(table: list[Any]) -> None:
        for i in range(1, _SLOTS + 1):
            table[i] = func(table[i - 1], table[0])

    def run() -> None:
        with torch.no_grad():
            replay([one] + [None] * _SLOTS)

    run()
    whole = min(_seconds(run) for _ in range(_ROUNDS)) / _SLOTS
    with _TimedOps() as timed:
        for _ in range(_SLOTS):
            func(one, one)
    inside: float = statistics.median(timed.seconds)
    return max(0.0, whole - inside)


class _Handle:
    """What the pack hook returns: a reference and what the guard compares."""

    __slots__ = ("dtype", "shape", "strides", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.dtype = tensor.dtype


def _unpack(handle: _Handle) -> torch.Tensor:
    tensor = handle.tensor
    assert tensor.shape == handle.shape
    assert tensor.stride() == handle.strides
    assert tensor.dtype == handle.dtype
    return tensor


class _TimedOps(TorchDispatchMode):
    """Times every op from where the tracer times it."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.seconds.append(time.perf_counter() - start)
        return out


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _extra_seconds(run: Callable[[], None], baseline: Callable[[], None]) -> float:
    """Least seconds of ``run`` less least seconds of ``baseline``, taken in turns; never negative."""
    run()
    baseline()
    pairs = [(_seconds(run), _seconds(baseline)) for _ in range(_ROUNDS)]
    least, baseline_least = min(first for first, _ in pairs), min(second for _, second in pairs)
    return max(0.0, least - baseline_least)
