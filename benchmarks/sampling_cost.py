"""What it costs to inspect one region every n steps: steps with and without an inspection, in turns.

    python -m benchmarks.sampling_cost --models llama gpt2 --size tiny --rounds 15 --every 100

A plan that recomputes every block is at work in both; what an inspected step takes more, divided by ``every``, is the cost.
Prints a table.
"""

from __future__ import annotations

import argparse
import sys
import warnings

import plimsoll
from benchmarks.machine import versions
from benchmarks.measure import paired_difference_seconds, run_step
from benchmarks.models import FAMILIES, SIZES, Case, build
from plimsoll.engine.apply import Handle
from plimsoll.tracing.meters.timing import one_thread, time_in_turns
from plimsoll.units import format_seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampling_cost", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=["llama", "gpt2", "vit"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--every", type=int, default=100)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    print(
        f"Inspecting one region every {options.every} steps; {', '.join(f'{k} {v}' for k, v in versions().items())}\n"
    )
    print("| model | step | inspected step takes more | share of training time |")
    print("|---|--:|--:|--:|")
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("error")  # a fault would be a warning
        for name in options.models:
            print(_row(name, options.size, options.rounds, options.every))
    return 0


def _row(name: str, size: str, rounds: int, every: int) -> str:
    case = build(name, size)
    plan = plimsoll.plan(case.model, case.batch, strategy="full", loss=case.loss)
    with plimsoll.apply(case.model, plan, verify_every=1) as inspected:
        inspected.pause()
        with plimsoll.apply(case.model, plan) as plain:
            plain.pause()
            timings = time_in_turns(
                {"plain": lambda: _step(case, plain), "inspected": lambda: _step(case, inspected)},
                device=case.device,
                rounds=rounds,
                warmups=2,
            )
        assert inspected.inspected_calls >= rounds
        assert not inspected.faults
    more = paired_difference_seconds(timings["inspected"], timings["plain"])
    step = timings["plain"].median_seconds
    share = max(0.0, more.median) / every / step
    return (
        f"| {name} {size} | {format_seconds(step)} | {format_seconds(more.median)} "
        f"({format_seconds(more.low)} to {format_seconds(more.high)}) | {share:.2%} |"
    )


def _step(case: Case, handle: Handle) -> None:
    handle.resume()
    try:
        run_step(case, case.model)
        case.model.zero_grad(set_to_none=True)
    finally:
        handle.pause()


if __name__ == "__main__":
    raise SystemExit(main())
