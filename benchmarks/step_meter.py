"""What the meter of every training step costs, and whether it leaves a step out.

    PYTHONPATH=src:tests/support python -m benchmarks.step_meter
    PYTHONPATH=src:tests/support python -m benchmarks.step_meter --steps 200 --rounds 60

The first table trains models whose sizes inside follow the data while batches keep their shape, under ``attach``. Peaks are
counted from outside (`metering.py`). A step is silent if it is over the budget, no warning comes within two steps, and
its peak is higher than that of every step that a warning has named. The second table gives the processor time of one step, and
of its readings, in the same rounds on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import plimsoll
from benchmarks.machine import device_name, versions
from benchmarks.models import Case, build
from benchmarks.page import format_table
from metering import LiveStorages
from plimsoll.session.step_levels import StepLevels
from plimsoll.session.step_watch import StepWatch
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.units import MIB
from steps import Block, mean_square

_ROWS, _TOKENS, _WIDTH = 16, 64, 64


class Inside(nn.Module):
    """Blocks on what a function keeps of a batch that always has one shape."""

    def __init__(self, keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.keep = keep
        self.embed = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(Block(_WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.keep(self.embed(x), lengths)
        for block in self.blocks:
            x = block(x)
        return x


def _without_padding(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(_TOKENS) < lengths[:, None]]


def _packed(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """As many texts as fit into rows, one after the other."""
    rows = _without_padding(x, lengths)
    whole = -(-len(rows) // _TOKENS) * _TOKENS
    return torch.cat([rows, rows.new_zeros(whole - len(rows), _WIDTH)]).reshape(-1, _TOKENS, _WIDTH)


def _proposals(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """For every picture as many regions as its content asks for, each of four cells."""
    found = zip(x, lengths, strict=True)
    return torch.cat([row[:1].expand(4 * int(count), _WIDTH) + row.mean(0) for row, count in found])


_KINDS = {"padding-free encoder": _without_padding, "packed decoder": _packed, "detector": _proposals}


def _train(kind: str, steps: int, budget: int | None = None) -> tuple[list[float], list[int], list[int]]:
    """Losses and peaks of all steps, and those before whose end a warning named an overrun."""
    torch.manual_seed(0)
    losses, warned = [], []
    with LiveStorages() as live, contextlib.ExitStack() as stack:
        model = Inside(_KINDS[kind])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if budget is not None:
            stack.enter_context(plimsoll.attach(model, budget))
        live.watch(model)
        for number in range(steps):
            torch.manual_seed(number)
            x, lengths = torch.randn(_ROWS, _TOKENS, _WIDTH), torch.randint(8, _TOKENS + 1, (_ROWS,))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = mean_square(model(x, lengths))
                loss.backward()
                losses.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
            warned += [number for each in caught if "more than the budget" in str(each.message)]
        del loss
    return losses, live.peaks[:steps], warned


def _kept(kind: str, steps: int) -> tuple[str, ...]:
    expected, unmanaged, _ = _train(kind, steps)
    budget = int(0.75 * max(unmanaged))
    losses, peaks, warned = _train(kind, steps, budget)
    over = [number for number, peak in enumerate(peaks) if number and peak > budget]
    named_bytes, silent = 0, []
    for number in over:
        if any(number <= each <= number + 2 for each in warned):
            named_bytes = max(named_bytes, peaks[number])
        if peaks[number] > 1.01 * named_bytes:
            silent.append(number)
    highest = max((peaks[number] / budget - 1 for number in over), default=0.0)
    return (
        kind,
        f"{max(unmanaged) / MIB:.2f}",
        f"{budget / MIB:.2f}",
        f"{len(over)} of {steps}",
        f"{highest:.1%}",
        str(len(warned)),
        str(len(silent)),
        str(expected == losses),
    )


def _cost(case: Case, rounds: int) -> tuple[str, ...]:
    """Microseconds of processor time that all readings of one step take, in addition to the step."""
    spent = 0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            begun = time.thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                spent += time.thread_time_ns() - begun

        return run

    methods: list[tuple[type, str]] = [
        (StepLevels, name) for name in ("begin", "forward_ended", "backward_begins", "backward_ended")
    ]
    methods += [(StepWatch, "_look_at_loop"), (StepWatch, "taken_by")]
    kept = [(kind, name, vars(kind)[name]) for kind, name in methods]
    batch = case.batch
    free = plimsoll.plan(case.model, batch, strategy="none")
    budget = (free.floor_bytes + free.baseline_peak_bytes) // 2
    shares, step_ms, read_us = [], [], []
    with plimsoll.attach(case.model, budget, verify_every=0):
        for number in range(rounds + 6):
            if number == 6:
                for kind, name, method in kept:
                    setattr(kind, name, timed(method))
            spent, begun = 0, time.process_time_ns()
            case.loss(case.model(**batch)).backward()
            case.model.zero_grad()
            took = time.process_time_ns() - begun
            if number >= 6:
                shares.append(spent / took)
                step_ms.append(took / 1e6)
                read_us.append(spent / 1e3)
        for kind, name, method in kept:
            setattr(kind, name, method)
    middle = statistics.median
    return case.name, f"{middle(step_ms):.0f}", f"{middle(read_us):.0f}", f"{middle(shares):.3%}", f"{max(shares):.3%}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_meter", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of every training (default 200)")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="timed steps (default 40)")
    options = parser.parse_args()
    print(f"{device_name(torch.device('cpu'))}\n{versions()}\n")
    with one_thread():
        head = (
            "training",
            "unmanaged MiB",
            "budget MiB",
            "steps over",
            "highest",
            "warnings",
            "silent",
            "losses equal",
        )
        print("\n".join(format_table(head, [_kept(kind, options.steps) for kind in _KINDS])), flush=True)
        head = ("model", "step ms", "readings µs", "share", "highest share")
        print(
            "\n".join(
                format_table(
                    head, [_cost(case, options.rounds) for case in (build("llama", "cpu"), build("gpt2", "cpu"))]
                )
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
