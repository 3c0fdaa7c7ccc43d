"""Paired timing: order, threads, ratios and their intervals."""

from __future__ import annotations

import pytest
import torch

from plimsoll.tracing.compiled.seconds import probe_bytes
from plimsoll.tracing.meters import timing
from plimsoll.tracing.meters.memory import free_bytes
from plimsoll.tracing.meters.timing import (
    CudaClock,
    Timing,
    median_interval,
    one_thread,
    paired_ratio,
    time_in_turns,
)
from plimsoll.units import GIB, MIB


def test_steps_are_taken_in_turns_and_the_order_turns_around():
    calls: list[str] = []
    timings = time_in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmups=2)
    assert "".join(calls) == "abab" + "ab" + "ba" + "ab"
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]
    assert list(timings) == ["a", "b"]


def test_threads_come_back_also_after_an_exception():
    before = torch.get_num_threads()
    seen: list[int] = []
    time_in_turns({"a": lambda: seen.append(torch.get_num_threads())}, rounds=1)
    assert set(seen) == {1}
    with pytest.raises(ZeroDivisionError), one_thread():
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == before


def test_ratio_is_taken_within_rounds():
    drifting = Timing("theirs", (1.0, 2.0, 4.0, 8.0))
    ours = Timing("ours", (1.1, 2.2, 4.4, 8.8))
    ratio = paired_ratio(ours, drifting)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.1, 1.1, 1.1))


def test_interval_is_deterministic_and_leaves_the_generators_alone():
    before = torch.get_rng_state()
    samples = [1.0, 1.1, 0.9, 1.3, 1.05, 0.97]
    assert median_interval(samples) == median_interval(samples)
    assert torch.equal(torch.get_rng_state(), before)


def test_spread_is_half_the_distance_between_quartiles():
    assert Timing("a", (1.0, 2.0, 3.0, 4.0, 5.0)).spread_seconds == 1.0
    assert Timing("a", (1.0,)).spread_seconds == 0.0


class SimulatedCuda:
    """Streams and events of a GPU on simulated time: a launch takes the host ``launch_seconds``, the device works behind it."""

    cycles_per_second = 1.7e9
    launch_seconds = 8e-6

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.busy_until = 0.0
        simulated = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object = None) -> None:
                self.at = max(simulated.now, simulated.busy_until)

            def query(self) -> bool:
                return self.at <= simulated.now

            def synchronize(self) -> None:
                simulated.now = max(simulated.now, self.at)

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(cycles / self.cycles_per_second))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def launch(self, device_seconds: float, host_seconds: float | None = None) -> None:
        self.now += self.launch_seconds if host_seconds is None else host_seconds
        self.busy_until = max(self.now, self.busy_until) + device_seconds

    def synchronize(self, device: object = None) -> None:
        self.now = max(self.now, self.busy_until)


def test_an_op_is_timed_in_seconds_of_the_device_and_its_launch_apart(monkeypatch):
    cuda = SimulatedCuda(monkeypatch)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    cuda.launch(2e-6)
    end.record()
    assert begin.elapsed_time(end) / 1e3 == pytest.approx(2e-6 + cuda.launch_seconds)  # as on an idle stream
    clock = CudaClock()
    for device_seconds in (2e-6, 5e-3):
        assert clock.time(lambda: cuda.launch(device_seconds) or "out")[0] == "out"  # noqa: B023 - called at once
        assert clock.time(lambda: cuda.launch(device_seconds))[1] == pytest.approx(device_seconds)  # noqa: B023
        assert clock.host_seconds == pytest.approx(cuda.launch_seconds)


def test_a_host_that_is_slower_than_the_sleep_gets_a_longer_one(monkeypatch):
    cuda = SimulatedCuda(monkeypatch)
    clock = CudaClock()
    samples = [clock.time(lambda: cuda.launch(3e-6, host_seconds=400e-6))[1] for _ in range(3)]
    assert samples[0] > 100e-6
    assert samples[1:] == pytest.approx([3e-6, 3e-6])
    assert clock.time(lambda: cuda.launch(1e-6, host_seconds=1.0))[1] > 0.9  # nothing sleeps for a second
    assert clock.time(lambda: cuda.launch(4e-6))[1] == pytest.approx(4e-6)


def test_a_whole_step_is_timed_with_the_host_where_the_device_waits_for_it(monkeypatch):
    cuda = SimulatedCuda(monkeypatch)

    def step() -> None:
        for _ in range(10):
            cuda.launch(1e-6)

    seconds = time_in_turns({"": step}, device="cuda", rounds=3)[""].seconds
    assert seconds == pytest.approx([10 * cuda.launch_seconds + 1e-6] * 3)


def test_what_torch_has_cached_on_a_gpu_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * GIB)
    assert free_bytes(torch.device("cuda")) == 53 * GIB
    assert probe_bytes(torch.device("cuda")) == 256 * MIB
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    assert probe_bytes(torch.device("cuda")) == GIB // 8
    assert probe_bytes(torch.device("cpu")) == 4 * MIB
