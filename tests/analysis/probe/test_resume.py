"""An interrupted probe goes on where it was and gives what an uninterrupted one gives; nothing of the user's is lost."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import plimsoll
from analysis.probe.sample_job import WIDTH, make_batches, make_model, make_plan, read_log, stop_at
from plimsoll.artifacts.tile import Tile
from plimsoll.artifacts.verdict import Verdict
from plimsoll.errors import InvalidOption, InvalidProbe, PlanMismatch, ProbeRunMismatch, ProbeRunUnusable
from steps import mean_square
from unchanged import unchanged

STEPS, CHUNK = 18, 6
HERE = Path(__file__).parent


def probe(run: Path | None, **changes: object) -> Verdict:
    """The probe of these tests, or one that differs from it in what is named."""
    if "model" not in changes:
        changes["model"] = make_model()
    given = {"batches": make_batches(), "plan": make_plan(), "run": run, "early": False}
    return plimsoll.probe(**(given | {"steps": STEPS, "chunk_steps": CHUNK, "held_out": 4} | changes))


def without_clock(verdict: Verdict) -> Verdict:
    def timeless(arm: object) -> object:
        return msgspec.structs.replace(
            arm, seconds_to_target=None, measured_step_seconds=None, items_per_second=None, measured_peak_bytes=None
        )

    return msgspec.structs.replace(verdict, baseline=timeless(verdict.baseline), plan=timeless(verdict.plan))


def interrupted(run: Path) -> None:
    """A probe whose plan's arm was stopped in its last chunk."""
    with pytest.raises(KeyboardInterrupt):
        probe(run, progress=stop_at(15))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Verdict]:
    """A run that nobody interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, probe(run)


@pytest.mark.long
@pytest.mark.parametrize(("step", "turn"), [(8, 2), (15, 1)])
def test_an_interrupted_probe_gives_the_bits_of_an_uninterrupted_one(
    step: int, turn: int, whole: tuple[Path, Verdict], tmp_path: Path
):
    with pytest.raises(KeyboardInterrupt):
        probe(tmp_path, progress=stop_at(step, turn=turn))
    kept = read_log(tmp_path, "plan")
    assert 0 < sum("loss" in line for line in kept) < STEPS
    resumed = probe(tmp_path)
    assert without_clock(resumed) == without_clock(whole[1])
    for arm in ("baseline", "plan"):
        assert read_log(tmp_path, arm) == read_log(whole[0], arm)


@pytest.mark.long
def test_a_killed_process_loses_at_most_the_chunk_that_it_was_in(whole: tuple[Path, Verdict], tmp_path: Path):
    script = (
        "import sys; sys.path[:0] = sys.argv[3:]\n"
        "from pathlib import Path; import time\n"
        "from plimsoll.artifacts.store import load_plan\n"
        "from analysis.probe import test_resume\n"
        "test_resume.make_plan = lambda: load_plan(sys.argv[2])\n"
        "test_resume.probe(Path(sys.argv[1]), progress=lambda stage, share: time.sleep(0.02))\n"
    )
    run, plan = tmp_path / "run", tmp_path / "plan.json"
    make_plan().save(plan)
    paths = [str(HERE.parents[1]), str(HERE.parents[1] / "support")]
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(run), str(plan), *paths], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 60
    while not (run / "plan.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (run / "verdict.json").exists()
    assert without_clock(probe(run)) == without_clock(whole[1])
    assert read_log(run, "plan") == read_log(whole[0], "plan")


@pytest.mark.parametrize("damage", [b"", b'{"step":5,"lo'])
def test_a_damaged_log_is_written_again_from_the_last_whole_chunk(
    damage: bytes, whole: tuple[Path, Verdict], tmp_path: Path
):
    interrupted(tmp_path)
    log = tmp_path / "plan.jsonl"
    log.write_bytes(log.read_bytes()[:40] + damage)
    probe(tmp_path)
    assert read_log(tmp_path, "plan") == read_log(whole[0], "plan")


def test_a_damaged_state_is_named(tmp_path: Path):
    interrupted(tmp_path)
    state = tmp_path / "plan.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(ProbeRunUnusable) as caught:
        probe(tmp_path)
    assert str(state) in caught.value.found


def test_a_finished_run_gives_its_verdict_without_a_step(whole: tuple[Path, Verdict]):
    stages: list[str] = []
    assert probe(whole[0], progress=lambda stage, share: stages.append(stage)) == whole[1]
    assert not [stage for stage in stages if stage.startswith("step")]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"steps": STEPS + 1}, "settings"),
        ({"seed": 5}, "settings"),
        ({"held_out": 5}, "held-out data"),
        ({"optimizer": torch.optim.SGD}, "optimizer"),
        ({"optimizer": functools.partial(torch.optim.AdamW, amsgrad=True)}, "optimizer"),
        ({"optimizer": lambda given: torch.optim.AdamW([{"params": [each]} for each in given])}, "optimizer"),
    ],
)
def test_another_probe_is_refused_with_what_differs(changes: dict[str, object], part: str, whole: tuple[Path, Verdict]):
    with pytest.raises(ProbeRunMismatch) as caught:
        probe(whole[0], **changes)
    assert part in caught.value.found
    assert ", not " in caught.value.why


def test_other_weights_and_plans_are_other_probes(whole: tuple[Path, Verdict]):
    model = make_model()
    with torch.no_grad():
        model.head.bias.add_(1.0)
    tiled = msgspec.structs.replace(
        make_plan(), tiles=(Tile(path="head", count=2, rows=64, inputs={"0": 0}, outputs=(0,)),)
    )
    for changes, named in (
        ({"plan": make_plan("full")}, "not full"),
        ({"plan": tiled}, "not int8"),
        ({"model": model}, "weights"),
    ):
        with pytest.raises(ProbeRunMismatch, match=named):
            probe(whole[0], **changes)


def test_data_that_has_changed_since_is_refused(tmp_path: Path):
    interrupted(tmp_path)
    batches = make_batches()
    batches[3]["x"][0, 0] += 1
    with pytest.raises(ProbeRunMismatch, match="batches have changed"):
        probe(tmp_path, batches=batches)


def test_a_finished_run_refuses_other_data(whole: tuple[Path, Verdict]):
    batches = make_batches()
    batches[STEPS - 1]["x"][0, 0] += 1
    with pytest.raises(ProbeRunMismatch, match="batches have changed"):
        probe(whole[0], batches=batches)
    batches = make_batches()
    batches[STEPS]["x"][0, 0] += 1  # neither trained on nor held out
    assert probe(whole[0], batches=batches) == whole[1]


def test_a_directory_of_somebody_else_is_left_alone_and_one_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ProbeRunMismatch, match="thesis"):
        probe(tmp_path)
    with pytest.raises(ProbeRunUnusable):
        probe(tmp_path / "thesis.txt" / "run")
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("fails_at", [None, 3, 15])
def test_model_optimizer_and_random_state_are_as_they_were(fails_at: int | None):
    model, plan = make_model(), make_plan()
    optimizer = torch.optim.AdamW(model.parameters())
    model(**make_batches()[0])["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    with unchanged(model, optimizer):
        if fails_at is None:
            probe(None, model=model, plan=plan)
        else:
            with pytest.raises(KeyboardInterrupt):
                probe(None, model=model, plan=plan, progress=stop_at(fails_at))


def test_a_graph_from_before_the_probe_can_still_go_backward():
    model, batch, plan = make_model(), make_batches()[0], make_plan()
    expected = torch.autograd.grad(model(**batch)["loss"], model.head.weight)
    model = make_model()
    loss = model(**batch)["loss"]
    probe(None, model=model, plan=plan, steps=4)
    torch.testing.assert_close(torch.autograd.grad(loss, model.head.weight), expected, rtol=0, atol=0)


def test_an_error_in_training_leaves_the_model_alone():
    model, batches, plan = make_model(), make_batches(), make_plan()
    batches[7] = {"x": torch.randn(64, WIDTH + 1), "y": torch.randn(64)}
    with unchanged(model), pytest.raises(RuntimeError):
        probe(None, model=model, batches=batches, plan=plan)


class Averaging(torch.optim.SGD):
    """Keeps averages of gradients in float32, whatever the dtype of the parameters."""

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("average", torch.zeros_like(parameter, dtype=torch.float32))
            average.lerp_(parameter.grad.float(), 0.1)
            parameter.sub_(average, alpha=self.param_groups[0]["lr"])


def test_optimizer_state_keeps_its_dtype_from_chunk_to_chunk():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)])
    model, batches = model.bfloat16(), [torch.randn(4, 8).bfloat16() for _ in range(8)]
    plan = plimsoll.plan(model, batches[0], loss=mean_square, strategy="full")
    losses = {
        plimsoll.probe(
            model,
            batches,
            plan,
            steps=8,
            chunk_steps=chunk_steps,
            loss=mean_square,
            optimizer=functools.partial(Averaging, lr=1.0),
        ).curves.baseline_losses
        for chunk_steps in (2, 8)
    }
    assert len(losses) == 1


def test_numbers_of_numpy_in_an_optimizer_are_stored_and_what_cannot_be_is_named(tmp_path: Path):
    rate = np.logspace(-3, -2, 3)[0]
    verdict = probe(tmp_path / "run", optimizer=functools.partial(torch.optim.SGD, lr=rate))
    assert verdict.steps == STEPS

    class Scheduled(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.param_groups[0]["schedule"] = Path("rates.csv")

    with pytest.raises(InvalidProbe) as caught:
        probe(tmp_path / "other", optimizer=Scheduled)
    assert "['param_groups'][0]['schedule']" in caught.value.found


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"steps": 0}, InvalidOption, "is not a valid count"),
        ({"steps": -3}, InvalidOption, "is not a valid count"),
        ({"chunk_steps": 0}, InvalidOption, "is not a valid count"),
        ({"seed": -1}, InvalidOption, "is not a valid count"),
        ({"optimizer": torch.optim.LBFGS}, InvalidProbe, "cannot train with LBFGS"),
        ({"model": torch.nn.Linear(2, 2), "batches": [torch.zeros(1, 2)]}, PlanMismatch, "another model"),
    ],
)
def test_no_steps_and_a_plan_for_another_model_are_refused(changes: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        probe(None, **changes)
