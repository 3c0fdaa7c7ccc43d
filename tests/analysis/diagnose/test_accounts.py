"""Whatever a trace holds: busy and idle time are the step, the causes are the overhead, and both sides are read alike."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.analysis.diagnose.accounts import keep_ledger
from plimsoll.analysis.diagnose.attribution import find_layers
from plimsoll.analysis.diagnose.causes import split_overhead
from plimsoll.analysis.diagnose.chrome_reader import input_bytes
from plimsoll.analysis.diagnose.profile import (
    DeviceKind,
    DeviceSpan,
    HostKind,
    HostSpan,
    Profile,
    clip,
    covered_ns,
    owned_ns,
)
from plimsoll.artifacts.finding import OverheadCause, WorkUnit
from plimsoll.planning.step import merge, subtract

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
    steps = tuple((i * 100_000, i * 100_000 + 90_000 + 10_000 * (i % 2)) for i in range(count))
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
    layers = {
        "model.layers.0.mlp": "model.layers.0",
        "model.layers.1.mlp.experts.3": "model.layers.1",
        "model.embed_tokens": "",
        "vision.blocks.0.conv1": "vision.blocks.0",
        "vision.blocks.2": "vision.blocks.2",
    }
    assert list(find_layers([*layers]).values()) == [*layers.values()]


def test_bytes_of_inputs_count_lists_of_tensors_and_admit_unknown_types():
    assert input_bytes([[[2, 2], [4]], []], ["float", "Scalar"]) == 32
    assert input_bytes([[2, 2]], ["TensorList of something"]) is None
    assert input_bytes(None, None) is None


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12), st.integers(0, 2)).map(lambda s: (s[0], s[0] + s[1], s[2])),
    max_size=15,
)


def instants(intervals) -> set[int]:
    return {at for start, end, *_ in intervals for at in range(start, end)}


@given(spans)
def test_union_covers_what_any_interval_covers(pieces):
    merged = merge((start, end) for start, end, _ in pieces)
    assert instants(merged) == instants(pieces)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(merged))


@given(spans, spans)
def test_gaps_and_cover_are_the_windows(pieces, others):
    windows = merge((start, end) for start, end, _ in others)
    merged = merge((start, end) for start, end, _ in pieces)
    idle = subtract(windows, merged)
    assert instants(idle) == instants(windows) - instants(merged)
    covered = sum(covered_ns(window, merged) for window in windows)
    assert len(instants(idle)) + covered == len(instants(windows))


@given(spans)
def test_every_instant_has_one_owner_of_the_lowest_rank(pieces):
    owned = owned_ns(pieces)
    expected = [0] * len(pieces)
    for at in instants(pieces):
        active = [index for index, (start, end, _) in enumerate(pieces) if start <= at < end]
        expected_rank = min(pieces[index][2] for index in active)
        earliest = min(pieces[index][0] for index in active if pieces[index][2] == expected_rank)
        candidates = [i for i in active if pieces[i][2] == expected_rank and pieces[i][0] == earliest]
        expected[candidates[0]] += 1
    assert sum(owned) == sum(expected) == len(instants(pieces))
    by_place: dict[tuple[int, int], list[int]] = {}
    for index, (start, _, rank) in enumerate(pieces):
        found = by_place.setdefault((start, rank), [0, 0])
        found[0] += owned[index]
        found[1] += expected[index]
    assert all(one == other for one, other in by_place.values())


@given(spans, st.integers(0, 60), st.integers(1, 20))
def test_clipping_keeps_what_lies_in_the_windows(others, start, length):
    windows = merge((low, high) for low, high, _ in others)
    parts = clip((start, start + length), windows)
    assert instants(parts) == instants(windows) & set(range(start, start + length))
