"""An op call in, its result and its seconds out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """CPU seconds of this thread: what an op takes when torch computes on one thread, whatever else the machine does."""

    def time(self, run: Callable[[], Any]) -> tuple[Any, float]:
        start = time.thread_time()
        out = run()
        return out, time.thread_time() - start


class CudaClock(Clock):
    """Device seconds between two events. It waits for the device around every op: slow, but each op's own seconds."""

    def time(self, run: Callable[[], Any]) -> tuple[Any, float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        out = run()
        end.record()
        end.synchronize()
        return out, begin.elapsed_time(end) / 1e3


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else Clock()
