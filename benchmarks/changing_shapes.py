"""Trainings whose batches change size with every step, kept under a budget by `attach`: peaks, gradients, time.

    PYTHONPATH=src:tests/support python -m benchmarks.changing_shapes --page benchmarks/results/....md

Every model trains on one stream of random sizes, four times in turns: unmanaged, under `attach`, with `torch.utils.checkpoint`
around every block, and, at a few of the sizes, under the best plan that is solved for just that size. Seconds are the
process's CPU time on one thread. Gradients are compared bit for bit in every step. Peaks are counted in a run of their own,
from outside (`tests/support/metering.py`). The budget lies between the floor and the unmanaged peak of the largest batch.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import plimsoll
from benchmarks.machine import device_name, page_head, versions
from benchmarks.page import format_table
from benchmarks.peers import checkpointing
from benchmarks.shaped_batches import Stream, streams
from metering import LiveStorages
from plimsoll.engine import region
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.units import MIB

_HEAD = (
    "model", "budget MiB", "unmanaged MiB", "highest step MiB", "steps over", "gradients equal", "recordings per region",
    "first steps, in steps", "attach ×", "checkpoint ×", "attach / best fixed", "attach / checkpoint", "all steps / best fixed",
)  # fmt: skip
_SETTLING = 40
"""Steps in which sizes are still traced, plans run for the first time and regions are recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What one stream showed. Times are sums over the steps after the first ones, over those of the unmanaged training."""

    name: str
    budget_bytes: int
    unmanaged_bytes: int
    peaks: list[int]
    is_equal: bool
    recordings: int
    settling_steps: float
    attach_ratio: float
    checkpoint_ratio: float
    fixed_ratio: float
    whole_ratio: float
    """All steps under `attach` over what the best fixed plans take by ``fixed_ratio``."""

    def cells(self) -> list[str]:
        over = sum(peak > self.budget_bytes for peak in self.peaks)
        return [
            self.name,
            f"{self.budget_bytes / MIB:.1f}",
            f"{self.unmanaged_bytes / MIB:.1f}",
            f"{max(self.peaks) / MIB:.1f}",
            f"{over} of {len(self.peaks)}",
            "yes" if self.is_equal else "NO",
            str(self.recordings),
            f"{self.settling_steps:.0f}",
            f"{self.attach_ratio:.2f}",
            f"{self.checkpoint_ratio:.2f}",
            f"{self.fixed_ratio:.2f}",
            f"{self.attach_ratio / self.checkpoint_ratio:.2f}",
            f"{self.whole_ratio:.2f}",
        ]


class _Training:
    """One model that trains by plain gradient descent."""

    def __init__(self, stream: Stream) -> None:
        self.model = stream.build()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.seconds: list[float] = []

    def step(self, batch: dict[str, Any], number: int) -> None:
        """Forward, backward and the optimizer's step, timed; gradients stay."""
        self._optimizer.zero_grad()
        torch.manual_seed(number)
        start = time.process_time()
        self.model(**batch)["loss"].backward()
        self.seconds.append(time.process_time() - start)
        self._optimizer.step()

    def ready(self) -> None:
        """Let go of gradients, as a plan is made without them."""
        self._optimizer.zero_grad()


def measure(stream: Stream, *, steps: int, share: float, sampled: int) -> Figures:
    """Run one stream."""
    random = torch.Generator().manual_seed(7)
    sizes = [stream.draw(random) for _ in range(steps)]
    torch.manual_seed(0)
    batches = [stream.batch(*each) for each in sizes]
    largest = max(range(steps), key=lambda at: torch.tensor(sizes[at]).prod().item())
    roomy = plimsoll.plan(stream.build(), batches[largest], budget="8GiB")
    budget_bytes = round(roomy.floor_bytes + share * (roomy.baseline_peak_bytes - roomy.floor_bytes))
    counted: Counter[str] = Counter()

    def counting(subject: Any, *given: Any) -> Any:
        counted[subject.name] += 1
        return _RECORD(subject, *given)

    plain, managed, checkpointed = _Training(stream), _Training(stream), _Training(stream)
    is_equal = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(region, "record_call", counting))
        stack.enter_context(plimsoll.attach(managed.model, budget_bytes))
        stack.enter_context(checkpointing.apply(checkpointed.model))
        for number, batch in enumerate(batches):
            turns = [plain, managed, checkpointed]
            for training in turns[number % 3 :] + turns[: number % 3]:
                training.step(batch, number)
            is_equal = is_equal and _same_gradients(plain.model, managed.model)
            for training in turns:
                training.ready()
        recordings = max(counted.values(), default=0)
        fixed_ratio = _beside_fixed(stream, managed, batches, budget_bytes, sampled)
    late = slice(_SETTLING, steps)
    base, streamed = sum(plain.seconds[late]), slice(steps)
    fixed_seconds = sum(managed.seconds[late]) / fixed_ratio * sum(plain.seconds[streamed]) / base
    return Figures(
        name=stream.name,
        budget_bytes=budget_bytes,
        unmanaged_bytes=roomy.baseline_peak_bytes,
        peaks=_peaks(stream, batches, budget_bytes),
        is_equal=is_equal,
        recordings=recordings,
        settling_steps=(sum(managed.seconds[:_SETTLING]) - sum(plain.seconds[:_SETTLING]))
        / statistics.mean(plain.seconds),
        attach_ratio=sum(managed.seconds[late]) / base,
        checkpoint_ratio=sum(checkpointed.seconds[late]) / base,
        fixed_ratio=fixed_ratio,
        whole_ratio=sum(managed.seconds[streamed]) / fixed_seconds,
    )


