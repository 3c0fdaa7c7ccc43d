"""Stand-ins for the verbs that answer at once: for tests of the command line above them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from plimsoll.artifacts.comparison import Comparison
from plimsoll.artifacts.plan import Plan
from plimsoll.artifacts.progress import Progress
from plimsoll.artifacts.receipt import Receipt
from plimsoll.artifacts.store import load_plan
from plimsoll.units import parse_bytes
from samples import make_comparison, make_plan, make_receipt


class FakeVerbs:
    """Records its calls and returns what it was given; an error that is set is raised instead."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: BaseException | None = None
        self.planned: Plan = make_plan()
        self.receipt: Receipt = make_receipt()
        self.comparison: Comparison = make_comparison()
        self.load = load_plan

    def _answer(self, name: str, progress: Progress | None, **given: Any) -> None:
        self.calls.append((name, given))
        if progress is not None:
            progress(name, 0.5)
        if self.error is not None:
            raise self.error

    def plan(self, model: Any, batch: Any, budget: Any = None, *, progress: Progress | None = None, **how: Any) -> Plan:
        if budget is not None:
            parse_bytes(budget)
        self._answer("plan", progress, model=model, batch=batch, budget=budget, **how)
        return self.planned

    def verify(self, model: Any, batch: Any, plan: Plan, *, progress: Progress | None = None, **how: Any) -> Receipt:
        self._answer("verify", progress, model=model, batch=batch, plan=plan, **how)
        return self.receipt

    def compare(
        self, model: Any, batch: Any, strategies: Any, *, progress: Progress | None = None, **how: Any
    ) -> Comparison:
        self._answer("compare", progress, model=model, batch=batch, strategies=list(strategies), **how)
        return self.comparison

    @contextlib.contextmanager
    def apply(self, model: Any, plan: Plan) -> Iterator[None]:
        self._answer("apply", None, model=model, plan=plan)
        yield
