"""A trace cut into pipeline stages: nothing is lost, nothing is counted twice but what crosses a boundary."""

from __future__ import annotations

import gc
from collections import Counter

import msgspec
import pytest
import torch
from torch import nn

import steps
from plimsoll.artifacts.job import Layout, ModelFacts, PipelineSchedule, StageRule
from plimsoll.artifacts.trace import Category, Phase, Trace
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.parallelism.members import even_counts, stage_counts
from plimsoll.estimator.parallelism.rank import rank_trace
from plimsoll.estimator.parallelism.stages import StageTrace, split_stages
from plimsoll.estimator.pipeline_schedule.orders import ActionKind, in_flight, pipeline_orders
from plimsoll.planning.choice import Choice
from plimsoll.planning.costing.devices import find_device
from plimsoll.planning.costing.roofline import roofline_costs
from plimsoll.planning.simulate import Simulation, run_choices
from plimsoll.planning.step import StepIndex
from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.tracing.trace import trace


def simulated(step: Trace, *, keeps: bool = True) -> Simulation:
    index = StepIndex(step, roofline_costs(step, find_device("H100")))
    return run_choices(index, [Choice(view.everything if keeps else view.nothing) for view in index.views])


def retained_bytes(step: Trace) -> int:
    """What one micro-batch holds between forward and backward when everything is kept; its input is not counted."""
    simulation = simulated(step)
    instant = simulation.index.handover
    static = sum(s.bytes for s in step.storages if s.born < 0 and 2 * s.dies > instant)
    return int(simulation.curve[instant]) - static


@pytest.fixture(params=["llama", "tied_llama", "t5"])
def whole(request: pytest.FixtureRequest) -> Trace:
    found: Trace = request.getfixturevalue(request.param)
    return found


def test_every_op_is_in_one_stage_with_its_phase_and_cost(whole: Trace):
    stages = split_stages(whole, Layout(pp=3))
    ops = [op for stage in stages for op in stage.trace.ops]
    assert Counter((op.name, op.module, op.phase, op.cost_key) for op in ops) == Counter(
        (op.name, op.module, op.phase, op.cost_key) for op in whole.ops
    )
    for stage in stages:
        phases = [op.phase for op in stage.trace.ops]
        assert phases == sorted(phases, key=list(Phase).index), "forward, then backward"
    costs = roofline_costs(whole, find_device("H100"))
    seconds = [StepIndex(stage.trace, costs).base_seconds for stage in stages]
    assert sum(seconds) == pytest.approx(StepIndex(whole, costs).base_seconds)


def test_every_parameter_is_in_one_stage_and_a_tied_one_in_all_that_use_it(whole: Trace):
    stages = split_stages(whole, Layout(pp=3))
    held = Counter(parameter.name for stage in stages for parameter in stage.trace.parameters)
    assert held.keys() == {parameter.name for parameter in whole.parameters}
    assert {name for name, count in held.items() if count > 1} == {p.name for p in whole.parameters if p.aliases}
    for stage in stages:
        for parameter in stage.trace.parameters:
            storage = stage.trace.storages[parameter.storage]
            assert (storage.category, storage.bytes) == (Category.PARAMETER, parameter.bytes)


def test_every_stage_has_the_gradients_of_its_parameters(whole: Trace):
    for stage in split_stages(whole, Layout(pp=2)):
        wanted = Counter(parameter.bytes for parameter in stage.trace.parameters)
        found = [s for s in stage.trace.storages if s.category is Category.GRADIENT]
        assert Counter(storage.bytes for storage in found) == wanted
        assert all(storage.dies == len(stage.trace.ops) for storage in found)


@pytest.mark.parametrize("keeps", [True, False])
def test_stages_can_be_simulated_and_planned_like_any_trace(whole: Trace, *, keeps: bool):
    peak = simulated(whole, keeps=keeps).peak_bytes
    for stage in split_stages(whole, Layout(pp=3)):
        simulation = simulated(stage.trace, keeps=keeps)
        assert simulation.curve.min() >= 0
        assert simulation.peak_bytes < peak
        for position, storage in enumerate(stage.trace.storages):
            assert storage.id == position
            assert -1 <= storage.born < storage.dies <= len(stage.trace.ops)
        for call in stage.trace.regions:
            assert 0 <= call.forward[0] < call.forward[1] <= call.backward[0] < call.backward[1]
            ticks = [op.tick for op in call.graph.ops]
            assert ticks == list(range(*call.forward))
            assert [stage.trace.ops[tick].region for tick in ticks] == [call.index] * len(ticks)


