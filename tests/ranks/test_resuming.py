"""A run goes on from its last checkpoint bit for bit, under any plan; what cannot go on says so and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launching import launch
from plimsoll.distributed import latest_step, load_checkpoint, save_checkpoint
from plimsoll.errors import CheckpointMismatch, CheckpointUnusable, InvalidOption
from ranks.small_runs import build

REFUSALS = {
    "full disk": ("CheckpointUnusable", "rank 1: OSError"),
    "steps": ("RanksDiffer", "step is 0 on rank 0 and 1 on rank 1"),
    "no such step": ("CheckpointMismatch", "it holds steps 1"),
    "other model": ("CheckpointMismatch", "the checkpoint has torch.float32[256, 32]"),
    "residuals": ("CheckpointMismatch", "drop_residuals=True"),
    "newer": ("CheckpointUnusable", "schema 99"),
}
"""What is refused on both ranks alike."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def told(directory: Path) -> list[dict[str, Any]]:
    return launch(2, "ranks.resuming:everything", str(directory))


@pytest.fixture(scope="module")
def told_by_four(directory: Path, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return launch(4, "ranks.resuming:on_more_ranks", str(directory))


@pytest.mark.parametrize("plan", ["same plan", "another plan", "no plan"])
def test_a_run_goes_on_bit_for_bit_under_any_plan(told: list[dict[str, Any]], plan: str):
    for rank, found in enumerate(told):
        resumed = found["resumed"]
        assert resumed["latest"] == 4
        assert resumed["drops"]
        assert resumed[plan] == {
            "random": True,
            "held": [rank + 1.0] * 4,
            "extra": {"position": 100 + rank},
            "plan": True,
            "equal": True,
        }


def test_the_losses_that_are_compared_move(told: list[dict[str, Any]]):
    losses = [told[rank]["resumed"]["first"] + told[rank]["resumed"]["losses"] for rank in (0, 1)]
    assert len({*losses[0], *losses[1]}) == 16
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp", "tp"])
def test_a_plan_changes_no_name_and_no_value(told: list[dict[str, Any]], layout: str):
    expected = {"equal": True, "copied": True, "prefixed": [], "loaded": True}
    assert [rank["names"][layout] for rank in told] == [expected] * 2


def test_a_run_under_ddp_goes_on_under_fsdp(told: list[dict[str, Any]]):
    assert [rank["from_ddp"] for rank in told] == [True, True]


def test_residuals_of_gradient_compression_go_on_with_the_run(told: list[dict[str, Any]]):
    assert [rank["compressed"] for rank in told] == [{"kept": True, "dropped": False}] * 2


def test_what_differs_between_ranks_comes_back_to_the_rank_that_had_it(told: list[dict[str, Any]]):
    assert all(rank["own"]["equal"] for rank in told)
    assert told[0]["own"]["mean"] != told[1]["own"]["mean"]


@pytest.mark.parametrize("what", REFUSALS)
def test_what_is_refused_is_refused_on_all_ranks_and_changes_nothing(told: list[dict[str, Any]], what: str):
    kind, words = REFUSALS[what]
    for rank in told:
        refusal = rank["refused"][what]
        assert refusal["kind"] == kind
        assert words in refusal["text"]
        assert refusal["unchanged"]


@pytest.mark.parametrize(("what", "kind"), [("flipped", "CheckpointUnusable"), ("cut short", "CheckpointUnusable")])
def test_a_damaged_file_is_named_before_anything_is_loaded(told: list[dict[str, Any]], what: str, kind: str):
    refusals = [rank["refused"][what] for rank in told]
    assert {refusal["kind"] for refusal in refusals} == {kind, "RankFailed"}  # one rank read it, the other heard of it
    assert any("__1_0.distcp" in refusal["text"] for refusal in refusals)
    assert all(refusal["unchanged"] for refusal in refusals)


@pytest.mark.parametrize("what", ["extra", "while loading"])
def test_one_rank_that_fails_stops_all(told: list[dict[str, Any]], what: str):
    first, second = (rank["refused"][what] for rank in told)
    assert first["kind"] == "RankFailed"
    assert "Rank 1 failed" in first["text"]
    assert second["kind"] != "RankFailed"
    assert first["unchanged"]
    assert second["unchanged"]


def test_old_checkpoints_are_removed_and_nothing_is_left_behind(told: list[dict[str, Any]]):
    assert told[0]["refused"]["kept"] == ["latest", "step-00000002", "step-00000003"]


def test_more_ranks_take_up_model_and_optimizer(
    told: list[dict[str, Any]], told_by_four: list[dict[str, Any]], directory: Path
):
    alone = build("plain", seed=7)
    checkpoint = load_checkpoint(
        directory / "run", model=alone.model, optimizer=alone.optimizer, reseed_with=0, drop_residuals=True
    )
    whole = {name: value.double().sum().item() for name, value in alone.model.state_dict().items()}
    moments = {i: v["exp_avg_sq"].double().sum().item() for i, v in alone.optimizer.state_dict()["state"].items()}
    for rank in told_by_four:
        assert rank["whole"] == pytest.approx(whole, rel=1e-12)
        assert rank["moments"] == pytest.approx(moments, rel=1e-12)
        assert rank["extras"] == ({"position": 100}, {"position": 101})
        assert rank["draws"] == 4
    assert checkpoint.step == 4
    with pytest.raises(CheckpointMismatch) as refused:
        checkpoint.extra  # noqa: B018 - reading it is the test
    assert "saved by 2 ranks; this run has 1" in refused.value.found


def test_another_number_of_ranks_needs_a_word_about_what_belongs_to_one(told_by_four: list[dict[str, Any]]):
    for rank in told_by_four:
        assert "saved by 2 ranks; this run has 4" in rank["told"]["text"]
        assert "reseed_with=0" in rank["told"]["text"]
        assert "drop_residuals=True" in rank["kept"]["text"]
        assert rank["told"]["unchanged"]
        assert rank["kept"]["unchanged"]


def test_values_that_only_one_rank_had_cannot_go_to_another_number_of_ranks(
    told: list[dict[str, Any]], directory: Path
):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    with pytest.raises(CheckpointMismatch) as refused:
        load_checkpoint(directory / "own", model=model, reseed_with=0)
    assert "running_mean" in refused.value.why


def test_a_process_on_its_own_saves_and_goes_on_before_its_first_step(tmp_path: Path):
    run = build("plain")
    save_checkpoint(tmp_path, step=0, model=run.model, optimizer=run.optimizer)
    assert not run.optimizer.state
    expected = run.train(range(2)), run.bits()
    again = build("plain", seed=2)
    again.train(range(1))
    load_checkpoint(tmp_path, model=again.model, optimizer=again.optimizer)
    assert (again.train(range(2)), again.bits()) == expected


def test_latest_can_be_set_back_by_hand_and_the_step_be_saved_again(tmp_path: Path):
    run = build("plain")
    for step in (1, 2):
        save_checkpoint(tmp_path, step=step, model=run.model)
    (tmp_path / "latest").write_text("step-00000001\n")
    assert latest_step(tmp_path) == 1
    place = save_checkpoint(tmp_path, step=2, model=run.model)
    assert place.name == "step-00000002.1"
    assert latest_step(tmp_path) == 2
    (tmp_path / "latest").write_text("nothing of the kind")
    assert load_checkpoint(tmp_path, model=run.model).path == place


def test_an_optimizer_of_other_groups_or_of_another_model_is_refused(tmp_path: Path):
    run = build("plain")
    run.train(range(1))
    save_checkpoint(tmp_path, step=1, model=run.model, optimizer=run.optimizer)
    one_group = torch.optim.AdamW(run.model.parameters())
    before = one_group.state_dict()
    with pytest.raises(CheckpointMismatch) as refused:
        load_checkpoint(tmp_path, model=run.model, optimizer=one_group)
    assert "in one group now" in refused.value.found
    assert one_group.state_dict() == before
    with pytest.raises(InvalidOption) as stranger:
        save_checkpoint(tmp_path, step=2, model=build("plain").model, optimizer=run.optimizer)
    assert "not parameters of the model" in stranger.value.found


@pytest.mark.parametrize("bad", [{"step": -1}, {"step": 1.5}, {"step": 1, "keep": 0}])
def test_numbers_that_mean_nothing_are_refused(tmp_path: Path, bad: dict[str, Any]):
    with pytest.raises(InvalidOption):
        save_checkpoint(tmp_path, model=torch.nn.Linear(2, 2), **bad)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointUnusable) as refused:
        save_checkpoint(tmp_path / "file" / "run", step=1, model=torch.nn.Linear(2, 2))
    assert "cannot be written" in refused.value.found
