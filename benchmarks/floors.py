"""Whether the floor that a refusal names is one: 40 small trainings, each refused, then run at what it was told.

    PYTHONPATH=src:tests python -m benchmarks.floors --cases 40

Every case asks for a KiB and is refused. It then runs at the budget that the refusal says to paste, and at one percent more:
every step has to stay within it, without a warning and without another refusal. The excess is what the floor lies above the
highest step of these runs. Storages are counted from outside in every step (`tests/metering.py`); torch's allocator events,
which hold what kernels take for themselves, in the steps that `attach` measures and in the last one. Prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn

import plimsoll
import zoo
from benchmarks.machine import versions
from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.calibration import MeasuredStep
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.meters.memory import PeakMeter
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.units import MIB, parse_bytes

_STEPS = 4
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
_MODES = ("attach", "plan")
_END = MeasuredStep.end


@dataclass(frozen=True, slots=True)
class Case:
    """One training: which model, on how many rows, with which optimizer, by which verb."""

    species: str
    rows: int
    optimizer: str
    mode: str

    def run(self, budget: int | str) -> int:
        """Train for a few steps under a budget; the highest peak of a step, everything counted."""
        seen: list[int] = []

        def end(step: MeasuredStep) -> bool:
            has_come_to_its_end = _END(step)
            seen.extend([step.step_peak_bytes] if has_come_to_its_end else [])
            return has_come_to_its_end

        with mock.patch.object(MeasuredStep, "end", end), LiveStorages() as live:
            torch.manual_seed(0)
            model = zoo.build(self.species)
            optimizer = _OPTIMIZERS[self.optimizer](model.parameters())
            batch = zoo.batch(self.species, self.rows)
            with self._managed(model, batch, optimizer, budget):
                live.watch(model)
                for _ in range(_STEPS):
                    step(model, batch, optimizer)
                static_bytes = TrainingStep(model, (), batch, optimizer=optimizer).static_bytes()
                with PeakMeter() as meter:  # nothing about this step is new, so it is metered by nobody else
                    step(model, batch, optimizer)
        return max(*live.peaks, *seen, static_bytes + meter.peak_bytes)

    @contextlib.contextmanager
    def _managed(
        self, model: nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, budget: int | str
    ) -> Iterator[None]:
        if self.mode == "attach":
            with plimsoll.attach(model, budget):
                yield
        else:
            with plimsoll.apply(model, plimsoll.plan(model, batch, budget, optimizer=optimizer)):
                yield


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor that a case was told, and the highest peaks of its runs at it and at one percent more."""

    case: Case
    bytes: int
    peak_bytes: int
    peak_above_bytes: int

    @property
    def excess(self) -> float:
        """The share by which the floor lies above what was measured."""
        return self.bytes / min(self.peak_bytes, self.peak_above_bytes) - 1

    @property
    def is_kept(self) -> bool:
        return self.peak_bytes <= self.bytes and self.peak_above_bytes <= above(self.bytes)


def step(model: nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """The usual loop's."""
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def above(bytes_: int) -> int:
    """One percent more."""
    return bytes_ * 101 // 100


def measured(case: Case) -> Floor:
    """What a case is told, and what it takes then.

    Raises:
        BudgetBelowFloor: what it was told is refused as well.
    """
    try:
        case.run("1KiB")
    except BudgetBelowFloor as refused:
        (told,) = re.findall(r'budget="([^"]+)"', refused.next)
    floor_bytes = parse_bytes(told)
    return Floor(case, floor_bytes, case.run(told), case.run(above(floor_bytes)))


def cases(count: int) -> list[Case]:
    """As many trainings, all models first."""
    found = [
        Case(species, rows, optimizer, _MODES[(place + turn) % 2])
        for turn, (rows, optimizer) in enumerate(itertools.product((4, 16), _OPTIMIZERS))
        for place, species in enumerate(zoo.SPECIES)
    ]
    return found[:count]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floors", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=40)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    print(f"Floors that refusals name; {', '.join(f'{k} {v}' for k, v in versions().items())}\n")
    print("| model | rows | optimizer | by | floor MiB | highest step | at 1% more | floor above it | kept |")
    print("|---|--:|---|---|--:|--:|--:|--:|---|")
    floors = []
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # an overrun would be one
        for case in cases(options.cases):
            try:
                floor = measured(case)
            except (BudgetBelowFloor, UserWarning) as failure:
                print(f"| {case.species} | {case.rows} | {case.optimizer} | {case.mode} | failed: {failure!r} |")
                continue
            floors.append(floor)
            mib = (f"{each / MIB:.3f}" for each in (floor.bytes, floor.peak_bytes, floor.peak_above_bytes))
            cells = (case.species, case.rows, case.optimizer, case.mode, *mib, f"{floor.excess:+.2%}", floor.is_kept)
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    kept = sum(floor.is_kept for floor in floors)
    close = sum(floor.excess <= 0.03 for floor in floors)
    print(f"\n{kept} of {options.cases} kept, {close} within 3% of what was measured.")
    return 0 if kept == close == options.cases else 1


if __name__ == "__main__":
    raise SystemExit(main())
