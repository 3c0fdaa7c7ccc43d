"""Seconds of ops from a roofline and from samples."""

import sys

import msgspec
import pytest

from plimsoll.artifacts.costs import Costs, CostSource
from plimsoll.artifacts.trace import OpSpec, Phase, Trace, TraceOp
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs, roofline_seconds
from plimsoll.session.device_costs import EngineOverhead, device_memory_bytes, fit_roofline, measured_costs, op_cost


def _spec(name="add", flops=0, moved_bytes=0, dtype="f32"):
    return OpSpec(name=name, flops=flops, moved_bytes=moved_bytes, dtype=dtype)


def _trace(specs, timings=None):
    return Trace(
        model="m",
        fingerprint="f",
        signature="s",
        device="cpu",
        is_fake=timings is None,
        ops=(),
        specs=specs,
        storages=(),
        regions=(),
        timings=timings or {},
        workspaces={},
    )


def test_large_products_are_bound_by_arithmetic_and_sums_by_bandwidth():
    h100 = find_device("H100-SXM")
    product = _spec("mm", flops=2 * 8192**3, moved_bytes=3 * 2 * 8192**2, dtype="bf16")
    assert roofline_seconds(product, h100) == pytest.approx(2 * 8192**3 / (989.4e12 * 0.65) + 4e-6)
    total = _spec("add", flops=2**28, moved_bytes=3 * 2**29, dtype="bf16")
    assert roofline_seconds(total, h100) == pytest.approx(3 * 2**29 / (3350e9 * 0.85) + 4e-6)


def test_the_smallest_op_takes_a_launch():
    device = find_device("L40S")
    assert roofline_seconds(_spec(), device) == device.launch_seconds


def test_f32_convolutions_use_tf32_where_there_is_one():
    flops = 10**12
    assert roofline_seconds(_spec("convolution", flops), find_device("A100")) < roofline_seconds(
        _spec("mm", flops), find_device("A100")
    )
    assert roofline_seconds(_spec("convolution", flops), find_device("cpu")) == roofline_seconds(
        _spec("mm", flops), find_device("cpu")
    )


def test_roofline_costs_cover_every_key_and_name_the_device():
    costs = roofline_costs(_trace({"a": _spec(moved_bytes=10), "b": _spec("mm", 10)}), find_device("B200"))
    assert set(costs.ops) == {"a", "b"}
    assert (costs.device, costs.source) == ("B200", CostSource.ROOFLINE)
    assert costs.memory_bytes == find_device("B200").memory_bytes


def test_roofline_needs_no_torch(run_python):
    run_python("import sys, plimsoll.planning.costing.roofline; assert 'torch' not in sys.modules")


@pytest.fixture
def run_python():
    import subprocess

    def run(code):
        subprocess.run([sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"], check=True)

    return run


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
    costs = measured_costs(_trace(specs | {"optimizer": optimizer}, timings))
    assert costs.source is CostSource.MEASURED
    assert costs.ops["add10"].seconds == _machine(specs["add10"])
    assert costs.ops["optimizer"].seconds == pytest.approx(_machine(optimizer), rel=0.02)
    assert costs.memory_bytes == device_memory_bytes("cpu")


ENGINE = EngineOverhead(region_seconds=8e-5, slot_seconds=7e-6, replay_seconds=3e-5, host_op_seconds=5e-6)


def _step_on(device, seconds):
    """One op, three times, that takes so long on the device."""
    op = TraceOp(name="add", cost_key="add", module="", phase=Phase.FORWARD)
    trace = _trace({"add": _spec("add", 1, 12)}, {"add": (seconds,)})
    return msgspec.structs.replace(trace, device=device, ops=(op,) * 3)


def test_measured_costs_carry_what_the_engine_takes():
    costs = measured_costs(_step_on("cpu", 1.0), ENGINE)
    assert (costs.region_seconds, costs.slot_seconds, costs.replay_seconds) == (8e-5, 7e-6, 3e-5)


def test_the_engine_is_free_where_it_was_not_measured():
    costs = measured_costs(_step_on("cpu", 1.0))
    assert (costs.region_seconds, costs.slot_seconds, costs.replay_seconds) == (0.0, 0.0, 0.0)


def test_the_engine_is_hidden_behind_a_busy_device_and_shows_behind_one_that_waits_for_launches():
    busy, waiting = measured_costs(_step_on("cuda:0", 1e-3), ENGINE), measured_costs(_step_on("cuda:0", 2e-6), ENGINE)
    assert busy.region_seconds == busy.slot_seconds == busy.replay_seconds == 0.0
    assert waiting.slot_seconds == ENGINE.slot_seconds


def test_costs_of_before_regions_had_seconds_of_their_own_can_be_read():
    old = b'{"device": "cpu", "source": "measured", "ops": {}, "slot_seconds": 1e-6, "replay_seconds": 1e-7}'
    assert msgspec.json.decode(old, type=Costs).region_seconds == 0.0


def test_memory_of_an_unknown_device_is_unknown():
    assert device_memory_bytes("meta") is None
