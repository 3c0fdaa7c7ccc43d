"""Clocks for single ops, and a fair comparison of several ways to run one step: the seconds of each way, and ratios between
them.

The steps are run in turns, and the order is reversed every round. So drift (clocks, caches, load by other programs) affects all
steps equally. A ratio is computed within each round, then the median over rounds. The interval of the ratio is a percentile
bootstrap of that median.

On the CPU the clock is the process's CPU time, with torch on one thread: other programs on the machine do not count. On CUDA a
whole step is timed between two events on the current stream; host time is included if the device waits for the host. A single
op is timed without the host (`CudaClock`): on an idle stream, the launch adds 5 to 20 µs to every op. Not yet run on a GPU.

Source: percentile bootstrap, Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), section 13.3. Known weakness:
with fewer than about eight rounds the interval is too narrow.
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
"""The seconds that a CUDA stream sleeps before an op that is timed, while the host launches the op. They are ten times the
host's usual time to launch an op.
"""
_MOST_LEAD_SECONDS = 20e-3
"""The longest time in seconds that a CUDA stream sleeps while the host launches a timed op.

If the host takes longer for an op, the op itself waits for the device, because it reads a value.
"""
_RATE_CYCLES = 1 << 20
"""The number of cycles that a CUDA stream sleeps to measure its clock rate.

It takes about half a millisecond, and a launch is 2% of that.
"""


@dataclass(frozen=True, slots=True)
class Timing:
    """Data: the measured seconds of one of the compared steps, with one entry per round."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread_seconds(self) -> float:
        """Half the interquartile range of the seconds, or 0 with fewer than two rounds."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2


@dataclass(frozen=True, slots=True)
class Interval:
    """Data: a median and its 95% confidence interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@contextlib.contextmanager
def one_thread(threads: int = 1) -> Iterator[None]:
    """Return a context manager that lets torch compute on ``threads`` threads inside its block. At the end the old number is
    restored.
    """
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
    """Run each step once per round, and return the timing of each step by its name. Entries of the same round belong together.

    On the CPU, CPU time on ``threads`` threads is measured (with another number, compiled code is compiled anew). On a CUDA
    device, time between events is measured. A step's result is dropped before the next step starts.

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
                gc.collect()  # otherwise this step could spend time on collecting the previous step's garbage
                seconds[name].append(_step_seconds(steps[name], kind))
    return {name: Timing(name, tuple(each)) for name, each in seconds.items()}


def paired_ratio(ours: Timing, theirs: Timing) -> Interval:
    """Return how many times as long ``ours`` takes as ``theirs``: the median over rounds of the ratio of their seconds, with
    its 95% interval.
    """
    return median_interval([a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)])


def median_interval(samples: list[float]) -> Interval:
    """Return the median of ``samples``, with a 95% interval from a percentile bootstrap.

    The result is deterministic, because the bootstrap has its own random generator.
    """
    values = np.asarray(samples, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), [0.025, 0.975])
    return Interval(float(np.median(values)), float(low), float(high))


def wait_for_device(device: torch.device) -> None:
    """Wait until a GPU has finished all its work. On other devices do nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """Sets marks in time, and returns the seconds between them. On a GPU the marks are events on the stream, otherwise readings
    of the host's clock ``now``.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Set a mark at this moment. On a GPU, the mark is the moment when the stream gets to this point."""
        if self._device.type != "cuda":
            self._marks.append(self._now())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> list[float]:
        """Return a list with the seconds from the first mark to each of the other marks. This waits for the device."""
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
    """A clock for single ops. It measures the CPU seconds of this thread, so other load on the machine does not count."""

    def time(self, run: Callable[[], Any]) -> tuple[Any, float]:
        start = time.thread_time()
        out = run()
        return out, time.thread_time() - start


class CudaClock(OpClock):
    """A clock for single ops on CUDA. It measures only the seconds of the device, without the host's time to launch the op. It
    waits for the device each time, so it is slow.

    The stream sleeps while the host launches the op. So both events and the op's kernels are in the queue, and the device runs
    them back to back. If the host took longer than the sleep, the sample contains some host time, and the next sleep is twice
    as long as the host took. ``torch.cuda._sleep`` is private: seen in torch 2.9 to 2.15.
    """

    def __init__(self) -> None:
        self.host_seconds = 0.0
        """The seconds that the host took to launch the last timed op."""
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
        if begin.query():  # the sleep ended before the host had launched everything
            self._lead_seconds = min(max(self._lead_seconds, 2 * self.host_seconds), _MOST_LEAD_SECONDS)
        end.synchronize()
        return out, begin.elapsed_time(end) / 1e3

    def _sleep(self, cycles: int) -> float:
        """Return the seconds that the stream sleeps for this number of cycles."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return float(max(begin.elapsed_time(end), 1e-3)) / 1e3


def clock_for(device: torch.device) -> OpClock:
    """Return a clock for ops on this device."""
    return CudaClock() if device.type == "cuda" else OpClock()
