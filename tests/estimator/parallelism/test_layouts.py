"""Layouts written as text: what is read, and what is refused with which advice."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.artifacts.job import Layout, ModelFacts, PipelineSchedule, StageRule
from plimsoll.errors import InvalidLayout
from plimsoll.estimator.parallelism.layouts import check_layout, layout_notes, read_layout

LLAMA = ModelFacts(
    name="llama-3-8b", architecture="LlamaForCausalLM", sequence=8192, layers=32, heads=32, kv_heads=8,
    intermediate=14336, vocabulary=128256, parameters=8_030_261_248,
)  # fmt: skip


def test_every_part_of_a_layout_is_read_in_any_order_and_with_spaces():
    text = " pp=16 ,tp=8, sp,cp=1,ep=4,dp=8,zero=1 , virtual=2,schedule=interleaved,micro-batches=64"
    assert read_layout(text) == Layout(
        dp=8, tp=8, pp=16, ep=4, zero=1, sequence_parallel=True, schedule=PipelineSchedule.INTERLEAVED,
        virtual_stages=2, micro_batches=64,
    )  # fmt: skip


def test_nothing_is_one_rank():
    assert read_layout("") == Layout()


@given(
    st.builds(
        Layout, dp=st.integers(2, 8), tp=st.integers(1, 8), zero=st.integers(0, 3), micro_batches=st.integers(1, 9)
    )
)
def test_what_a_layout_prints_is_read_back(layout: Layout):
    assert read_layout(str(layout)) == layout == read_layout(layout)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dq=2", "contains 'dq', which is not known.*\n.*\n.*try dp"),
        ("fsdp=2", "contains 'fsdp', which is not known.*\n.*\n.*try dp"),
        ("microbatches=2", "try micro-batches"),
        ("banana=2", "The layout contains 'banana'"),
        ("dp=2,,tp=2", "empty entry"),
        ("dp=0", "dp=0 is too small"),
        ("tp=-1", "tp=-1 is not a valid degree"),
        ("tp=two", "tp=two is not a valid degree"),
        ("tp", "tp= is not a valid degree"),
        ("tp=2,tp=4", "tp occurs twice"),
        ("sp=no,tp=2", "sp=no is not valid"),
        ("sp", "needs tp=2 or more"),
        ("pp=2,schedule=1b1f", "The schedule '1b1f' is not known.*\n.*\n.*try 1f1b"),
        ("schedule=gpipe", "schedule=gpipe needs a pipeline"),
        ("schedule=1f1b", "schedule=1f1b needs a pipeline"),
        ("virtual=2", "virtual=2 need a pipeline"),
        ("pp=2,virtual=2", "virtual=2 cannot be combined with schedule=1f1b"),
        ("pp=2,schedule=interleaved", "needs several stages per rank"),
        ("pp=4,schedule=interleaved,virtual=2,micro-batches=10", "write micro-batches=8 or 12"),
        ("stages=cost", "stages= needs a pipeline"),
        ("pp=4,stages=9,8,8", "lists the blocks of 3 stages"),
        ("pp=4,stages=megatorn", "The rule for stages 'megatorn' is not known.*\n.*\n.*try megatron"),
        ("pp=4,stages=", "The rule for stages '' is not known"),
        ("pp=4,4", "pp=4,4 is not a valid degree"),
        ("zero=4,dp=2", "zero=4 is not a stage of ZeRO"),
        ("dp=4,cp=3,ep=5", "ep=5 does not divide the 12 data-parallel ranks.*\n.*\n.*ep=2 or 3 or 4 or 6 or 12"),
    ],
)
def test_layouts_that_mean_nothing_are_refused(text: str, message: str):
    with pytest.raises(InvalidLayout, match=message):
        read_layout(text)


def test_stages_are_given_by_a_rule_or_by_their_numbers_and_read_back():
    given = read_layout("pp=4, stages=9, 8,8,7 ,dp=2, schedule=gpipe")
    assert given.cut == (9, 8, 8, 7)
    assert given.dp == 2
    assert given.schedule is PipelineSchedule.GPIPE
    assert read_layout(str(given)) == given
    for rule in StageRule:
        named = read_layout(f"pp=4,stages={rule.value}")
        assert named.cut is rule
        assert read_layout(str(named)) == named


def test_sharding_over_one_rank_is_allowed_and_said_to_do_nothing():
    (note,) = layout_notes(read_layout("zero=2"))
    assert "does not shard anything" in note


def test_a_layout_made_by_hand_is_checked_as_well():
    with pytest.raises(InvalidLayout, match="needs tp=2 or more"):
        read_layout(Layout(sequence_parallel=True))


def test_sharded_parameters_in_a_pipeline_are_allowed_and_noted():
    (note,) = layout_notes(read_layout("dp=2,zero=3,pp=2,micro-batches=8"))
    assert "8 times a step" in note
    assert layout_notes(read_layout("dp=2,zero=3")) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp=64", "64 stages .pp=64., but llama-3-8b has 32 blocks.*\n.*\n.*pp=32"),
        ("pp=8,schedule=interleaved,virtual=8,micro-batches=8", "64 stages .pp=8 x virtual=8.*\n.*\n.*pp=4"),
        (
            "tp=3",
            "tp=3 does not divide the attention heads of llama-3-8b, 32.*\n.*\n.*use a divisor of 32: 2, 4, 8, 16, 32",
        ),
        ("dp=2,ep=2", "llama-3-8b does not have any"),
        ("cp=3", "cp=3 does not divide the sequence of llama-3-8b, 8192"),
        ("cp=512,tp=32,sp", "cp=512 x tp=32 .sp. does not divide the sequence"),
    ],
)
def test_layouts_that_the_model_rules_out_are_refused_with_the_degrees_that_would_do(text: str, message: str):
    with pytest.raises(InvalidLayout, match=message):
        check_layout(read_layout(text), LLAMA)


@pytest.mark.parametrize(
    ("text", "facts", "message"),
    [
        ("tp=8", {"heads": 96, "vocabulary": 50257}, ""),  # a vocabulary need not divide
        ("tp=32", {"heads": 32, "kv_heads": 8}, ""),  # key-value heads are split or replicated
        ("tp=4", {"heads": 24, "kv_heads": 6}, "6 key-value heads"),
        ("dp=8,ep=8", {"experts": 8}, ""),
        ("dp=6,ep=6", {"experts": 8}, "ep=6 does not divide the experts of x, 8"),
        ("tp=7,pp=99,cp=5,dp=3,ep=3", {}, ""),  # a size that is not known rules nothing out
    ],
)
def test_heads_and_experts_divide_or_are_replicated(text: str, facts: dict[str, int], message: str):
    model = ModelFacts(name="x", architecture="A", **facts)
    with pytest.raises(InvalidLayout, match=message) if message else contextlib.nullcontext():
        check_layout(read_layout(text), model)
