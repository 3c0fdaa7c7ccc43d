"""Chrome traces of a GPU with known answers: who asked for a kernel, what is busy, what is idle and why."""

from __future__ import annotations

import pytest

from analysis.diagnose.builders import BACKWARD, ChromeBuilder
from analysis.diagnose.conftest import Compare
from plimsoll.artifacts.finding import OverheadCause, WorkPhase, WorkUnit

US = 1e-6


def step(
    *,
    recompute: str = "",
    recompute_kernels: int = 0,
    slower: float = 0.0,
    late: float = 0.0,
    wait: float = 0.0,
    copy: float = 0.0,
) -> ChromeBuilder:
    """One step: a forward matrix product of 20 µs, a backward one of 40 µs, and what the plan adds between them.

    Kernels follow each other without a gap, except before backward: ``late`` microseconds because the host launches that
    late, and ``wait`` microseconds under a call that waits.
    """
    trace = ChromeBuilder()
    trace.op("aten::mm", 10, 14, sequence=5)
    trace.launch(12, 20, 40 + slower, "gemm_forward", grid=[8, 1, 1], block=[128, 1, 1])
    at = 40 + slower
    if wait:
        trace.host("cuda_runtime", "cudaStreamSynchronize", at - 5, at + wait)
        at += wait
    trace.node("MmBackward0", 15, 900, sequence=5)
    if recompute == "plimsoll":
        trace.host("user_annotation", "plimsoll.recompute: blocks.0", 100, 140, thread=BACKWARD)
    for index in range(recompute_kernels):
        numbered = 9 + index if recompute == "checkpoint" else -1
        trace.op("aten::mm", 101 + 10 * index, 105 + 10 * index, thread=BACKWARD, sequence=numbered)
        trace.launch(102 + 10 * index, at, at + 20, "gemm_forward", thread=BACKWARD, grid=[8, 1, 1], block=[128, 1, 1])
        at += 20
    if copy:
        trace.launch(30, at, at + copy, "Memcpy DtoH", category="gpu_memcpy", call="cudaMemcpyAsync", bytes=4096)
        at += copy
    launched = at + late - 2 if late else 31.0
    trace.op("aten::mm", launched - 0.5, launched + 1.5, thread=BACKWARD)
    trace.launch(launched, at + late, at + late + 40, "gemm_backward", thread=BACKWARD)
    trace.step(0, 0, at + late + 40)
    return trace


@pytest.mark.parametrize("how", ["plimsoll", "checkpoint"])
def test_recomputed_kernels_are_recompute_arithmetic(compare: Compare, how: str):
    finding = compare(step(), step(recompute=how, recompute_kernels=2))
    assert finding.unit is WorkUnit.KERNELS
    assert finding.seconds_of(OverheadCause.RECOMPUTE) == pytest.approx(40 * US)
    assert finding.overhead_seconds == pytest.approx(40 * US)
    phases = {use.phase: use for use in finding.plan.phases}
    assert phases[WorkPhase.RECOMPUTE].busy_seconds == pytest.approx(40 * US)
    assert phases[WorkPhase.RECOMPUTE].count == 2
    assert phases[WorkPhase.BACKWARD].busy_seconds == pytest.approx(40 * US)
    assert finding.plan.attributed_share == finding.plan.phased_share == 1.0


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"slower": 7}, OverheadCause.MEMORY),
        ({"late": 120}, OverheadCause.LAUNCH),
        ({"wait": 30}, OverheadCause.SYNCHRONISATION),
        ({"copy": 25}, OverheadCause.COPIES),
    ],
)
def test_slower_kernels_late_launches_waits_and_open_copies_have_causes_of_their_own(
    compare: Compare, change: dict[str, float], cause: OverheadCause
):
    finding = compare(step(), step(**change))
    assert finding.seconds_of(cause) == pytest.approx(next(iter(change.values())) * US)
    assert finding.plan.copied_bytes == (4096 if "copy" in change else 0)
    assert (finding.baseline.long_gaps, finding.plan.long_gaps) == (0, int("late" in change))
    gaps = next(sign for sign in finding.signs if sign.name.startswith("gaps"))
    assert gaps.is_raised or "late" not in change


def test_a_copy_beside_a_kernel_costs_nothing(compare: Compare):
    hidden = step()
    hidden.launch(13, 21, 39, "Memcpy DtoH", category="gpu_memcpy", call="cudaMemcpyAsync", stream=9, bytes=64)
    finding = compare(step(), hidden)
    assert finding.seconds_of(OverheadCause.COPIES) == 0.0
    assert finding.plan.copied_bytes == 64
    assert finding.overhead_seconds == 0.0


def test_two_streams_that_overlap_are_busy_once(compare: Compare):
    both = step()
    both.launch(13, 30, 50, "gemm_forward", stream=9)
    finding = compare(step(), both)
    assert finding.plan.busy_seconds == pytest.approx(60 * US)
    assert finding.plan.count == 3


