"""Measure the hidden workspace of each kind of op: the bytes that the op allocates and frees inside itself.

Dispatch sees only an op's inputs and outputs. The allocator also sees what the kernel allocates in between (a convolution's
columns, a contiguous copy of a strided operand). On the CPU allocator events are read; on CUDA, the allocator's peak counter.
Each kind of op (``cost_key``) is measured at its first call.

cuBLAS allocates a workspace from torch's allocator in its first product, and keeps it. There is one workspace per thread and
stream: on an H100, 32 MiB for forward and 32 MiB for backward. These workspaces are measured separately
(`release_library_workspaces`).

Known weakness: on the CPU, events of threads that an op starts itself are not seen. Neither is memory that a library allocates
outside of torch's allocator (oneDNN's scratch pads).
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.tracing.recorder.collectives import WITHOUT_ALIASES
from plimsoll.tracing.torch_internals import free_cublas_workspaces


class WorkspaceMeter:
    """The base class of workspace meters. It measures nothing itself. It is used for fake tensors, and for runs that only time
    ops.

    ``bytes`` maps the cost key (an op with its shapes) of an op to the bytes of its workspace.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context manager that measures the ops in its block. ``bytes`` is filled when the block ends."""
        yield

    def run(self, key: str, call: Callable[[], Any]) -> Any:
        """Run an op, measure it if its key is new, and return its result."""
        return call()


class CpuMeter(WorkspaceMeter):
    """A workspace meter for the CPU. It reads the allocator's events between the begin and the end of each op."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: dict[str, tuple[int, int]] = {}
        self._on_its_way = ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with PeakMeter("cpu", held=()) as meter:  # an op's workspace is made inside the meter
            yield
        self.bytes = hidden_bytes(self._spans, meter.timeline)

    def run(self, key: str, call: Callable[[], Any]) -> Any:
        if self._on_its_way:  # a collective returned before its message arrived, so it ends where the next op begins
            self._spans[self._on_its_way] = (self._spans[self._on_its_way][0], time.time_ns())
            self._on_its_way = ""
        if key in self._spans:
            return call()
        if key.startswith(f"{WITHOUT_ALIASES}."):
            self._on_its_way = key
        begin = time.time_ns()
        out = call()
        self._spans[key] = (begin, time.time_ns())
        return out


class CudaMeter(WorkspaceMeter):
    """A workspace meter for CUDA. It reads the caching allocator's peak around each op.

    The counters are on the host, so the host does not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def run(self, key: str, call: Callable[[], Any]) -> Any:
        if key in self.bytes:
            return call()
        torch.cuda.reset_peak_memory_stats(self._device)
        out = call()
        peak = torch.cuda.max_memory_allocated(self._device)
        self.bytes[key] = max(0, peak - torch.cuda.memory_allocated(self._device))
        return out


def release_library_workspaces(device: torch.device) -> int:
    """Free the workspaces that cuBLAS holds on a GPU, and return their bytes. On other devices return 0. The next product
    allocates the workspaces again.

    A measurement calls this first, so that the step allocates its workspaces anew and they count. A trace calls this last, to
    get the size of the workspaces. The function waits for the device. Not yet run on a GPU.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    before_bytes = torch.cuda.memory_allocated(device)
    free_cublas_workspaces()
    return int(before_bytes - torch.cuda.memory_allocated(device))


def hidden_bytes(spans: Mapping[str, tuple[int, int]], timeline: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return the bytes of workspace that each op allocated and freed inside itself, as a mapping from the op's key.

    They are the highest level during the op, minus the level at its begin or end, whichever is higher: the level at the end
    includes the op's outputs. ``spans`` has the begin and end of each op in nanoseconds. ``timeline`` has pairs of a time in
    nanoseconds and the level in bytes, after every change.
    """
    times = [at_ns for at_ns, _ in timeline]
    found: dict[str, int] = {}
    for key, (begin, end) in spans.items():
        first, last = bisect.bisect_left(times, begin), bisect.bisect_right(times, end)
        before = timeline[first - 1][1] if first else 0
        levels = [before, *(bytes_ for _, bytes_ in timeline[first:last])]
        found[key] = max(levels) - max(levels[-1], before)
    return found


def meter_for(device: torch.device) -> WorkspaceMeter:
    """Return a workspace meter for this device."""
    if device.type == "cuda":
        return CudaMeter(device)
    return CpuMeter() if device.type == "cpu" else WorkspaceMeter()
