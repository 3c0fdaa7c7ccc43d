"""``plimsoll run`` trains a script under a budget that the script does not know of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from long_cases import some

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss = model(torch.randn(512, 64)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    print(loss.item())
print(sys.argv[1:], __name__)
"""


def start(
    folder: Path, *arguments: str, module: str = "plimsoll", **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, *(["-m", module, "run"] if module else []), *arguments]
    known = {name: value for name, value in os.environ.items() if name != "PLIMSOLL_BUDGET"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**known, **environment})


@pytest.mark.long
def test_a_script_trains_under_the_budget_as_without_it_and_gets_its_own_arguments(tmp_path: Path):
    plain = start(tmp_path, "train.py", "--lr", "3", module="")
    run = start(tmp_path, "train.py", "--budget", "2.2MiB", "--lr", "3")
    assert run.returncode == 0, run.stderr
    assert run.stdout == plain.stdout  # losses to every digit, arguments, and the name __main__
    assert "plimsoll: budget 2.2 MiB · peak " in run.stderr


@pytest.mark.long
def test_the_environment_variable_counts_only_for_plimsoll_run(tmp_path: Path):
    run = start(tmp_path, "-m", "train", PLIMSOLL_BUDGET="100KiB")
    assert run.returncode == 3
    assert run.stderr.startswith("BudgetBelowFloor: budget 100.0 KiB")
    assert "Traceback" not in run.stderr
    plain = start(tmp_path, "train.py", module="", PLIMSOLL_BUDGET="100KiB")
    assert (plain.returncode, plain.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("-momentum", "0.9", "-lambda", "0.1", "-hidden", "64"),  # fairseq and others write long options with one dash
        ("-m", "x", "-h", "--help", "--version"),
        ("--", "--budget", "3"),
    ],
)
def test_arguments_after_the_script_are_the_scripts_own(tmp_path: Path, arguments: tuple[str, ...]):
    (tmp_path / "show.py").write_text("import sys; print(sys.argv[1:])")
    run = start(tmp_path, "show.py", "--budget", "1GiB", *arguments)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{[each for each in arguments if each != '--']}\n"


@pytest.mark.long
def test_a_directory_runs_as_under_python(tmp_path: Path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import sys, beside; print(sys.argv[1:], beside.NAME)")
    (tmp_path / "app" / "beside.py").write_text("NAME = 'found'")
    run = start(tmp_path, "app", "--budget", "1GiB", "x")
    assert (run.returncode, run.stdout) == (0, "['x'] found\n"), run.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    some(
        [
            (("train.py",), "plimsoll run needs a budget"),
            (("train.py", "--budget"), "requires an argument"),
            (("train.py", "--budget", "3G"), "InvalidBudget"),
            (("missing.py", "--budget", "1GiB"), "The file missing.py does not exist"),
        ],
        2,
    ),
)
def test_what_cannot_run_is_refused_before_the_script_begins(tmp_path: Path, arguments: tuple[str, ...], words: str):
    run = start(tmp_path, *arguments)
    assert run.returncode == 2
    assert words in run.stderr
    assert run.stdout == ""


@pytest.mark.long
def test_a_script_that_trains_nothing_is_told_so(tmp_path: Path):
    (tmp_path / "other.py").write_text("print('no model')")
    run = start(tmp_path, "other.py", "--budget", "1GiB")
    assert run.returncode == 0
    assert "the budget 1GiB was not used" in run.stderr