def queued(*kernels: tuple[str, float], gap: float = 0.0, call: str = "cudaLaunchKernel") -> ChromeBuilder:
    """One op that launches kernels of these lengths early; before the last one nothing runs for a while."""
    built = ChromeBuilder()
    built.op("aten::mm", 5, 16, sequence=1)
    at = 20.0
    for index, (name, length) in enumerate(kernels):
        at += gap if index == len(kernels) - 1 else 0
        built.launch(6 + index, at, at + length, name, call=call)
        at += length
    built.step(0, 0, at)
    return built


def test_work_queued_long_ago_that_does_not_start_is_not_explained(compare: Compare):
    finding = compare(*(queued(("gemm", 20), ("gemm", 20), gap=gap) for gap in (0, 200)))
    assert finding.seconds_of(OverheadCause.UNEXPLAINED) == pytest.approx(200 * US)
    assert finding.seconds_of(OverheadCause.UNEXPLAINED) == pytest.approx(finding.overhead_seconds)


def test_fused_kernels_that_become_element_wise_ones_are_lost_fusion(compare: Compare):
    fused = queued(("gemm", 20), ("triton_poi_fused_add_mul_0", 10))
    eager = queued(("gemm", 20), ("vectorized_elementwise_kernel_add", 12), ("vectorized_elementwise_kernel_mul", 13))
    finding = compare(fused, eager)
    assert finding.seconds_of(OverheadCause.FUSION) == pytest.approx(15 * US)
    assert compare(eager, eager).seconds_of(OverheadCause.FUSION) == 0.0


def test_a_broken_capture_is_a_sign(compare: Compare):
    captured, eager = queued(("gemm", 20), call="cudaGraphLaunch"), queued(("gemm", 20))
    sign = next(sign for sign in compare(captured, eager).signs if sign.name == "CUDA graphs")
    assert sign.is_raised
    assert all(sign.name != "CUDA graphs" for sign in compare(eager, eager).signs)


def test_modules_come_from_ranges_and_from_the_forward_op_of_a_node(compare: Compare):
    def trace(prefix: str, *names: str) -> ChromeBuilder:
        built = ChromeBuilder()
        at = 100.0
        for index, name in enumerate(names):
            category = "python_function" if prefix == "nn.Module: " else "user_annotation"
            built.host(category, prefix + name, 10 * index, 10 * index + 9)
            built.op("aten::mm", 10 * index + 1, 10 * index + 8, sequence=index)
            built.launch(10 * index + 2, at, at + 5, "gemm")
            at += 5
        for index in reversed(range(len(names))):
            start = 60 + 10 * index
            built.node("MmBackward0", start, start + 9, sequence=index)
            built.op("aten::mm", start + 1, start + 8, thread=BACKWARD)
            built.launch(start + 2, at, at + 10, "gemm_backward", thread=BACKWARD)
            at += 10
        built.step(0, 0, at)
        return built

    for trace_ in (trace("plimsoll.module: ", "h.0", "h.1"), trace("nn.Module: ", "Block_0", "Block_1")):
        finding = compare(trace_, trace_)
        assert finding.are_layers_modules
        assert [row.baseline_seconds for row in finding.layers] == pytest.approx([15 * US, 15 * US])
        assert finding.baseline.module_share == 1.0
        assert finding.baseline.kernels_per_layer == 2


def test_work_queued_before_the_first_step_is_left_out(compare: Compare):
    trace = step()
    trace.on_device("gemm_of_an_earlier_step", -30, 12, correlation=999, stream=7)
    finding = compare(step(), trace)
    assert finding.plan.count == finding.baseline.count
    assert finding.plan.attributed_share == 1.0


def test_bandwidth_while_recomputing_is_a_share_of_the_peak(compare: Compare):
    def trace(kernels: int) -> ChromeBuilder:
        built = ChromeBuilder()
        sizes = {"Input Dims": [[1000, 10], [10, 1]], "Input type": ["float", "float"]}
        built.op("aten::mv", 10, 14, sequence=5, **sizes)
        built.launch(12, 20, 30, "gemv")
        built.node("MvBackward0", 15, 200, sequence=5)
        built.host("user_annotation", "plimsoll.recompute: h.0", 20, 90, thread=BACKWARD)
        for index in range(kernels):
            built.op("aten::mv", 21 + index * 9, 28 + index * 9, thread=BACKWARD, **sizes)
            built.launch(22 + index * 9, 30 + index * 10, 40 + index * 10, "gemv", thread=BACKWARD)
        built.step(0, 0, 30 + 10 * kernels)
        return built

    finding = compare(trace(0), trace(2), bandwidth=4.5e9)
    use = next(use for use in finding.plan.phases if use.phase is WorkPhase.RECOMPUTE)
    assert use.read_bytes == 2 * 40_040
    assert use.bandwidth_share == pytest.approx(40_040 / 10e-6 / 4.5e9)
    assert next(sign for sign in finding.signs if sign.name.startswith("bandwidth")).is_raised
    unknown = compare(trace(0), trace(2))
    assert next(sign for sign in unknown.signs if sign.name.startswith("bandwidth")).is_raised is None
    assert any("peak bandwidth" in note for note in unknown.notes)
