"""What a session asks of its device: peaks, seconds, a cap on memory, deterministic kernels, ceilings.

All calls to ``torch.cuda`` of the package are here. The dry run uses a CPU: it meters allocations, and fails a
step above the cap when the step has ended.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from plimsoll.tracing.meters.memory import PeakMeter

Run = Callable[[Callable[[], object]], None]
PEAKS = ("allocated", "requested", "reserved")
"""What tensors take in the allocator's blocks, what they asked for, and what the allocator holds of the device."""


class Device(Protocol):
    kind: str

    def peaks(self, step: Callable[[], object], held_bytes: int) -> dict[str, int]:
        """Highest bytes during ``step``, by name (`PEAKS`). ``held_bytes``: of tensors that are there before it."""

    def seconds(self, step: Callable[[], object]) -> float:
        """Seconds of one step: between two events on a GPU, of the processor on a CPU."""

    def deterministic_kernels(self) -> contextlib.AbstractContextManager[None]:
        """Have every kernel repeat itself bit for bit while the block runs."""

    def capped(self, cap_bytes: int, held_bytes: int) -> contextlib.AbstractContextManager[Run]:
        """Yield what runs a step, and raises ``torch.OutOfMemoryError`` where the process takes more than ``cap_bytes``."""

    def workspace_bytes(self, held_bytes: int) -> int:
        """Bytes that libraries hold on the device: all that is allocated, less ``held_bytes`` of the caller's tensors."""

    def release(self) -> None:
        """Return cached memory to the device."""

    def facts(self) -> dict[str, Any]:
        """Name, memory, driver and libraries."""

    def ceilings(self) -> dict[str, float]:
        """Measured speed of a matrix product, of copies on the device and of copies to and from pinned host memory."""


def open_device(kind: str) -> Device:
    return CudaDevice() if kind == "cuda" else CpuDevice()


class CpuDevice:
    kind = "cpu"

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def peaks(self, step: Callable[[], object], held_bytes: int) -> dict[str, int]:
        with PeakMeter("cpu") as meter:
            step()
        return {"allocated": meter.peak_bytes + held_bytes}

    def seconds(self, step: Callable[[], object]) -> float:
        start = time.process_time()
        step()
        return time.process_time() - start

    def deterministic_kernels(self) -> contextlib.AbstractContextManager[None]:
        """Kernels of a CPU do so anyway; to say it would have compiled blocks compiled again."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def capped(self, cap_bytes: int, held_bytes: int) -> Iterator[Run]:
        def run(step: Callable[[], object]) -> None:
            peak_bytes = self.peaks(step, held_bytes)["allocated"]
            if peak_bytes > cap_bytes:
                raise torch.OutOfMemoryError(f"The step took {peak_bytes} bytes under a cap of {cap_bytes}")

        yield run

    def workspace_bytes(self, held_bytes: int) -> int:
        del held_bytes
        return 0

    def release(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        from benchmarks.machine import device_name

        return {"device": device_name(torch.device("cpu"))}

    def ceilings(self) -> dict[str, float]:
        return _ceilings(
            self.seconds, "cpu", torch.float32, side=256, copied_bytes=2**22, pinned_bytes=2**20, repeats=1
        )


class CudaDevice:
    kind = "cuda"

    def start(self) -> None:
        """Fail where this process cannot use the device."""
        torch.cuda.synchronize()

    def peaks(self, step: Callable[[], object], held_bytes: int) -> dict[str, int]:
        del held_bytes  # the allocator counts everything
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        return {name: stats[f"{name}_bytes.all.peak"] for name in PEAKS}

    def seconds(self, step: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    @contextlib.contextmanager
    def deterministic_kernels(self) -> Iterator[None]:
        """Strict deterministic mode. Memory that ops never write is left alone: filling it is an op more per `empty`."""
        fills = torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = fills

    @contextlib.contextmanager
    def capped(self, cap_bytes: int, held_bytes: int) -> Iterator[Run]:
        del held_bytes

        def run(step: Callable[[], object]) -> None:
            step()
            torch.cuda.synchronize()

        self.release()  # what is cached counts against the cap
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / torch.cuda.mem_get_info()[1]))
        try:
            yield run
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def workspace_bytes(self, held_bytes: int) -> int:
        torch.cuda.synchronize()
        return max(0, torch.cuda.memory_allocated() - held_bytes)

    def release(self) -> None:
        torch.cuda.empty_cache()

    def facts(self) -> dict[str, Any]:
        asked = "driver_version,clocks.max.sm,power.limit"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except OSError as error:
            told = str(error)
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return {
            "device": torch.cuda.get_device_name(),
            "memory_bytes": total_bytes,
            "free_bytes": free_bytes,
            asked: told,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "attention": self._attention_kernels(),
        }

    def ceilings(self) -> dict[str, float]:
        speeds = _ceilings(
            self.seconds, "cuda", torch.bfloat16, side=8192, copied_bytes=2**30, pinned_bytes=2**28, repeats=10
        )
        return speeds | {
            "one_small_op_seconds_on_an_idle_stream": self._one_small_op_seconds(busy_cycles=0),
            "one_small_op_seconds_behind_a_kernel": self._one_small_op_seconds(busy_cycles=200_000),
        }

    def _attention_kernels(self) -> dict[str, str]:
        """Which kernel scaled_dot_product_attention takes for the benchmark's shape, without and with deterministic kernels."""
        query = torch.randn(2, 32, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}

        def chosen() -> str:
            number = torch._fused_sdp_choice(query, query, query, is_causal=True)
            return names.get(number, str(number))

        usual = chosen()
        with self.deterministic_kernels():
            return {"usual": usual, "deterministic": chosen()}

    def _one_small_op_seconds(self, busy_cycles: int) -> float:
        """What a pair of events says of one small op: on an idle stream that holds the time to launch it."""
        one = torch.randn(1, device="cuda")

        def once() -> float:
            torch.cuda.synchronize()
            if busy_cycles:
                torch.cuda._sleep(busy_cycles)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            one.sin()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3

        return min(once() for _ in range(30))


def _ceilings(
    seconds: Callable[[Callable[[], object]], float],
    device: str,
    dtype: torch.dtype,
    *,
    side: int,
    copied_bytes: int,
    pinned_bytes: int,
    repeats: int,
) -> dict[str, float]:
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(pinned_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    there = source[:pinned_bytes]

    def each(run: Callable[[], object]) -> float:
        run()
        return seconds(lambda: [run() for _ in range(repeats)]) / repeats

    return {
        "product_flops_per_second": 2 * side**3 / each(lambda: matrix @ matrix),
        "device_copy_bytes_per_second": 2 * copied_bytes / each(lambda: target.copy_(source)),
        "out_bytes_per_second": pinned_bytes / each(lambda: host.copy_(there, non_blocking=True)),
        "in_bytes_per_second": pinned_bytes / each(lambda: there.copy_(host, non_blocking=True)),
    }