def test_stages_together_retain_what_the_whole_retains_and_the_boundaries(llama: Trace):
    stages = split_stages(llama, Layout(pp=3))
    # A block's input is saved by the block; it is one storage in the whole, two at a boundary. Each later stage makes the
    # rotary tables (cosine and sine) and positions anew, and holds what its blocks save of them.
    anew = [s for stage in stages[1:] for s in stage.trace.storages if s.born == 0 and "rotary_emb" in s.label]
    assert len(anew) == 4
    expected = retained_bytes(llama) + sum(stage.received_bytes for stage in stages) + sum(s.bytes for s in anew)
    assert sum(retained_bytes(stage.trace) for stage in stages) == expected


def test_boundaries_carry_the_hidden_states_both_ways(llama: Trace):
    stages = split_stages(llama, Layout(pp=3))
    hidden = 2 * 16 * 32 * 4
    assert [stage.received_bytes for stage in stages] == [0, hidden, hidden]
    for stage in stages:
        labels = [s.label for s in stage.trace.storages]
        assert sum(label.startswith("received model") for label in labels) == (stage.index > 0)
        assert sum(label.startswith("received gradient") for label in labels) == (stage.index < 2)


def test_what_the_encoder_returns_reaches_every_decoder_stage(t5: Trace):
    stages = split_stages(t5, Layout(pp=4))
    received = [[s.label for s in stage.trace.storages if s.label.startswith("received")] for stage in stages]
    assert [any(label.startswith("received encoder.dropout") for label in labels) for labels in received] == [
        False, False, True, True,
    ]  # fmt: skip
    assert any(label.startswith("received gradient of encoder.dropout") for label in received[1])


def _blocks() -> nn.Sequential:
    return nn.Sequential(*(steps.Block(16, dropout=0.0) for _ in range(6)))


def test_a_stage_holds_what_its_blocks_hold_when_they_are_traced_alone():
    blocks = _blocks()
    whole = trace(blocks, torch.ones(8, 16), loss=torch.sum, repeats=1)
    middle = split_stages(whole, Layout(pp=3))[1]
    alone = trace(blocks[2:4], torch.ones(8, 16, requires_grad=True), loss=torch.sum, repeats=1)
    loss_bytes = 4
    assert retained_bytes(middle.trace) - middle.received_bytes == retained_bytes(alone) - loss_bytes
    shapes = [sorted(p.shape for p in each.parameters) for each in (middle.trace, alone)]
    assert shapes[0] == shapes[1]
    assert [op.name for op in middle.trace.ops if op.region >= 0] == [op.name for op in alone.ops if op.region >= 0]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_stage_at_work_in_its_pipeline_holds_what_is_predicted(schedule: str):
    blocks = _blocks()
    whole = trace(blocks, torch.ones(64, 16), loss=torch.sum, repeats=1)
    layout = Layout(pp=3, micro_batches=5, schedule=PipelineSchedule(schedule))
    orders, middle = pipeline_orders(layout), blocks[2:4]
    for _ in range(2):
        gc.collect()  # what the tracer left behind must not be let go while memory is counted
        with PeakMeter() as meter:
            held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            for action in orders[1]:
                if action.work is ActionKind.FORWARD:
                    received = torch.ones(64, 16).requires_grad_()
                    held[action.micro_batch] = received, middle(received)
                else:
                    received, sent = held.pop(action.micro_batch)
                    sent.backward(torch.ones_like(sent))
                del received
                sent = None
    rank = rank_trace(split_stages(whole, layout)[1].trace, layout)
    index = StepIndex(rank, roofline_costs(rank, find_device("H100")), in_flight=in_flight(orders, 3)[1])
    predicted = run_choices(index, [Choice(view.everything) for view in index.views]).peak_bytes
    static = sum(s.bytes for s in rank.storages if s.born < 0)
    assert predicted - static == pytest.approx(meter.peak_bytes, rel=0.002)


def test_one_stage_is_the_trace_itself(llama: Trace):
    (stage,) = split_stages(llama, Layout(dp=4))
    assert stage == StageTrace(0, llama, tuple(range(6)), received_bytes=0)


def test_blocks_are_split_evenly_with_less_at_both_ends():
    assert even_counts(6, 4) == (1, 2, 2, 1)
    assert even_counts(5, 4) == (1, 2, 1, 1)
    assert even_counts(11, 4) == (3, 3, 3, 2)
    assert even_counts(126, 16) == (7, *[8] * 14, 7)


