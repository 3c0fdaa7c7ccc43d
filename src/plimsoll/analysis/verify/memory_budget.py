"""torch's own memory budget of compiled graphs, at work on one model, to be compared with plans.

Private to torch, seen in torch 2.9 to 2.13: ``torch._functorch.config.activation_memory_budget``, which is read when a graph is
partitioned.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from plimsoll.errors import InvalidStrategy
from plimsoll.planning.strategies import MEMORY_BUDGET, is_memory_budget
from plimsoll.tracing.compiled.units import Unit, install


def read_shares(strategies: Iterable[str]) -> dict[str, float]:
    """The share that each of ``memory-budget:SHARE`` names, by strategy; others are left to the planner.

    Raises:
        InvalidStrategy: no share from 0 to 1.

    Example:
        >>> read_shares(["full", "memory-budget:0.5"])
        {'memory-budget:0.5': 0.5}
    """
    found = {}
    for strategy in filter(is_memory_budget, strategies):
        with contextlib.suppress(ValueError):
            found[strategy] = float(strategy.partition(":")[2])
        if not 0 <= found.get(strategy, -1) <= 1:
            raise InvalidStrategy(
                f"{strategy!r} is not a strategy.",
                why="torch's memory budget is a share, from 0 to 1, of the bytes that each graph saves",
                next=f"{MEMORY_BUDGET}:0.5, or another share",
            )
    return found


class MemoryBudget:
    """Compiled units under torch's memory budget from ``resume`` until ``pause``; nothing of the process is configured."""

    def __init__(self, units: Sequence[Unit], share: float) -> None:
        compiled = {unit.call.key: unit.call.compile(backend=_backend(unit.call.options, share)) for unit in units}
        self._calls = [(unit, functools.partial(compiled[unit.call.key], unit.module)) for unit in units]
        self._put_back: list[Callable[[], None]] = []

    def resumed(self) -> MemoryBudget:
        """Itself, at work."""
        self.resume()
        return self

    def resume(self) -> None:
        """Put the budget to work."""
        self._put_back = [install(unit, call) for unit, call in self._calls]

    def remove(self) -> None:
        """End it."""
        self.pause()

    def pause(self) -> None:
        """Put back what the user's torch.compile made."""
        while self._put_back:
            self._put_back.pop()()


def _backend(options: Any, share: float) -> Callable[..., Any]:
    """Compile by inductor with a budget of its own. Caches know nothing of it, so none is read."""
    from torch._inductor.compile_fx import compile_fx  # takes seconds to import

    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        settings = {"activation_memory_budget": share, "enable_autograd_cache": False}
        with torch._functorch.config.patch(settings):
            return compile_fx(graph, list(inputs), config_patches=dict(options))

    return backend
