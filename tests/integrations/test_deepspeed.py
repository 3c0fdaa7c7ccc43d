"""DeepSpeed's ZeRO under a budget, against the real package: on one rank and on two, over gloo."""

from __future__ import annotations

import importlib.util
import os
from unittest import mock

import pytest

from launching import launch

pytestmark = pytest.mark.long

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is no test extra: it compiles when it is installed", allow_module_level=True)

CASES = [
    {"stage": 0, "precision": "bf16"},
    {"stage": 1},
    {"stage": 1, "precision": "bf16", "accumulation": 2},
    {"stage": 2},
    {"stage": 2, "precision": "bf16", "accumulation": 2},
    {"stage": 3},
    {"stage": 3, "precision": "bf16", "accumulation": 2},
]


@pytest.fixture(scope="module", params=[1, 2])
def told(request: pytest.FixtureRequest):
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        return launch(request.param, "ranks.zero_scenarios:train_in_stages", CASES)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_step_of_the_engine_keeps_to_its_budget_and_to_every_bit(told, case):
    for rank in told:
        assert all(rank["trained"][case].values()), rank


def test_partitions_and_optimizer_state_are_foretold(told):
    for rank in told:
        assert all(rank["parts"].values()), rank


def test_what_zero_cannot_be_planned_in_is_refused(told):
    for rank in told:
        assert "DeepSpeedEngine" in rank["refused"]["part of a model"]
        assert "plimsoll.attach" in rank["refused"]["no leaf modules"]
        assert "allow= names offload" in rank["refused"]["forms"]
        assert rank["refused"]["out of range"] == "InvalidBatch"
        assert "model.layers.0 is compiled" in rank["refused"]["compiled"]
        assert "handle.step cannot run its steps again" in rank["refused"]["step"]


def test_stage_3_gathers_whole_blocks_while_a_budget_is_at_work_and_layers_before_and_after(told):
    for rank in told:
        assert all(rank["gathered"].values()), rank


def test_a_trainer_that_makes_the_engine_keeps_to_its_budget_and_to_every_bit(tmp_path):
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        for told in launch(2, "ranks.zero_scenarios:train_with_trainer", str(tmp_path)):
            assert all(all(each.values()) for each in told), told


def test_checkpointing_of_its_own_is_taken_over_and_put_back():
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        assert all(all(told.values()) for told in launch(1, "ranks.zero_scenarios:switch_off_own"))