def test_a_split_can_be_given_and_interleaved_stages_are_cut_in_the_order_of_the_model(llama: Trace):
    stages = split_stages(llama, Layout(pp=2), counts=(2, 4))
    assert [stage.regions for stage in stages] == [(0, 1), (2, 3, 4, 5)]
    layout = Layout(pp=3, virtual_stages=2, schedule=PipelineSchedule.INTERLEAVED, micro_batches=3)
    assert [stage.regions for stage in split_stages(llama, layout)] == [(each,) for each in range(6)]


@pytest.mark.parametrize(
    ("stages", "counts", "message"),
    [
        *((2, counts, "does not cut 6 blocks into 2 stages") for counts in ((3, 4), (6, 0), (2, 2, 2))),
        (8, None, "8 stages, but LlamaForCausalLM has 6 blocks"),
    ],
)
def test_a_split_that_does_not_add_up_and_more_stages_than_blocks_are_refused(
    llama: Trace, stages: int, counts: tuple[int, ...] | None, message: str
):
    with pytest.raises(InvalidLayout, match=message):
        split_stages(llama, Layout(pp=stages), counts=counts)


def counts_by(step: Trace, rule: StageRule, *, stages: int, **sizes: int) -> tuple[int, ...]:
    facts = ModelFacts(name="x", architecture="A", **({"hidden": 64, "intermediate": 128, "vocabulary": 100} | sizes))
    layout = Layout(pp=stages, micro_batches=stages, cut=rule)
    return stage_counts(step, layout, facts, lambda: roofline_costs(step, find_device("H100")))


def repeated(step: Trace, blocks: int) -> Trace:
    """A step of so many blocks, as far as rules that count them look."""
    return msgspec.structs.replace(step, regions=tuple(step.regions[0] for _ in range(blocks)))


def test_torchtitan_counts_embedding_and_head_as_a_block_each(llama: Trace):
    assert counts_by(llama, StageRule.TORCHTITAN, stages=4) == (1, 2, 2, 1)
    assert counts_by(repeated(llama, 32), StageRule.TORCHTITAN, stages=4) == (8, 9, 8, 7)
    assert counts_by(repeated(llama, 126), StageRule.TORCHTITAN, stages=16) == (7, *[8] * 14, 7)


def test_megatron_wants_as_many_blocks_in_every_stage(llama: Trace):
    assert counts_by(llama, StageRule.MEGATRON, stages=3) == (2, 2, 2)
    assert counts_by(repeated(llama, 126), StageRule.MEGATRON_BOTH, stages=16) == (7, *[8] * 14, 7)
    with pytest.raises(InvalidLayout, match=r"megatron cannot cut 6 blocks into 4 stages.*\n.*\n.*stages=1,2,2,1"):
        counts_by(llama, StageRule.MEGATRON, stages=4)
    with pytest.raises(InvalidLayout, match="counting embedding and head as one block each"):
        counts_by(llama, StageRule.MEGATRON_BOTH, stages=3)


def test_nanotron_weighs_the_head_by_its_words_and_no_stage_stays_empty(llama: Trace):
    eight = repeated(llama, 8)
    block = 4 * 64 * 64 + 3 * 64 * 128
    # The block that passes the stage's share stays in it.
    assert counts_by(eight, StageRule.NANOTRON, stages=2, vocabulary=1) == (5, 3)
    assert counts_by(eight, StageRule.NANOTRON, stages=2, vocabulary=4 * block // 64) == (7, 1)
    assert counts_by(eight, StageRule.NANOTRON, stages=4, vocabulary=40 * block // 64) == (5, 1, 1, 1)
    with pytest.raises(InvalidLayout, match="stages=nanotron is not supported"):
        stage_counts(
            eight,
            Layout(pp=2, cut=StageRule.NANOTRON),
            ModelFacts(name="x", architecture="A"),
            lambda: pytest.fail("asked"),
        )


def test_stages_cut_by_cost_have_the_fastest_slowest_stage_of_all_cuts(llama: Trace):
    costs = roofline_costs(llama, find_device("H100"))

    def slowest(counts: tuple[int, ...]) -> float:
        stages = split_stages(llama, Layout(pp=3), counts=counts)
        return max(sum(costs.seconds_of(op.cost_key) for op in stage.trace.ops) for stage in stages)

    found = counts_by(llama, StageRule.COST, stages=3)
    others = [(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)]
    assert slowest(found) == pytest.approx(min(map(slowest, others)))
