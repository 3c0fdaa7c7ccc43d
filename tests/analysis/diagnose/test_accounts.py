"""Whatever a trace holds: busy and idle time are the step, the causes are the overhead, and both sides are read alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.analysis.diagnose.accounts import keep_ledger
from plimsoll.analysis.diagnose.attribution import find_layers
from plimsoll.analysis.diagnose.causes import split_overhead
from plimsoll.analysis.diagnose.chrome_reader import input_bytes
from plimsoll.analysis.diagnose.profile import DeviceKind, DeviceSpan, HostKind, HostSpan, Profile, StepSpan
from plimsoll.artifacts.finding import OverheadCause, WorkUnit

OPS = st.sampled_from(["aten::mm", "aten::add", "aten::copy_", "aten::view", "NormBackward0", "my::op"])
KERNELS = st.sampled_from(["gemm", "vectorized_elementwise_kernel", "triton_poi_fused_add_0", "ncclKernel_AllReduce"])
RANGES = st.sampled_from(
    ["plimsoll.recompute: h.0", "plimsoll.module: h.1", "forward", "backward", "Optimizer.step#SGD.step", "a range"]
)
CALLS = st.sampled_from(["cudaLaunchKernel", "cudaStreamSynchronize", "cudaGraphLaunch"])
TIMES = st.tuples(st.integers(0, 400_000), st.integers(0, 150_000)).map(lambda t: (t[0], t[0] + t[1]))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    host, device = [], []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(HostKind))
        start, end = draw(TIMES)
        host.append(
            HostSpan(
                name=draw({HostKind.OP: OPS, HostKind.RANGE: RANGES, HostKind.CALL: CALLS}[kind]),
                kind=kind,
                thread=draw(st.sampled_from(["main", "backward"])),
                start_ns=start,
                end_ns=end,
                sequence=draw(st.integers(-1, 3)) if kind is HostKind.OP else -1,
                correlation=str(draw(st.integers(0, 9))) if kind is HostKind.CALL else "",
            )
        )
    for _ in range(draw(st.integers(1, 12))):
        start, end = draw(TIMES)
        device.append(
            DeviceSpan(
                name=draw(KERNELS),
                kind=draw(st.sampled_from(DeviceKind)),
                device=draw(st.integers(0, 1)),
                stream=draw(st.integers(7, 8)),
                start_ns=start,
                end_ns=end,
                correlation=str(draw(st.integers(0, 12))),
            )
        )
    count = draw(st.integers(0, 3))
    steps = tuple(StepSpan(start_ns=i * 100_000, end_ns=i * 100_000 + 90_000 + 10_000 * (i % 2)) for i in range(count))
    apart = draw(st.booleans())
    return Profile(source="drawn", host=tuple(host), device=tuple(device), steps=steps, are_steps_apart=apart)


@settings(max_examples=60, deadline=None)
@given(profiles(), profiles(), st.sampled_from(WorkUnit))
def test_causes_are_disjoint_and_add_up_to_the_overhead(baseline: Profile, plan: Profile, unit: WorkUnit):
    before, after = keep_ledger(baseline, unit), keep_ledger(plan, unit)
    for ledger in (before, after):
        assert all(work.own_ns >= 0 for work in ledger.work)
        assert all(gap.length_ns > 0 and gap.launching_ns >= 0 and gap.stalled_ns >= 0 for gap in ledger.idle)
        busy_ns = sum(work.own_ns for work in ledger.work)
        assert busy_ns + sum(gap.length_ns for gap in ledger.idle) == sum(ledger.wall_ns)
    parts = split_overhead(before, after)
    assert [part.cause for part in parts] == list(OverheadCause)
    overhead = (sum(after.wall_ns) / after.steps - sum(before.wall_ns) / before.steps) * 1e-9
    assert sum(part.seconds for part in parts) == pytest.approx(overhead, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(profiles(), st.sampled_from(WorkUnit))
def test_a_profile_beside_itself_has_no_overhead_of_any_cause(profile: Profile, unit: WorkUnit):
    ledger = keep_ledger(profile, unit)
    assert all(part.seconds == 0.0 for part in split_overhead(ledger, ledger))


def test_layers_are_the_first_numbered_part_that_repeats():
    paths = [
        "model.layers.0.mlp",
        "model.layers.1.mlp.experts.3",
        "model.embed_tokens",
        "vision.blocks.0.conv1",
        "vision.blocks.2",
    ]
    assert list(find_layers(paths).values()) == [
        "model.layers.0",
        "model.layers.1",
        "",
        "vision.blocks.0",
        "vision.blocks.2",
    ]


def test_bytes_of_inputs_count_lists_of_tensors_and_admit_unknown_types():
    assert input_bytes([[[2, 2], [4]], []], ["float", "Scalar"]) == 32
    assert input_bytes([[2, 2]], ["TensorList of something"]) is None
    assert input_bytes(None, None) is None
