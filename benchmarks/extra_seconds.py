"""A case and shares of the way from floor to unmanaged peak in; predicted beside measured extra seconds of each plan out.

    python -m benchmarks.extra_seconds vit --size cpu --shares 0.1 0.5 0.9 --rounds 12

One trace, a plan per share, all of them on one model. A round of a plan is unmanaged, managed, managed, unmanaged, so that
whatever drifts slowly hits both alike; the first line compares the unmanaged step with itself in the same way, and says
what can be told apart at all.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from benchmarks.machine import device_name, versions
from benchmarks.measure import run_step
from benchmarks.models import FAMILIES, SIZES, Case, build
from benchmarks.progress import say
from plimsoll.artifacts.plan import Plan
from plimsoll.engine.apply import Handle, apply_plan
from plimsoll.planning.solve import Planner, solve
from plimsoll.planning.step import StepIndex
from plimsoll.session.step_planner import trace_and_cost
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.meters.timing import Interval, median_interval, one_thread

_WARMUPS = 3


def plans_for(case: Case, shares: list[float]) -> dict[float, Plan]:
    """One plan per share, of one trace."""
    traced, costs = trace_and_cost(TrainingTask(model=case.model, batch=case.batch, loss=case.loss))
    planner = Planner(StepIndex(traced, costs))
    free = solve(planner, budget_bytes=None, strategy="none")
    floor, peak = free.floor_bytes, free.baseline_peak_bytes
    return {share: solve(planner, budget_bytes=int(floor + share * (peak - floor))) for share in shares}


def paused(case: Case, plan: Plan) -> Handle:
    """The plan on the case's model: recorded, warm, and out of the way."""
    handle = apply_plan(case.model, plan)
    for _ in range(_WARMUPS):
        _seconds(case)
    handle.pause()
    return handle


def extra_seconds(case: Case, handle: Handle | None, rounds: int) -> Interval:
    """Seconds of a managed step beyond an unmanaged one; without a handle, of an unmanaged one beyond another."""

    def managed() -> float:
        if handle is None:
            return _seconds(case)
        handle.resume()
        try:
            return _seconds(case)
        finally:
            handle.pause()

    turns: tuple[Callable[[], float], ...] = (partial(_seconds, case), managed, managed, partial(_seconds, case))
    differences = []
    for _ in range(rounds):
        first, second, third, fourth = (turn() for turn in turns)
        differences.append((second + third - first - fourth) / 2)
    return median_interval(differences)


def _seconds(case: Case) -> float:
    gc.collect()
    start = time.process_time()
    run_step(case, case.model)
    case.model.zero_grad(set_to_none=True)
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.extra_seconds", description=__doc__)
    parser.add_argument("model", choices=FAMILIES, help="what to train, on the CPU")
    parser.add_argument("--size", choices=SIZES[:2], default="cpu", help="tiny: to try it; cpu: seconds a step")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75, 0.9], metavar="SHARE")
    parser.add_argument(
        "--rounds", type=int, default=12, metavar="N", help="rounds of four steps per plan (default 12)"
    )
    options = parser.parse_args()
    with one_thread():
        case = build(options.model, options.size)
        plans = plans_for(case, options.shares)
        handles = {share: paused(case, plan) for share, plan in plans.items()}
        print(f"{device_name(case.device)}; " + ", ".join(f"{name} {each}" for name, each in versions().items()))
        say("unmanaged against itself")
        print(f"{'none':>5}  measured {_milliseconds(extra_seconds(case, None, options.rounds))}")
        for share, plan in plans.items():
            say(f"budget {share:.0%}")
            measured = extra_seconds(case, handles[share], options.rounds)
            predicted = plan.predicted_seconds - plan.baseline_seconds
            allowed = max(0.15 * predicted, 0.01 * plan.baseline_seconds)
            verdict = "yes" if abs(measured.median - predicted) <= allowed else "no"
            print(
                f"{share:5.0%}  predicted {predicted * 1e3:.1f} ms, measured {_milliseconds(measured)}, "
                f"within {allowed * 1e3:.1f} ms: {verdict}",
                flush=True,
            )
    return 0


def _milliseconds(interval: Interval) -> str:
    return f"{interval.median * 1e3:.1f} ms ({interval.low * 1e3:.1f} to {interval.high * 1e3:.1f})"


if __name__ == "__main__":
    raise SystemExit(main())
