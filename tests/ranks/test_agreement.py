"""Under torchrun every rank gets the identical plan, or none does; and all learn why, in time."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import plimsoll
from launching import Told, on_ranks
from plimsoll.artifacts.store import from_json
from plimsoll.errors import InvalidOption, RankMissing
from plimsoll.estimator.targets.target import Target
from plimsoll.session.rendezvous.conversation import differing
from plimsoll.ui.cli import ranks as crews
from plimsoll.ui.cli.ranks import Crew
from plimsoll.ui.cli.work import Loaded
from ranks import agreeing

TESTS = Path(__file__).parents[1]

told = on_ranks(2, "ranks.agreeing:on_two_ranks")
told_by_four = on_ranks(4, "ranks.agreeing:on_four_ranks")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port


def of_all(told: Told, scenario: str, key: str) -> list[Any]:
    return [rank[scenario][key] for rank in told]


@pytest.mark.parametrize("what", ["uneven", "verified", "compared"])
def test_all_ranks_get_one_and_the_same(told: Told, what: str):
    one, other = (rank[what] for rank in told)
    assert one == other


@pytest.fixture
def plan(told: Told) -> Any:
    """Made where rank 1 has less memory."""
    return from_json(told[0]["uneven"])


def test_the_rank_with_the_least_room_decides(plan: Any):
    budgets = plan.budget_bytes_of_ranks
    assert budgets["1"] < budgets["0"]
    assert plan.predicted_peak_bytes <= plan.budget_bytes == budgets["1"]
    assert "planned by rank 1, which has the least room of 2 ranks" in plan.notes
    assert plan.notes[-1].startswith("run once on 2 ranks: the measured peak of the tightest, rank 1,")


def test_a_plan_applies_on_all_ranks_with_equal_gradients_and_comes_off_again(told: Told):
    assert [rank["applied"] for rank in told] == [{"is_managed": True, "is_equal": True, "is_left": False}] * 2


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("model", "model: rank 0 Sequential-"),
        ("batch", "rank 0 f32[64x16]; training; loss: mean_square; rank 1 f32[32x16]; training"),
        ("strategy", "strategy: rank 0 'none'; rank 1 'full'"),
        ("torch", "rank 1 1.0"),
        ("plimsoll", "plimsoll: rank 0 1.0; rank 1 2.0"),
    ],
)
def test_what_differs_between_ranks_is_shown_on_all_of_them_before_any_step(told: Told, what: str, shown: str):
    outcomes = [rank["facts"][what] for rank in told]
    assert [outcome["kind"] for outcome in outcomes] == ["RanksDiffer"] * 2
    assert all(shown in outcome["found"] for outcome in outcomes)
    assert all(outcome["seconds"] < 5 for outcome in outcomes)


def test_batches_of_different_shapes_are_to_be_padded(told: Told):
    assert "pad the batches" in told[1]["facts"]["batch"]["next"]
    assert "pad" not in told[1]["facts"]["strategy"]["next"]


def test_different_plans_are_applied_on_no_rank(told: Told):
    assert of_all(told, "plans", "kind") == ["RanksDiffer"] * 2
    assert of_all(told, "plans", "is_left") == [False, False]
    assert "rank 0 Sequential none" in told[1]["plans"]["found"]


def test_a_budget_below_the_floor_of_one_rank_stops_all_with_that_rank_named(told: Told):
    assert of_all(told, "below_floor", "kind") == ["RankFailed", "BudgetBelowFloor"]
    assert told[0]["below_floor"]["ranks"] == (1,)
    assert told[1]["below_floor"]["found"] in told[0]["below_floor"]["found"]
    assert told[1]["below_floor"]["next"] == told[0]["below_floor"]["next"]


def test_a_rank_that_does_not_come_is_missed_in_time_and_learns_of_it(told: Told):
    assert of_all(told, "missing", "kind") == ["RankMissing"] * 2
    assert of_all(told, "missing", "ranks") == [(1,)] * 2
    assert all(seconds < 5 for seconds in of_all(told, "missing", "seconds"))
    assert of_all(told, "missing", "is_fine_after") == ["RanksDiffer"] * 2


def test_a_rank_may_plan_for_itself_without_a_word_to_the_others(told: Told):
    by_itself, for_all = zip(*(rank["alone"] for rank in told), strict=True)
    assert by_itself == (0, 0)
    assert all(count > 0 for count in for_all)


def test_a_loss_that_fails_on_one_rank_leaves_the_process_group_whole(told: Told):
    assert of_all(told, "loss", "kind") == ["RankFailed", "InvalidLoss"]
    assert "no target for this batch" in told[0]["loss"]["found"]
    assert of_all(told, "loss", "sum") == [2.0, 2.0]
    assert of_all(told, "loss", "gradients") == [18, 18]


def test_the_receipt_knows_every_budget(told: Told, plan: Any):
    receipt: Any = from_json(told[0]["verified"])
    assert receipt.verdict == "VERIFIED"
    assert receipt.budget_bytes in plan.budget_bytes_of_ranks.values()
    assert "verified on 2 ranks" in receipt.notes[-1]


def test_what_a_model_does_by_itself_is_not_verified_on_several_ranks(told: Told):
    assert of_all(told, "own", "kind") == ["InvalidOption"] * 2


@pytest.mark.parametrize("call", ["fit", "advise", "explain", "probe", "diagnose"])
def test_work_of_one_process_is_refused_on_all_ranks_at_once_where_ranks_train_the_model_together(
    told: Told, call: str
):
    outcomes = [rank["one process"][call] for rank in told]
    assert [outcome["kind"] for outcome in outcomes] == ["InvalidModel"] * 2
    assert [outcome["exchanges"] for outcome in outcomes] == [0, 0]
    assert all(
        f"trained by 2 ranks together, but plimsoll.{call} runs in one process" in outcome["found"]
        for outcome in outcomes
    )


def test_ranks_that_leave_out_one_with_a_shard_of_the_model_are_refused_at_once(told: Told):
    assert of_all(told, "left out", "kind") == ["InvalidOption"] * 2
    assert "ranks=[0] leaves out 1, and this model is split over 0, 1" in told[0]["left out"]["found"]


def test_a_rank_may_explain_a_model_that_is_its_own(told: Told):
    assert [rank["explained alone"] for rank in told] == [True, True]


def test_the_comparison_has_a_row_of_equal_bits_for_every_strategy(told: Told):
    table: Any = from_json(told[0]["compared"])
    assert [(row.strategy, row.is_bit_equal) for row in table.rows] == [("full", True), ("auto", True)]


def test_attach_runs_the_identical_plan_on_all_ranks_where_it_may_repeat_collectives(told: Told):
    one, other = of_all(told, "attached", "plans")
    assert one == other
    assert of_all(told, "attached", "is_equal") == [True, True]


def test_one_plan_for_all_ranks_exchanges_something_only_where_something_happens(told: Told):
    first, second, *steady = told[0]["attached"]["exchanges"]
    grown, settled = steady[2], steady[3]
    assert min(first, second, grown, settled) > 0
    assert [steady[0], steady[1], steady[4]] == [0, 0, 0]
    assert told[0]["attached"]["exchanges"][-1] == 0
    # The step before took rank 1 alone over its budget, so it asks the other rank, which does not answer.
    assert told[1]["attached"]["exchanges"][-1] <= 1


def test_a_batch_that_is_larger_on_all_ranks_is_planned_anew(told: Told):
    plans = told[0]["attached"]["plans"]
    assert "f32[64x16]" in json.loads(plans[3])["signature"]
    assert "f32[96x16]" in json.loads(plans[5])["signature"]


def test_a_batch_that_is_larger_on_one_rank_only_keeps_the_plan_and_warns(told: Told):
    plans = told[1]["attached"]["plans"]
    assert plans[6] == plans[7] == plans[8]
    assert [len(rank["attached"]["warnings"]) for rank in told] == [0, 1]
    assert [rank["attached"]["exchanges"][7] for rank in told] == [0, 1]


def test_optimizer_state_that_comes_up_later_is_counted_on_all_ranks(told: Told):
    one, other = of_all(told, "accumulated", "plans")
    assert one == other
    assert one[1] == one[2] != one[3]
    assert all(counted > 0 for counted in of_all(told, "accumulated", "counted_bytes"))


def test_a_budget_that_attach_cannot_meet_on_one_rank_leaves_all_models_unmanaged(told: Told):
    assert of_all(told, "attach_floor", "kind") == ["RankFailed", "BudgetBelowFloor"]
    assert of_all(told, "attach_floor", "is_left") == [False, False]
    assert of_all(told, "attach_floor", "plan") == [True, True]


def test_a_rank_that_attaches_alone_misses_the_others_in_time_and_leaves_the_model_alone(told: Told):
    assert told[0]["attached alone"]["kind"] == "RankMissing"
    assert told[0]["attached alone"]["ranks"] == (1,)
    assert told[0]["attached alone"]["seconds"] < 5
    assert of_all(told, "attached alone", "is_left") == [False, False]
    assert of_all(told, "attached alone", "gradients") == [18, 18]


def test_of_several_ranks_the_first_prints_the_plan_and_writes_the_file(told: Told):
    first, second = (rank["commands"]["plan"] for rank in told)
    assert (first["code"], second["code"]) == (0, 0)
    assert "saved to" in first["stdout"]
    assert second["stdout"] == ""
    assert (first["files"], second["files"]) == (["plan.json"], [])


def test_the_command_leaves_a_group_alone_that_it_has_not_made(told: Told):
    assert all(outcome["has_group"] for rank in told for outcome in rank["commands"].values())


@pytest.mark.long
def test_torchrun_starts_the_command_on_ranks_that_meet_by_themselves(tmp_path: Path):
    saved = tmp_path / "plan.json"
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "plimsoll"]
    asked = ["plan", "ranks.small_models:step", "--strategy", "full", "--output", str(saved)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "support")]),
    }
    done = subprocess.run(
        [*started, *asked], cwd=TESTS, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("saved to") == 1
    assert "planned by rank 0, which has the least room of 2 ranks" in plimsoll.load(saved).notes


@pytest.mark.parametrize("name", ["below floor", "does not load", "no such plan", "its own", "nothing sent"])
def test_an_error_is_printed_once_and_ends_every_rank(told: Told, name: str):
    outcomes = [rank["commands"][name] for rank in told]
    assert {outcome["code"] for outcome in outcomes} == ({2, 3} if name == "below floor" else {2})
    said = [outcome["stdout"] + outcome["stderr"] for outcome in outcomes]
    assert sum("next" in text for text in said) == 1
    assert all("Traceback" not in text for text in said)


@pytest.mark.parametrize("name", ["fit", "show"])
def test_a_command_of_one_process_says_so_once_under_torchrun_and_writes_nothing(told: Told, name: str):
    first, second = (rank["commands"][name] for rank in told)
    assert (first["code"], second["code"]) == (2, 0)
    assert f"plimsoll {name} runs in one process, but torchrun started 2" in first["stderr"]
    assert first["stdout"] + second["stdout"] + second["stderr"] == ""
    assert first["files"] == ["plan.json"]


@pytest.mark.long
def test_who_takes_part_is_read_from_the_model(told_by_four: Told):
    found = [rank["participants"] for rank in told_by_four]
    for name in ("plain", "hybrid", "a row and a column"):
        assert [one[name] for one in found] == [(0, 1, 2, 3)] * 4
    for name in ("replicated in pairs", "one row"):
        assert [one[name] for one in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]


@pytest.mark.long
def test_two_groups_of_ranks_plan_different_models_at_the_same_time(told_by_four: Told):
    first, second, third, fourth = (rank["pairs"] for rank in told_by_four)
    assert first == second
    assert third == fourth
    assert first != third


@pytest.mark.long
def test_ranks_that_wait_in_a_collective_for_one_that_failed_are_released_and_name_it(told_by_four: Told):
    kinds = of_all(told_by_four, "forward", "kind")
    assert kinds == ["RankFailed", "RankFailed", "InvalidBatch", "RankFailed"]
    assert {told_by_four[rank]["forward"]["ranks"] for rank in (0, 1, 3)} == {(2,)}
    assert "restart the job" in told_by_four[0]["forward"]["next"]
    assert all(seconds < 30 for seconds in of_all(told_by_four, "forward", "seconds"))


def test_a_rank_that_dies_in_the_middle_of_a_step_is_named_and_not_the_batch():
    here, there = multiprocessing.Pipe()
    context, port = multiprocessing.get_context("forkserver"), free_port()
    ranks = [context.Process(target=agreeing.lose_a_rank, args=(rank, port, there), daemon=True) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    assert here.poll(60)
    outcome = here.recv()
    assert (outcome["kind"], outcome["ranks"]) == ("RankMissing", (1,))
    assert "Rank 1 was lost in 'plan'" in outcome["found"]
    for rank in ranks:
        rank.join()


def test_a_call_that_a_trainer_redirects_is_planned_as_it_runs(told: Told):
    assert of_all(told, "redirected", "is_equal") == of_all(told, "redirected", "is_planned") == [True, True]


def test_a_batch_that_forward_refuses_is_told_with_the_place_in_the_model(told: Told):
    assert of_all(told, "redirected", "kind") == ["InvalidBatch"] * 2
    assert "KeyError: 'predict'" in told[0]["redirected"]["found"]
    assert "failed in forward (agreeing.py:" in told[0]["redirected"]["why"]


def test_the_table_of_differences_groups_ranks_that_agree_and_leaves_out_what_is_the_same():
    facts = {"torch": ["2.9", "2.9", "2.9"], "model": ["a", "b", "a"]}
    error = differing(facts, (0, 4, 5))
    assert error.found.splitlines()[1:] == ["    model: ranks 0, 5 a; rank 4 b"]
    assert error.ranks == (4,)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "60", True])
def test_a_time_to_wait_that_is_none_is_refused(seconds: Any):
    with pytest.raises(InvalidOption, match="timeout_seconds"):
        plimsoll.plan(torch.nn.Linear(2, 1), torch.ones(1, 2), loss=torch.sum, strategy="none", timeout_seconds=seconds)


def test_ranks_of_a_process_on_its_own_are_refused():
    with pytest.raises(InvalidOption, match="not initialised"):
        plimsoll.plan(torch.nn.Linear(2, 1), torch.ones(1, 2), loss=torch.sum, strategy="none", ranks=(0, 1))


def test_every_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [Crew(is_several=True).device(name) for name in ("cuda", "cuda:0", "cpu")] == ["cuda:3", "cuda:0", "cpu"]
    assert Crew(is_several=False).device("cuda") == "cuda"


def test_a_rank_that_never_loads_the_target_is_missed_in_time(monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    with pytest.raises(RankMissing, match=r"^Some of 2 ranks did not load the target within 0\.5 s"):
        _load_as_one_of_two(port, monkeypatch)
    assert not torch.distributed.is_initialized()


def test_a_rank_that_never_loads_the_target_is_named_where_torchrun_keeps_a_store(monkeypatch: pytest.MonkeyPatch):
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RankMissing, match=r"^Rank 1 of 2 did not load the target within 0\.5 s") as caught:
        _load_as_one_of_two(store.port, monkeypatch)
    assert caught.value.ranks == (1,)
    assert not torch.distributed.is_initialized()


def test_what_keeps_a_rank_from_loading_is_not_lost_when_another_is_missing(monkeypatch: pytest.MonkeyPatch):
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    own = InvalidOption("no such batch", why="w", next="n")
    with pytest.raises(InvalidOption, match="no such batch"):
        _load_as_one_of_two(store.port, monkeypatch, own)


def _load_as_one_of_two(port: int, monkeypatch: pytest.MonkeyPatch, failure: InvalidOption | None = None) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(crews, "_LOADING_SECONDS", 0.5)

    def load() -> Loaded:
        if failure is not None:
            raise failure
        return Loaded(target=Target(model=torch.nn.Linear(2, 1), batch=torch.ones(1, 2)), optimizer=None)

    Crew(is_several=True).load(load)


@pytest.mark.long
def test_a_missing_rank_is_told_of_once_and_at_once(told_by_four: Told):
    assert of_all(told_by_four, "parting", "speaks") == [True, False, False, False]
    assert all(seconds < 5 for seconds in of_all(told_by_four, "parting", "seconds"))
