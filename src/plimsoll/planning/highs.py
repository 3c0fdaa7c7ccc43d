"""What has to be known of HiGHS, scipy's solver: it is not always quiet, and its presolve not always right.

Seen in the HiGHS of scipy 1.15 to 1.17: branch and bound prints a line to the process's output now and then, where a solution
that left presolve slightly infeasible is repaired. The line comes from C, so the file descriptor itself has to look elsewhere
meanwhile. And where the budget of a linear program is all but out of reach, presolve may call it neither solved nor infeasible.
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
"""Results as scipy numbers them."""


def solve_linear(aim: Any, *, may_give_up: bool = False, **program: Any) -> OptimizeResult | None:
    """The optimum of a linear program in the words of `scipy.optimize.linprog`; ``None`` if nothing is feasible.

    With ``may_give_up`` also if HiGHS cannot say: for those who look for a plan, and prove nothing by it.
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
    """Two planners at once would put back each other's output."""
    return threading.Lock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside the block nothing that begins with the solver's name reaches the process's output."""
    if sys.platform == "win32":  # its C library has no common buffer to flush
        yield
        return
    flush = ctypes.CDLL(None).fflush
    with _turn(), tempfile.TemporaryFile() as heard:
        flush(None)
        try:
            real = os.dup(_STDOUT)
        except OSError:  # closed: nobody hears anything
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
            for line in heard:
                if not line.startswith(_PREFIX):
                    os.write(_STDOUT, line)
