"""What ops and the engine take on this device: read from samples and laps made by hand, and measured in truth."""

from __future__ import annotations

import threading

import pytest
import torch

from planning.builders import StepBuilder, bare_trace
from plimsoll.artifacts.costs import CostSource
from plimsoll.artifacts.trace import OpSpec, Phase, Trace, TraceOp
from plimsoll.planning.choice import Choice
from plimsoll.planning.simulate import engine_seconds, run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.session.device_costs import (
    ChainLaps,
    EngineOverhead,
    device_memory_bytes,
    fit_roofline,
    measure_engine,
    measured_costs,
    op_cost,
    overhead_of,
)

MIB = 2**20
REBUILT = (1, 2, 5, 6)


def trace_of(moved_bytes: int, device: str = "cpu") -> Trace:
    """A step of one op."""
    op = TraceOp(name="add", module="", phase=Phase.FORWARD, cost_key="add")
    spec = OpSpec(name="add", flops=1, moved_bytes=moved_bytes, dtype="f32")
    return bare_trace({"add": spec}, device=device, ops=(op,), timings={"add": (1.0,)})


def laps(links: int, *, is_managed: bool = True, pause: float = 0.0) -> ChainLaps:
    """Ops take 2 and 4; the engine 7 on entry, 30 and 1 per link on exit, 3 per pack, 5 per unpack, 40 per replay."""
    engine = 1.0 if is_managed else 0.0
    return ChainLaps(
        entry_seconds=1.0 + 7.0 * engine,
        forward_seconds=(pause + 2.0 + 3.0 * engine, *[2.0 + 3.0 * engine] * (links - 1)),
        exit_seconds=1.0 + (30.0 + links) * engine,
        backward_seconds=tuple(
            4.0 + (5.0 + 40.0 * (link in REBUILT)) * engine + pause * (link == 1) for link in range(links)
        ),
    )


def overhead(*, pause: float = 0.0) -> EngineOverhead:
    unmanaged = [laps(12, is_managed=False)] * 5
    return overhead_of(unmanaged, [laps(4)] * 5, [laps(12, pause=pause), *[laps(12)] * 4], REBUILT)


def test_laps_tell_regions_slots_and_replays_apart():
    found = overhead()
    assert found.region_seconds == pytest.approx(7.0 + 30.0)
    assert found.slot_seconds == pytest.approx(3.0 + 5.0 + 1.0)
    assert found.replay_seconds == pytest.approx(40.0)


def test_an_op_of_the_host_is_a_third_of_what_a_link_takes_both_ways():
    assert overhead().host_op_seconds == pytest.approx((2.0 + 4.0) / 3)


def test_a_pause_of_the_machine_changes_nothing():
    assert overhead(pause=1e6) == overhead()


def test_an_engine_that_seems_faster_than_nothing_takes_nothing():
    bare = [laps(12, is_managed=False)] * 3
    slow = [laps(12)] * 3
    found = overhead_of(slow, [laps(4, is_managed=False)] * 3, bare, REBUILT)
    assert (found.region_seconds, found.slot_seconds, found.replay_seconds) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("moved_bytes", [12, MIB])
def test_the_engine_at_work_takes_some_time_for_replays(moved_bytes: int):
    found = measure_engine(trace_of(moved_bytes))
    assert found.replay_seconds > 0
    assert found.host_op_seconds > 0
    assert min(found.region_seconds, found.slot_seconds) >= 0


def test_measuring_leaves_random_state_modes_and_threads_as_they_were():
    state, threads, alive = torch.get_rng_state(), torch.get_num_threads(), threading.active_count()
    with torch.no_grad():
        measure_engine(trace_of(12))
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert threading.active_count() == alive


def test_defaults_of_the_user_do_not_matter():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert measure_engine(trace_of(12)).replay_seconds > 0
    finally:
        torch.set_default_dtype(before)


def test_with_hooks_of_somebody_else_around_nothing_is_measured():
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert measure_engine(trace_of(12)) == EngineOverhead()


