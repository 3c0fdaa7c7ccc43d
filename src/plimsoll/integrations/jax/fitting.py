"""The largest batch of a JAX function whose training fits into a budget: every batch is planned and compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from plimsoll.artifacts.costs import Basis
from plimsoll.artifacts.decision import Decision, Status
from plimsoll.artifacts.fit import Fit, FitPoint
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import BudgetBelowFloor, InvalidOption
from plimsoll.integrations.jax.estimates import SECONDS_ERROR, FixedSizes, parameters_of, room_in
from plimsoll.integrations.jax.planning import Searched
from plimsoll.units import parse_bytes


def fit(
    function: Callable[..., Any],
    args_of: Callable[[int], Sequence[Any]],
    budget: str | int,
    *,
    device: str | None = None,
    optimizer: Any = None,
    argnums: int | Sequence[int] = 0,
    most_batch: int = 1024,
) -> Fit:
    """Find the batch with the most samples per second whose training fits into a budget for everything.

    Batches are doubled until no plan fits, and the middle between the last two is tried as well.

    Args:
        function: as for ``plan``.
        args_of: the arguments for so many samples; shapes will do.
        budget: bytes of parameters, gradients, optimizer state, batch and temporaries together.
        device: as for ``plan``.
        optimizer: as for ``estimate``.
        argnums: as for ``plan``.
        most_batch: no larger batch is looked at.

    Returns:
        Every batch that was looked at, and the plan of the best.

    Raises:
        InvalidOption: ``most_batch`` is less than 1.

    Example:
        >>> found = pj.fit(loss, lambda rows: (params, batch[:rows]), "16GiB", device="H100-SXM")  # doctest: +SKIP
    """
    if most_batch < 1:
        raise InvalidOption(
            f"most_batch={most_batch} is no batch.", why="a batch has a sample", next="most_batch=1 or more"
        )
    started, limit = time.monotonic(), parse_bytes(budget)
    plans: dict[int, Plan | None] = {}
    points: dict[int, FitPoint] = {}

    def look(rows: int) -> bool:
        args = args_of(rows)
        searched = Searched(function, args, argnums, device)
        sizes = FixedSizes(searched.call, parameters_of(args, argnums), optimizer)
        try:
            plans[rows] = searched.plan(room_in(limit, sizes))
        except BudgetBelowFloor:
            plans[rows] = None
        points[rows] = _point(searched, rows, sizes, plans[rows])
        seen[:] = [searched]
        return plans[rows] is not None

    seen: list[Searched] = []
    rows = 1
    while look(rows) and 2 * rows <= most_batch:
        rows *= 2
    if plans[rows] is None and rows > 2:
        look(3 * rows // 4)
    order = sorted(points)
    usable = [at for at, each in enumerate(order) if points[each].does_fit]
    best = max(usable, key=lambda at: points[order[at]].items_per_second, default=None)
    return Fit(
        model=seen[0].name,
        fingerprint=seen[0].step.trace.fingerprint,
        device=seen[0].clock.device,
        cost_source=seen[0].clock.source,
        cost_device=seen[0].clock.device,
        budget_bytes=limit,
        items_name="samples",
        global_batch=None,
        points=tuple(points[each] for each in order),
        best=best,
        plan=None if best is None else plans[order[best]],
        seconds_basis=Basis.MODELLED,
        seconds_error=SECONDS_ERROR,
        traces=len(points),
        solves=len(points),
        total_seconds=time.monotonic() - started,
        notes=("Temporaries are XLA's for the device that is here; the optimizer's step takes no time in this.",),
    )


def _point(searched: Searched, rows: int, sizes: FixedSizes, plan: Plan | None) -> FitPoint:
    base = searched.search.planner.baseline.seconds
    measured = searched.search.measured.values()
    decisions = [] if plan is None else [each for region in plan.regions for each in region.decisions]
    held = sum(each.bytes for each in decisions if each.decision is Decision.KEEP)
    return FitPoint(
        micro_batch=rows,
        sequence=1,
        accumulation=1,
        status=Status.INFEASIBLE if plan is None else plan.status,
        unmanaged_peak_bytes=sizes.total + searched.call.unmanaged_bytes,
        predicted_peak_bytes=sizes.total + (min(measured, default=0) if plan is None else plan.predicted_peak_bytes),
        unmanaged_seconds=base if plan is None else plan.baseline_seconds,
        micro_seconds=base if plan is None else plan.predicted_seconds,
        optimizer_seconds=0.0,
        saved_bytes=searched.call.unmanaged_bytes,
        rebuilt_bytes=max(searched.call.unmanaged_bytes - held, 0),
        is_traced=True,
    )