_RECORD = region.record_call


def _same_gradients(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(a.grad is b.grad or (a.grad is not None and torch.equal(a.grad, b.grad)) for a, b in pairs)


def _beside_fixed(stream: Stream, managed: _Training, batches: list[Any], budget_bytes: int, sampled: int) -> float:
    """Seconds under `attach` over those under a plan for just this size, over a few sizes; both have run it before."""
    ours = theirs = 0.0
    for at in range(0, len(batches), max(1, len(batches) // sampled)):
        fixed = _Training(stream)
        plan = plimsoll.plan(fixed.model, batches[at], budget=budget_bytes)
        with plimsoll.apply(fixed.model, plan, verify_every=0):
            for turn in range(5):
                for training in (fixed, managed) if turn % 2 else (managed, fixed):
                    training.step(batches[at], at)
                    training.ready()
        ours += statistics.median(managed.seconds[-4:])
        theirs += statistics.median(fixed.seconds[-4:])
    return ours / theirs


def _peaks(stream: Stream, batches: list[Any], budget_bytes: int) -> list[int]:
    """The peak of every step of a training under the budget, counted by storages."""
    with LiveStorages() as live, contextlib.ExitStack() as stack:
        training = _Training(stream)
        stack.enter_context(plimsoll.attach(training.model, budget_bytes))
        live.watch(training.model)
        for number, batch in enumerate(batches):
            # Views that the model takes make the counter count a batch: this one is gone after its step, the list's are not.
            training.step(_copied(batch), number)
            training.ready()
    return live.peaks[: len(batches)]


def _copied(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: it.clone() if isinstance(it, torch.Tensor) else it for name, it in batch.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.changing_shapes", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.4, help="of the way from the floor to the unmanaged peak")
    parser.add_argument("--sampled", type=int, default=10, help="at so many sizes the best fixed plan is run beside it")
    parser.add_argument("--page", type=Path, help="the file of a page of results")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    rows: list[Figures] = []
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for stream in streams():
            if not options.only or stream.name in options.only:
                rows.append(measure(stream, steps=options.steps, share=options.share, sampled=options.sampled))
                print(*zip(_HEAD, rows[-1].cells(), strict=True), sep="\n", flush=True)
    if options.page is not None:
        command = f"python -m benchmarks.changing_shapes --steps {options.steps} --share {options.share}"
        head = page_head(
            "Batches of changing size", command, device=device_name(torch.device("cpu")), versions=versions()
        )
        options.page.write_text(
            "\n".join([*head, *_EXPLAINED, "", *format_table(_HEAD, [r.cells() for r in rows]), ""])
        )
    return 0


_EXPLAINED = (
    "One stream of random sizes per model: lengths of 32 to 512, two lengths, padding, four sizes of images, graphs of 200 to "
    f"600 nodes with 2 to 8 edges each. *×*: CPU seconds of all steps but the first {_SETTLING} over the unmanaged training's, "
    f"in turns. *First steps*: what the first {_SETTLING} take on top, in unmanaged steps: traces, plans, recordings. *Best "
    "fixed*: a plan solved for just that size and applied, at a sample of sizes. *All steps*: with the first ones. *Highest "
    "step*: storages counted in a run of its own.",
)


if __name__ == "__main__":
    raise SystemExit(main())