def test_a_step_on_a_gpu_touches_no_memory_of_the_host(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    devices: list[str] = []

    def measure(touched: int, device: torch.device) -> EngineOverhead:
        asked.append(touched)
        devices.append(str(device))
        return EngineOverhead()

    monkeypatch.setattr("plimsoll.session.device_costs._measure", measure)
    for moved_bytes, device in ((2 * MIB, "cpu"), (2**40, "cpu"), (2 * MIB, "cuda:0")):
        measure_engine(trace_of(moved_bytes, device))
    assert asked == [2 * MIB, 8 * MIB, 0]
    assert devices == ["cpu", "cpu", "cuda:0"]  # launches are timed where the step runs


def two_regions() -> StepIndex:
    """Two regions, each with ops that save their input, the first of them a parameter."""
    step = StepBuilder(slot_seconds=0.01)
    for name in ("first", "second"):
        x = step.parameter(f"{name}.w", size=4)
        with step.region(name) as region:
            for op in "abc":
                x = step.op(op, x, size=8, saves=(x,))
            region.outputs = (x,)
    step.op("loss", x, size=1)
    return StepIndex(*step.finish())


def test_only_touched_regions_cost_engine_time_and_all_that_is_saved_in_them_does():
    index = two_regions()
    first, second = index.views
    keep = Choice(second.everything)
    whole = run_choices(index, (Choice(first.everything), keep))
    touched = run_choices(index, (Choice(frozenset()), keep))
    ops = sum(index.op_seconds(index.views[r].graph.ops[o].cost_key) for r, o in touched.replayed)
    assert whole.seconds == index.base_seconds
    assert touched.seconds - ops == pytest.approx(index.base_seconds + engine_seconds(index, first))
    assert engine_seconds(index, first) == pytest.approx(0.01 * len(first.graph.slots))


def _spec(name="add", flops=0, moved_bytes=0, dtype="f32"):
    return OpSpec(name=name, flops=flops, moved_bytes=moved_bytes, dtype=dtype)


def test_cost_of_an_op_is_the_median_of_its_faster_half_and_half_the_quartile_distance_of_all():
    cost = op_cost([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (cost.seconds, cost.spread_seconds) == (2.0, 1.0)
    assert op_cost([2.0]).spread_seconds == 0.0


def test_a_first_run_that_waits_for_fresh_memory_does_not_change_what_an_op_costs():
    warm = [1.00, 1.02, 0.99, 1.01]
    fresh = [4.6, 5.3, 26.0, 4.9]
    assert op_cost([*fresh, *warm]).seconds == pytest.approx(1.0, rel=0.02)
    assert op_cost(warm * 2).seconds == pytest.approx(1.0, rel=0.02)


def _machine(spec):
    """A made-up device: 10 GB/s, 100 GFLOP/s, 5 µs a launch."""
    return 5e-6 + max(spec.moved_bytes / 10e9, spec.flops / 100e9)


def test_fit_finds_the_device_that_made_the_samples():
    specs = {f"add{i}": _spec("add", 2**i, 12 * 2**i) for i in range(4, 24)}
    specs |= {f"mm{n}": _spec("mm", 2 * n**3, 12 * n**2) for n in (256, 512, 1024)}
    fit = fit_roofline(specs, {key: _machine(spec) for key, spec in specs.items()})
    assert fit.bytes_per_second == pytest.approx(10e9, rel=0.02)
    assert fit.flops_per_second == pytest.approx(100e9, rel=0.02)
    assert fit.launch_seconds == pytest.approx(5e-6, rel=0.05)
    assert fit.relative_error < 0.02


def test_fit_survives_a_trace_of_tiny_ops():
    specs = {"add": _spec("add", 4, 48), "mm": _spec("mm", 64, 96)}
    fit = fit_roofline(specs, {key: _machine(spec) for key, spec in specs.items()})
    assert 0 < fit.seconds(_spec("add", 4, 48)) < 1e-4


def test_keys_without_samples_get_the_fitted_roofline_and_a_spread():
    specs = {f"add{i}": _spec("add", 2**i, 12 * 2**i) for i in range(4, 24)}
    timings = {key: (_machine(spec), _machine(spec), _machine(spec) * 1.2) for key, spec in specs.items()}
    optimizer = _spec("_foreach_add_", 2**20, 12 * 2**20)
    costs = measured_costs(bare_trace(specs | {"optimizer": optimizer}, timings=timings))
    assert costs.source is CostSource.MEASURED
    assert costs.ops["add10"].seconds == _machine(specs["add10"])
    assert costs.ops["optimizer"].seconds == pytest.approx(_machine(optimizer), rel=0.02)
    assert costs.memory_bytes == device_memory_bytes("cpu")


ENGINE = EngineOverhead(region_seconds=8e-5, slot_seconds=7e-6, replay_seconds=3e-5, host_op_seconds=5e-6)


def _step_on(device, seconds):
    """One op, three times, that takes so long on the device."""
    op = TraceOp(name="add", cost_key="add", module="", phase=Phase.FORWARD)
    return bare_trace({"add": _spec("add", 1, 12)}, device=device, ops=(op,) * 3, timings={"add": (seconds,)})


def test_measured_costs_carry_what_the_engine_takes_and_it_is_free_where_that_was_not_measured():
    for engine, seconds in (((ENGINE,), (8e-5, 7e-6, 3e-5)), ((), (0.0, 0.0, 0.0))):
        costs = measured_costs(_step_on("cpu", 1.0), *engine)
        assert (costs.region_seconds, costs.slot_seconds, costs.replay_seconds) == seconds


def test_the_engine_is_hidden_behind_a_busy_device_and_shows_behind_one_that_waits_for_launches():
    busy, waiting = measured_costs(_step_on("cuda:0", 1e-3), ENGINE), measured_costs(_step_on("cuda:0", 2e-6), ENGINE)
    assert busy.region_seconds == busy.slot_seconds == busy.replay_seconds == 0.0
    assert waiting.slot_seconds == ENGINE.slot_seconds
    # Where the device waits for launches, an op takes what the host takes.
    assert (busy.ops["add"].seconds, waiting.ops["add"].seconds) == (1e-3, ENGINE.host_op_seconds)


def test_memory_of_an_unknown_device_is_unknown():
    assert device_memory_bytes("meta") is None
