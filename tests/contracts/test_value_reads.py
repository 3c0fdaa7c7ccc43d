"""The comparison with torch's checkpointing tells equal gradients from others, and continues after a twin has failed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from benchmarks.value_reads.__main__ import KINDS, read_rows, write_row
from benchmarks.value_reads.branching import RunningScale, host_random
from benchmarks.value_reads.compare import METERED_STEPS, Row, compare
from benchmarks.value_reads.routing import routed
from benchmarks.value_reads.stack import BLOCKS, FunctionBlock, Stack, kind_of

pytestmark = pytest.mark.long

STEPS = 2 * METERED_STEPS + 2


def test_a_routed_block_has_equal_bits_and_less_memory_in_both_twins():
    row = compare(kind_of(routed), STEPS)
    assert (row.checkpoint_unequal, row.plan_unequal) == (0, 0)
    assert max(row.checkpoint_bytes, row.plan_bytes) < 0.7 * row.unmanaged_bytes
    assert row.recordings >= row.streams >= 1


def test_a_block_that_writes_to_its_state_is_unequal_under_checkpointing_in_every_step():
    row = compare(kind_of(RunningScale), STEPS)
    assert (row.checkpoint_unequal, row.plan_unequal) == (STEPS, 0)


def test_a_twin_that_fails_leaves_the_others_in_training():
    row = compare(kind_of(host_random), STEPS)
    assert "CheckpointError" in row.checkpoint_error
    assert row.checkpoint_bytes == row.checkpoint_ratio == row.peak_share == 0
    assert 0 < row.plan_bytes < row.unmanaged_bytes


def test_a_kind_is_named_in_words_and_builds_its_blocks():
    assert [kind_of(block).name for block in (routed, RunningScale)] == ["routed", "running scale"]
    stacks = [KINDS[name].make() for name in ("routed", "running scale")]
    assert all(isinstance(stack, Stack) and len(stack.blocks) == BLOCKS for stack in stacks)
    assert [type(stack.blocks[0]) for stack in stacks] == [FunctionBlock, RunningScale]


def test_every_batch_differs_from_that_of_the_next_step_and_is_drawn_the_same_again():
    for kind in KINDS.values():
        one, again, other = (kind.batch_of(step) for step in (1, 1, 2))
        assert all(torch.equal(one[name], again[name]) for name in one), kind.name
        assert any(not torch.equal(one[name], other[name]) for name in one), kind.name


def test_rows_are_read_as_they_were_written(tmp_path):
    row = Row(**{field.name: 0 for field in dataclasses.fields(Row)} | {"kind": "routed", "warnings": ("a", "b")})
    for _ in range(2):
        write_row(tmp_path / "rows.jsonl", row)
    assert list(read_rows(tmp_path / "rows.jsonl")) == [row, row]
    assert list(read_rows(tmp_path / "none.jsonl")) == []
