"""What HiGHS does by itself does not reach the user: lines that it prints, programs that its presolve cannot judge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scipy.optimize

from planning.builders import random_step
from plimsoll.planning import highs
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex

UNKNOWN = scipy.optimize.OptimizeResult(status=4, message="model_status is Unknown", x=None)

PROGRAM = """
import ctypes, os
import scipy.optimize
from planning.builders import random_step
from plimsoll.planning import integer_program
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex

printf, calls = ctypes.CDLL(None).printf, []

def chatty(*args, **kwargs):
    calls.append(args)
    printf(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\\n")
    os.write(1, b"a line of another thread\\n")
    return scipy.optimize.milp(*args, **kwargs)

integer_program.milp = chatty
planner = Planner(StepIndex(*random_step(3, ops=8).finish()))
for share in (0.2, 0.4, 0.6):
    low, high = planner.floor.peak_bytes, planner.baseline.peak_bytes
    solve(planner, budget_bytes=int(low + share * (high - low)))
os.write(2, b"%d" % len(calls))
"""


@pytest.mark.long
def test_planning_writes_nothing_of_the_solvers_to_stdout_or_stderr() -> None:
    paths = os.pathsep.join(str(Path(__file__).parents[1] / part) for part in (".", "support", "../src"))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, env=environment, check=True)
    calls = int(done.stderr)
    assert calls, "the program was solved without branching: nothing was tested"
    assert done.stdout == calls * b"a line of another thread\n"


def test_a_linear_program_that_presolve_cannot_judge_is_solved_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def puzzled(*args: Any, options: Any = None, **kwargs: Any) -> scipy.optimize.OptimizeResult:
        return scipy.optimize.linprog(*args, options=options, **kwargs) if options else UNKNOWN

    def plan() -> tuple[int, float, float]:
        planner = Planner(StepIndex(*random_step(3, ops=8).finish()))
        found = solve(planner, budget_bytes=(planner.floor.peak_bytes + planner.baseline.peak_bytes) // 2)
        return planner.floor.peak_bytes, found.predicted_seconds, found.lower_bound_seconds

    expected = plan()
    monkeypatch.setattr(highs, "linprog", puzzled)
    assert plan() == pytest.approx(expected)
