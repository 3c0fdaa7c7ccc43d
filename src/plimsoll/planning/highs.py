"""Works around two defects of HiGHS, scipy's solver: unwanted output, and wrong results of its presolve.

Seen in the HiGHS of scipy 1.15 to 1.17. Branch and bound sometimes prints a line to the process's output when it repairs a
solution that left presolve slightly infeasible. C code prints the line, so the file descriptor itself has to be redirected
meanwhile. And if the budget of a linear program is almost out of reach, presolve may report neither "solved" nor "infeasible".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from scipy.optimize import OptimizeResult, linprog

_STDOUT = 1
_PREFIX = b"Highs"
OPTIMAL, LIMIT, INFEASIBLE, NODES_SPENT = 0, 1, 2, 4
"""The status codes of scipy's solvers. ``LIMIT``: a limit on iterations or time was reached. ``NODES_SPENT``: the limit on the
nodes of branching was reached."""


def solve_linear(aim: Any, *, may_give_up: bool = False, **program: Any) -> OptimizeResult | None:
    """Solve a linear program with scipy's ``linprog``, and return its result; ``None`` if the program is infeasible.

    ``program`` are the arguments of ``linprog``. With ``may_give_up``, also return ``None`` if HiGHS finds neither an optimum
    nor infeasibility. A search for a plan may use this option, a proof may not.
    """
    for how in ({"method": "highs"}, {"method": "highs", "options": {"presolve": False}}, {"method": "highs-ipm"}):
        result = linprog(aim, **program, **how)
        if result.status in (OPTIMAL, INFEASIBLE):
            break
    if may_give_up and result.status not in (OPTIMAL, INFEASIBLE):
        return None
    assert result.status in (OPTIMAL, INFEASIBLE), f"HiGHS: {result.message}"
    return result if result.status == OPTIMAL else None


@functools.cache
def _turn() -> threading.Lock:
    """Return the lock that a planner must hold while the solver's output is redirected.

    Without the lock, two planners at once would restore each other's redirected output.
    """
    return threading.Lock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context that discards the lines that HiGHS, scipy's solver, prints to the process's output inside the block.

    They begin with the solver's name. All other lines are still printed.
    """
    if sys.platform == "win32":  # its C libraries do not share a buffer that could be flushed
        yield
        return
    flush = ctypes.CDLL(None).fflush
    with _turn(), tempfile.TemporaryFile() as heard:
        flush(None)
        try:
            real = os.dup(_STDOUT)
        except OSError:  # stdout is closed, so there is nothing to silence
            yield
            return
        os.dup2(heard.fileno(), _STDOUT)
        try:
            yield
        finally:
            flush(None)
            os.dup2(real, _STDOUT)
            os.close(real)
            heard.seek(0)
            # The reader of a pipe may be gone. The solver's result counts all the same.
            with contextlib.suppress(OSError), os.fdopen(os.dup(_STDOUT), "wb") as out:
                out.writelines(line for line in heard if not line.startswith(_PREFIX))
