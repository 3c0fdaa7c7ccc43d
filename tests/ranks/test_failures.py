"""A rank that raises, runs out of memory or is killed ends the job in time, with the cause named by every rank that is left.

One run of eight steps under torchrun's own agent: seven attempts end in a misfortune each, the last one finishes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launching import launch
from plimsoll.distributed import named_failures
from plimsoll.distributed.bulletin import Cause, What, root
from plimsoll.errors import InvalidOption
from ranks.failing import MISFORTUNES


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failing")


@pytest.fixture(scope="module")
def finished(directory: Path) -> Iterator[list[dict[str, Any]]]:
    # Else torch 2.13 keeps one store over all attempts, with the addresses of ranks that are gone (pytorch issue 135712).
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        yield launch(2, "ranks.failing:attempt", str(directory), max_restarts=len(MISFORTUNES) - 1)


def _said(directory: Path, misfortune: str, rank: int, kind: str = "said") -> dict[str, Any]:
    said: dict[str, Any] = json.loads((directory / f"{MISFORTUNES.index(misfortune)}-{rank}-{kind}.json").read_text())
    return said


def _recorded(finished: list[dict[str, Any]], misfortune: str, rank: int) -> str:
    """What torchrun was told."""
    told: str = finished[0]["recorded"][f"{MISFORTUNES.index(misfortune)}-{rank}"]
    return told


def test_a_run_that_is_restarted_again_and_again_gives_the_bits_of_one_that_never_failed(
    finished: list[dict[str, Any]],
):
    for rank in finished:
        assert rank["attempt"] == len(MISFORTUNES) - 1
        assert rank["begin"] == 4
        assert rank["equal"]
        assert len(rank["losses"]) == 4


def test_a_checkpoint_whose_writer_was_killed_is_never_seen_and_leaves_nothing(finished: list[dict[str, Any]]):
    assert finished[0]["files"] == ["latest", "step-00000004", "step-00000008"]


@pytest.mark.parametrize("misfortune", ["killed", "killed while asleep", "killed while stuck"])
def test_a_rank_that_is_killed_is_named_by_the_other(finished: list[dict[str, Any]], misfortune: str):
    assert _recorded(finished, misfortune, 0).startswith("RankFailed: Rank 1 died (no word since step ")
    assert f"{MISFORTUNES.index(misfortune)}-1" not in finished[0]["recorded"]


def test_a_rank_in_a_call_that_never_returns_is_ended(finished: list[dict[str, Any]]):
    assert "in a call that did not return" in _recorded(finished, "killed while stuck", 0)


def test_the_rank_that_held_the_store_is_named_when_it_is_killed_while_saving(finished: list[dict[str, Any]]):
    assert _recorded(finished, "killed while saving", 1).startswith("RankFailed: Rank 0 died")


def test_a_rank_out_of_memory_is_named_with_step_and_place(finished: list[dict[str, Any]], directory: Path):
    own, other = (_said(directory, "out of memory", rank) for rank in (1, 0))
    assert own["kind"] == "OutOfMemoryError"
    assert own["notes"] == ["plimsoll: in step 6, in backward of layers.0"]
    assert other["kind"] == "RankFailed"
    assert other["text"].startswith(
        "Rank 1 ran out of memory in step 6, in backward of layers.0: OutOfMemoryError: CUDA out"
    )
    assert other["from"] == "RuntimeError"
    assert "smaller budget" in other["text"]


def test_an_error_without_a_type_of_its_own_is_told_from_its_echo(finished: list[dict[str, Any]], directory: Path):
    own, other = (_said(directory, "host out of memory", rank) for rank in (1, 0))
    assert own["kind"] == "RuntimeError"
    assert own["notes"] == ["plimsoll: in step 6, in backward of layers.0"]
    assert other["text"].startswith("Rank 1 failed in step 6, in backward of layers.0: RuntimeError: ")
    assert str(4 * 2**30) in other["text"]


def test_an_error_in_forward_is_named_with_its_module(finished: list[dict[str, Any]], directory: Path):
    assert _said(directory, "wrong value", 0)["notes"] == ["plimsoll: in step 4, in forward of layers.1.down"]
    assert "Rank 0 failed in step 4, in forward of layers.1.down: ValueError: no such head." in _recorded(
        finished, "wrong value", 1
    )


def test_weights_and_optimizer_are_as_before_the_step_that_failed(finished: list[dict[str, Any]], directory: Path):
    met = sorted(directory.glob("*-met.json"))
    assert len(met) >= 5
    assert all(json.loads(file.read_text())["is_unchanged"] for file in met)


def test_the_plan_is_taken_off_when_the_loop_ends_in_an_error(finished: list[dict[str, Any]], directory: Path):
    said = sorted(directory.glob("*-said.json"))
    assert len(said) >= 6
    assert not any(json.loads(file.read_text())["is_managed"] for file in said)


def test_hooks_and_signals_are_as_before_when_the_loop_ends_well(finished: list[dict[str, Any]]):
    assert all(rank["signal"] and rank["hooks"] == 0 for rank in finished)


def test_a_process_on_its_own_learns_step_and_place():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    removed = []

    class Handle:
        def remove(self) -> None:
            removed.append(True)

    def train() -> None:
        with named_failures(model, optimizer, first_step=7, handle=Handle()):
            for width in (4, 4, 5):
                model(torch.ones(2, width)).sum().backward()
                optimizer.step()

    with pytest.raises(RuntimeError) as raised:
        train()
    assert raised.value.__notes__ == ["plimsoll: in step 9, in forward of 0.0"]
    assert removed == [True]
    assert not any(module._forward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_post_hooks


def test_an_error_in_the_optimizers_step_says_so():
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError) as raised, named_failures(model, optimizer):
        optimizer.step()
    assert raised.value.__notes__ == ["plimsoll: in step 0, in the optimizer's step"]


def test_copies_and_pickles_of_the_model_carry_no_hooks_that_do_anything():
    import copy
    import pickle

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with named_failures(model, optimizer) as here:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(torch.ones(1, 4)).sum().backward()
        assert here._backward_of == ""
        model(torch.ones(1, 4)).sum().backward()
        assert here._backward_of == "0"


def test_what_is_certain_is_named_before_what_may_be_an_echo():
    echo = Cause(rank=0, what=What.FAILED, step=3, text="connection closed", is_certain=False)
    own = Cause(rank=2, what=What.OUT_OF_MEMORY, step=3, where="in forward of x", text="needed 2 GiB", is_certain=True)
    assert root([echo, own]) is own
    assert root([echo]) is echo
    assert root([]) is None
    assert str(own) == "rank 2 ran out of memory in step 3, in forward of x: needed 2 GiB"


def test_seconds_that_mean_nothing_are_refused():
    model = nn.Linear(1, 1)
    with pytest.raises(InvalidOption), named_failures(model, torch.optim.SGD(model.parameters()), timeout_seconds=0):
        pass
