"""A managed run goes on bit for bit from torch's distributed checkpoint, and torchrun's record names the rank that failed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launching import Told, launch
from ranks.resuming import EXAMPLE, PLANS

pytestmark = pytest.mark.long

LAYOUTS = ("plain", "ddp", "fsdp")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return launch(2, "ranks.resuming:everything", str(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def told_alone(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return launch(1, "ranks.resuming:alone", str(tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_goes_on_bit_for_bit_under_any_plan(told: Told, told_alone: Told, layout: str, plan: str):
    for rank in told_alone if layout == "plain" else told:
        assert rank["resumed"][layout][plan] == (4, True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saving_draws_no_random_number_and_the_plans_that_are_compared_differ(
    told: Told, told_alone: Told, layout: str
):
    for rank in told_alone if layout == "plain" else told:
        found = rank["resumed"][layout]
        assert found["same stream"]
        assert found["drops"] == [1, 2, 0]
        assert len(set(found["losses"])) == 4


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp", "tp"])
def test_a_plan_changes_no_name_and_no_value(told: Told, layout: str):
    assert [rank["transparent"][layout] for rank in told] == [True, True]


def test_torchruns_error_record_names_the_rank_whose_managed_step_failed(tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    # A store of its own for every attempt, see docs/resume.md.
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": paths}
    script = Path(__file__).with_name("resuming.py")
    finished = subprocess.run(
        [*command, f"--log-dir={tmp_path}", str(script)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert finished.returncode == 1
    for attempt, where in enumerate(("forward", "backward")):
        (file,) = tmp_path.glob(f"*/attempt_{attempt}/1/error.json")
        record = json.loads(file.read_text())["message"]
        assert record["message"] == f"ValueError: no such head in {where}"
        assert "resuming.py" in record["extraInfo"]["py_callstack"]
    # Where gloo ends the other rank first, torchrun's summary is about that one; each rank's own output is not.
    assert "ValueError: no such head in backward" in finished.stderr


def test_the_page_shows_the_code_that_the_example_runs():
    page = (EXAMPLE.parents[1] / "docs" / "resume.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown in EXAMPLE.read_text(encoding="utf-8")
