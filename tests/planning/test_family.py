"""The trace at an untraced shape, held against the step really traced there."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from plimsoll.artifacts.costs import Costs, CostSource, OpCost
from plimsoll.artifacts.trace import Trace
from plimsoll.estimator.fit.search import Shape
from plimsoll.planning.family import Family, find_difference
from plimsoll.planning.simulate import run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.planning.strategies import choose_full, choose_none
from plimsoll.tracing.trace import trace
from steps import Net, llama, mean_square

TRACED = (Shape(2, 32), Shape(3, 32), Shape(4, 32))
HELD_OUT = Shape(7, 32)
LENGTHS = (Shape(2, 16), Shape(4, 16), Shape(2, 32), Shape(3, 32), Shape(2, 64), Shape(4, 64))
LONG = Shape(5, 80)
NO_COSTS = Costs(device="cpu", source=CostSource.ROOFLINE, ops={})


def attention() -> Net:
    """Attention with its scores written out: sizes with the square of the sequence."""

    def attend(net: Net, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).tril().log()
        return x + torch.softmax(net.q(x) @ net.k(x).transpose(1, 2) + mask, dim=-1) @ net.v(x)

    return Net(attend, **{name: nn.Linear(8, 8) for name in "qkv"})


def trace_at(model: torch.nn.Module, shape: Shape) -> Trace:
    tokens = torch.randint(0, 128, shape)
    return trace(model, {"input_ids": tokens, "labels": tokens}, device_name="laptop-CPU")


@pytest.fixture(scope="module")
def traces() -> dict[Shape, Trace]:
    model = llama()[0]
    return {shape: trace_at(model, shape) for shape in (*TRACED, HELD_OUT, Shape(1, 32))}


@pytest.fixture(scope="module")
def family(traces: dict[Shape, Trace]) -> Family:
    return Family({shape: traces[shape] for shape in (*TRACED, Shape(1, 32))})


@pytest.fixture(scope="module")
def lengths() -> dict[Shape, Trace]:
    model = nn.Sequential(attention())
    return {
        shape: trace(model, torch.randn(*shape, 8), loss=mean_square, regions=["0"], device_name="laptop-CPU")
        for shape in (*LENGTHS, LONG)
    }


def assert_exact(family: Family, shape: Shape, real: Trace) -> None:
    predicted = family.at(shape)
    assert family.covers(shape)
    assert family.knows(shape)
    assert family.inexact_bytes(shape) == 0
    assert [s.bytes for s in predicted.storages] == [s.bytes for s in real.storages]
    for ours, theirs in zip(predicted.regions, real.regions, strict=True):
        assert [v.bytes for v in ours.graph.values] == [v.bytes for v in theirs.graph.values]
    for mine, their in zip(predicted.ops, real.ops, strict=True):
        ours_spec, real_spec = predicted.specs[mine.cost_key], real.specs[their.cost_key]
        assert (ours_spec.flops, ours_spec.moved_bytes) == (real_spec.flops, real_spec.moved_bytes)


@pytest.mark.long
def test_every_size_and_the_arithmetic_of_a_llama_at_a_held_out_batch_are_exact(family: Family, traces):
    assert_exact(family, HELD_OUT, traces[HELD_OUT])


def test_every_size_and_the_arithmetic_of_attention_at_a_held_out_sequence_are_exact(lengths):
    assert_exact(Family({shape: lengths[shape] for shape in LENGTHS}), LONG, lengths[LONG])


@pytest.mark.parametrize("choose", [choose_none, choose_full])
def test_the_peak_of_a_plan_at_a_held_out_shape_is_that_of_the_step_traced_there(family, traces, choose):
    peaks = []
    for step in (family.at(HELD_OUT), traces[HELD_OUT]):
        index = StepIndex(step, NO_COSTS)
        peaks.append(run_choices(index, choose(index, "")).peak_bytes)
    assert peaks[0] == peaks[1]


def test_a_batch_of_one_whose_step_runs_other_ops_is_named_and_left_out(family: Family, traces):
    alone = Shape(1, 32)
    assert alone in family.strays
    assert "ops against" in family.strays[alone]
    assert alone not in family.shapes
    assert family.at(alone) is traces[alone]


def test_a_traced_shape_comes_back_as_it_was_traced_and_equal_blocks_of_a_predicted_one_are_of_one_kind(
    family: Family, traces
):
    assert family.at(TRACED[0]) is traces[TRACED[0]]
    assert len({region.kind for region in family.at(HELD_OUT).regions}) == 1


def test_a_size_that_never_varied_tells_nothing_of_others_and_neither_does_a_size_of_one(lengths):
    few = Family({shape: lengths[shape] for shape in LENGTHS if shape.batch == 2})
    assert few.knows(Shape(2, 80))
    assert not few.covers(Shape(4, 80))
    assert not few.covers(Shape(2, 1))
    assert not Family({LENGTHS[0]: lengths[LENGTHS[0]]}).covers(LENGTHS[1])


def test_batches_that_only_grow_together_do_not_tell_one_that_does_not(lengths):
    together = Family({shape: lengths[shape] for shape in (Shape(2, 32), Shape(4, 64))})
    assert together.dimensions.count == 1
    assert not together.covers(Shape(4, 32))
    mixed = Family({shape: lengths[shape] for shape in (Shape(2, 32), Shape(4, 64), Shape(4, 16))})
    assert mixed.knows(LONG)


def test_ops_of_regions_that_are_parts_of_other_kernels_in_the_step_are_known_by_their_own_sizes(traces):
    def apart(step: Trace) -> Trace:
        """As a compiled step is: what a region's ops take alone is not what the step's kernels take."""
        calls = []
        for call in step.regions:
            ops = tuple(msgspec.structs.replace(op, cost_key=f"part of {op.cost_key}") for op in call.graph.ops)
            calls.append(msgspec.structs.replace(call, graph=msgspec.structs.replace(call.graph, ops=ops)))
        specs = step.specs | {f"part of {key}": spec for key, spec in step.specs.items()}
        return msgspec.structs.replace(step, regions=tuple(calls), specs=specs)

    family = Family({shape: apart(traces[shape]) for shape in TRACED})
    found, real = family.alike(HELD_OUT), apart(traces[HELD_OUT])
    for call, expected in zip(found.regions, real.regions, strict=True):
        keys = [(op.cost_key, other.cost_key) for op, other in zip(call.graph.ops, expected.graph.ops, strict=True)]
        assert [found.specs[key].flops for key, _ in keys] == [real.specs[other].flops for _, other in keys]
        assert all(key in family.seconds_at(HELD_OUT, measured(family)).ops for key, _ in keys)


def measured(family: Family) -> dict[Shape, Costs]:
    """Every op of every member takes a second."""
    return {
        shape: msgspec.structs.replace(NO_COSTS, ops=dict.fromkeys(family.at(shape).specs, OpCost(seconds=1.0)))
        for shape in family.shapes
    }


def test_a_difference_is_found_in_ops_lives_and_graphs(traces):
    step = traces[TRACED[0]]
    assert find_difference(step, step) == ""
    replace = msgspec.structs.replace
    renamed = replace(step, ops=(replace(step.ops[0], name="other"), *step.ops[1:]))
    shorter = replace(step, storages=(replace(step.storages[0], dies=1), *step.storages[1:]))
    region = step.regions[0]
    fewer = replace(step, regions=(replace(region, graph=replace(region.graph, outputs=())), *step.regions[1:]))
    wider = replace(step, specs={key: replace(spec, dtype="f64") for key, spec in step.specs.items()})
    assert "op 0 is" in find_difference(step, renamed)
    assert "storages" in find_difference(step, shorter)
    assert "graph of model.layers.0" in find_difference(step, fewer)
    assert "another dtype" in find_difference(step, wider)


def test_seconds_between_two_measured_shapes_lie_between_theirs_and_grow_beyond(traces):
    small, large = Shape(2, 32), Shape(4, 32)
    known = {
        shape: Costs(
            device="cpu",
            source=CostSource.MEASURED,
            ops={key: OpCost(seconds=1.0 + spec.flops) for key, spec in traces[shape].specs.items()},
        )
        for shape in (small, large)
    }

    def seconds(family: Family, shape: Shape) -> float:
        step = family.at(shape)
        costs = known[shape] if shape in known else family.seconds_at(shape, known)
        assert {op.cost_key for op in step.ops} <= set(costs.ops)
        return StepIndex(step, costs).base_seconds

    few = Family({shape: traces[shape] for shape in (small, large)})
    middle = seconds(few, Shape(3, 32))
    assert seconds(few, small) < middle < seconds(few, large) < seconds(few, Shape(6, 32))
    assert middle == pytest.approx((seconds(few, small) + seconds(few, large)) / 2, rel=0.01)
