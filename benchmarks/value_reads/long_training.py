"""Trains models with random routing for many steps under a budget, and counts what a user would notice.

    PYTHONPATH=src python -m benchmarks.value_reads.long_training --steps 200

The budget lies 40% of the way from the floor to the unmanaged peak. Every allocation is counted from outside. The figures are:
steps over the budget (and among them steps without a message in that step or the next one), the recordings of a block for each
way through its code, and the slowest step after the tenth as a multiple of the median step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from dataclasses import dataclass

import torch

import plimsoll
from benchmarks.counted_allocations import AllocationCounter, run_counted
from benchmarks.machine import device_name, page_head, versions
from benchmarks.page import format_table
from benchmarks.progress import say
from benchmarks.said import everything_said
from benchmarks.value_reads.__main__ import KINDS
from benchmarks.value_reads.compare import loss_of, services_of
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.units import MIB

_SHARE = 0.4
_EARLY_STEPS = 10
_ROUTED = ("routed", "experts", "capacity experts", "sorted experts")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one training showed. Peaks and the budget contain parameters and gradients."""

    kind: str
    budget_bytes: int
    peak_bytes: int
    over: int
    silent: int
    """The steps over the budget without a message in that step or the next one."""
    recordings: int
    """The most recordings of one block."""
    streams: int
    """The ways through the code of that block that have a recipe."""
    reruns: int
    slowest: float
    """The slowest step after the tenth, as a multiple of the median step."""
    slow_steps: int
    """Steps after the tenth that took more than three times the median."""


def train(kind: str, steps: int) -> Training:
    """Train a model of this kind under a budget."""
    torch.manual_seed(0)
    model = KINDS[kind].make().train()
    batch_of = KINDS[kind].batch_of
    unlimited = plimsoll.plan(model, dict(batch_of(steps)), "1GiB", loss=loss_of)
    budget = int(unlimited.floor_bytes + _SHARE * (unlimited.predicted_peak_bytes - unlimited.floor_bytes))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    own_bytes = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    counter = AllocationCounter()
    peaks, seconds, spoken = [], [], set()
    with everything_said() as said, plimsoll.attach(model, budget, optimizer=optimizer):
        for step in range(steps):
            torch.manual_seed(step)
            gc.collect()  # the models leave reference cycles behind, without Plimsoll too
            counter.begin_peak()
            begin = counter.live_bytes()  # with oneDNN's cache, which grows by a kernel for each new number of rows
            heard = len(said)
            begun = time.process_time()
            batch = batch_of(step)
            loss_of(model(**batch)).backward()
            seconds.append(time.process_time() - begun)
            optimizer.step()
            optimizer.zero_grad()
            del batch
            peaks.append(own_bytes + counter.peak_bytes() - begin)
            if len(said) > heard:
                spoken.add(step)
        services = services_of(model)
    most = max(services, key=lambda each: (each.learning.recordings, each.streams))
    over = [step for step, peak in enumerate(peaks) if peak > budget]
    late, median = seconds[_EARLY_STEPS:], statistics.median(seconds)
    return Training(
        kind=kind,
        budget_bytes=budget,
        peak_bytes=max(peaks),
        over=len(over),
        silent=sum(not {step, step + 1} & spoken for step in over),
        recordings=most.learning.recordings,
        streams=most.streams,
        reruns=sum(each.reruns for each in services),
        slowest=max(late) / median,
        slow_steps=sum(each > 3 * median for each in late),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.value_reads.long_training", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of each training (default 200)")
    parser.add_argument("--only", choices=tuple(KINDS), nargs="+", default=_ROUTED, metavar="KIND", help="these models")
    options = parser.parse_args()
    status = run_counted("benchmarks.value_reads.long_training", sys.argv[1:])
    if status is not None:
        return status
    rows = []
    with one_thread():
        for kind in options.only:
            found = train(kind, options.steps)
            rows.append(
                (
                    kind,
                    *(f"{count / MIB:.2f}" for count in (found.budget_bytes, found.peak_bytes)),
                    *map(str, (found.over, found.silent, found.recordings, found.streams, found.reruns)),
                    f"{found.slowest:.2f} ×",
                    str(found.slow_steps),
                )
            )
            say(" | ".join(rows[-1]))
    command = " ".join(["PYTHONPATH=src python -m benchmarks.value_reads.long_training", *sys.argv[1:]])
    title = "Random routing in a long training under a budget"
    print("\n".join(page_head(title, command, device=device_name(torch.device("cpu")), versions=versions())))
    head = (
        *(
            "model",
            "budget MiB",
            "highest peak MiB",
            "steps over",
            "of them silent",
            "recorded",
            "streams",
            "run again",
        ),
        *("slowest after the tenth / median", "slower than 3 ×"),
    )
    print("\n".join(format_table(head, rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
