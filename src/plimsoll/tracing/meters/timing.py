"""Clocks for single ops, and a fair comparison of several ways to take one step: seconds of each and ratios between them.

The steps are taken in turns, in an order that turns around every round, so that whatever drifts (clocks, caches, other
people's load) hits all of them. A ratio is taken within each round, then the median over rounds; its interval is a
percentile bootstrap of that median.

On the CPU the clock is the process's CPU time, with torch on one thread: other programs on the machine do not count. On
CUDA a whole step is timed between two events on the current stream, host included where the device waits for it. A single op is
timed without the host (`CudaClock`): an idle stream adds 5 to 20 µs of launch to every op. Not yet run on a GPU.

Source: percentile bootstrap, Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), section 13.3. Known
weakness: with fewer than about eight rounds the interval is too narrow.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_RESAMPLES = 2000
_LEAD_SECONDS = 100e-6
"""How long the stream sleeps before an op that is timed: ten times what the host takes to launch one."""
_MOST_LEAD_SECONDS = 20e-3
"""An op that keeps the host longer waits for the device itself: it reads a value."""
_RATE_CYCLES = 1 << 20
"""About half a millisecond: a launch is 2% of it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one step, one entry per round."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread_seconds(self) -> float:
        """Half the distance between the quartiles."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and where it lies with 95% confidence."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@contextlib.contextmanager
def one_thread(threads: int = 1) -> Iterator[None]:
    """Let torch compute on one thread (or so many); the number from before comes back on exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def time_in_turns(
    steps: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str = "cpu",
    rounds: int = 10,
    warmups: int = 1,
    threads: int = 1,
) -> dict[str, Timing]:
    """Run every step once per round and time it; entries of the same round belong together.

    On the CPU that is CPU time on one thread (or ``threads``: for another number compiled code is compiled anew), on a CUDA
    device time between events. What a step returns is dropped before the next one starts.

    Example:
        >>> timings = time_in_turns({"ours": lambda: sum(range(2000)), "theirs": lambda: sum(range(1000))}, rounds=3)
        >>> len(timings["ours"].seconds)
        3
    """
    kind = torch.device(device)
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with one_thread(threads) if kind.type == "cpu" else contextlib.nullcontext():
        for name in names * warmups:
            steps[name]()
        for turn in range(rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                gc.collect()  # garbage of the step before must not be collected on this one's time
                seconds[name].append(_step_seconds(steps[name], kind))
    return {name: Timing(name, tuple(each)) for name, each in seconds.items()}


def paired_ratio(ours: Timing, theirs: Timing) -> Interval:
    """The median over rounds of our seconds by theirs, with its 95% interval."""
    return median_interval([a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)])


def median_interval(samples: list[float]) -> Interval:
    """The median of ``samples`` with a 95% percentile bootstrap. Deterministic: the resampling has its own generator."""
    values = np.asarray(samples, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), [0.025, 0.975])
    return Interval(float(np.median(values)), float(low), float(high))


def wait_for_device(device: torch.device) -> None:
    """Until nothing is under way on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """Marks in time: readings of a clock of the host, on a GPU events on its stream, read once the stream has passed them."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now
        self._marks: list[Any] = []

    def mark(self) -> None:
        """One more, now or when the stream comes here."""
        if self._device.type != "cuda":
            self._marks.append(self._now())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> list[float]:
        """From the first mark to each of the others; waits for the device."""
        first, *others = self._marks
        if self._device.type != "cuda":
            return [each - first for each in others]
        self._marks[-1].synchronize()
        return [first.elapsed_time(each) / 1e3 for each in others]


def _step_seconds(step: Callable[[], object], device: torch.device) -> float:
    wait_for_device(device)
    if device.type == "cuda":
        marks = Marks(device)
        marks.mark()
        step()
        marks.mark()
        return marks.seconds()[0]
    start = time.process_time()
    step()
    return time.process_time() - start


class OpClock:
    """Times an op in CPU seconds of this thread: what it takes on one thread, whatever else the machine does."""

    def time(self, run: Callable[[], Any]) -> tuple[Any, float]:
        start = time.thread_time()
        out = run()
        return out, time.thread_time() - start


class CudaClock(OpClock):
    """Times an op in seconds of the device alone, waiting for the device each time: slow, but each op's own seconds.

    The stream sleeps while the host launches the op. So both events and the op's kernels wait in the queue, and the device runs
    them back to back. Where the host took longer than the sleep, the sample holds some of the host's time, and the next sleep
    is twice as long as the host took. ``torch.cuda._sleep`` is private: seen in torch 2.9 to 2.15.
    """

    def __init__(self) -> None:
        self.host_seconds = 0.0
        """What the host took to launch the op that was timed last."""
        self._lead_seconds = _LEAD_SECONDS
        self._cycles_per_second = _RATE_CYCLES / self._sleep(_RATE_CYCLES)

    def time(self, run: Callable[[], Any]) -> tuple[Any, float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(self._lead_seconds * self._cycles_per_second))
        begin.record()
        start = time.perf_counter()
        out = run()
        end.record()
        self.host_seconds = time.perf_counter() - start
        if begin.query():  # the sleep was over before the host was through
            self._lead_seconds = min(max(self._lead_seconds, 2 * self.host_seconds), _MOST_LEAD_SECONDS)
        end.synchronize()
        return out, begin.elapsed_time(end) / 1e3

    def _sleep(self, cycles: int) -> float:
        """Seconds that the stream sleeps for a number of cycles."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return float(max(begin.elapsed_time(end), 1e-3)) / 1e3


def clock_for(device: torch.device) -> OpClock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else OpClock()
