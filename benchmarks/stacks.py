"""Training frameworks under a budget in one line of their user's code, beside the framework's own switch.

    PYTHONPATH=src:tests python -m benchmarks.stacks --page benchmarks/results/....md

Every set-up trains three times from the same start: without anything, with the framework's own activation checkpointing, and
under a budget of that one's peak. Peaks are counted from outside (`tests/metering.py`), in runs of their own; losses and
weights are compared bit for bit; seconds are the process's CPU time per optimizer step on one thread, medians of the later
steps. A set-up whose floor is above the peak of the switch is given 5% above its floor.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from benchmarks.machine import device_name, page_head, versions
from benchmarks.page import format_table
from benchmarks.stack_setups import accelerate, hugging_face, lightning
from benchmarks.stack_setups.set_up import Arm, SetUp, Watch
from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.units import MIB

SET_UPS: tuple[SetUp, ...] = (*hugging_face.SET_UPS, *lightning.SET_UPS, *accelerate.SET_UPS)
"""A framework's rows come from its file in ``stack_setups``."""
_HEAD = (
    "stack", "model", "precision", "accumulation", "shapes", "without MiB", "own switch MiB", "budget MiB", "highest step MiB",
    "steps over", "bits equal", "own switch ×", "ours ×", "ours / own switch",
)  # fmt: skip
_TAUGHT = 5
"""Steps in which plans are made and regions are recorded."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one set-up showed."""

    names: tuple[str, ...]
    without_bytes: int = 0
    own_bytes: int = 0
    budget_bytes: int = 0
    peaks: tuple[int, ...] = ()
    is_equal: bool = False
    own_ratio: float = 0.0
    ours_ratio: float = 0.0
    failure: str = ""

    def cells(self) -> list[str]:
        if self.failure:
            return [*self.names, self.failure, *[""] * (len(_HEAD) - len(self.names) - 1)]
        over = sum(peak > self.budget_bytes for peak in self.peaks)
        sizes = (self.without_bytes, self.own_bytes, self.budget_bytes, max(self.peaks))
        return [
            *self.names,
            *(f"{size / MIB:.2f}" for size in sizes),
            f"{over} of {len(self.peaks)}",
            "yes" if self.is_equal else "NO",
            f"{self.own_ratio:.2f}",
            f"{self.ours_ratio:.2f}",
            f"{self.ours_ratio / self.own_ratio:.2f}",
        ]


def measure(set_up: SetUp, *, metered_steps: int, timed_steps: int) -> Row:
    """Run one set-up."""
    names = (set_up.stack, set_up.model, set_up.precision, str(set_up.accumulation), set_up.shapes)
    without, own = (_run(set_up, Arm(own_switch=switch), metered_steps, is_metered=True) for switch in (False, True))
    ours, budget_bytes = _kept(set_up, max(own.peaks), metered_steps)
    arms = (Arm(), Arm(own_switch=True), Arm(budget=budget_bytes))
    seconds = [statistics.median(_run(set_up, arm, timed_steps).step_seconds[_TAUGHT:]) for arm in arms]
    return Row(
        names=names,
        without_bytes=max(without.peaks),
        own_bytes=max(own.peaks),
        budget_bytes=budget_bytes,
        peaks=tuple(ours.peaks),
        is_equal=ours.losses == without.losses and all(map(torch.equal, ours.weights, without.weights)),
        own_ratio=seconds[1] / seconds[0],
        ours_ratio=seconds[2] / seconds[0],
    )


def _kept(set_up: SetUp, budget_bytes: int, steps: int) -> tuple[Watch, int]:
    """A metered run under a budget; where that is below the floor of some step, under 5% more than the floor."""
    try:
        return _run(set_up, Arm(budget=budget_bytes), steps, is_metered=True), budget_bytes
    except BudgetBelowFloor as error:
        floor_bytes = max(map(int, re.findall(r"\((\d+) bytes\)", error.next)))
        return _kept(set_up, int(1.05 * max(floor_bytes, budget_bytes)), steps)


def _run(set_up: SetUp, arm: Arm, steps: int, *, is_metered: bool = False) -> Watch:
    watch = Watch(LiveStorages() if is_metered else None)
    set_up.train(watch, arm, steps)
    return watch


def _measured(set_up: SetUp, metered_steps: int, timed_steps: int) -> Row:
    try:
        return measure(set_up, metered_steps=metered_steps, timed_steps=timed_steps)
    except Exception as error:  # noqa: BLE001 - one row that cannot run leaves the others
        names = (set_up.stack, set_up.model, set_up.precision, str(set_up.accumulation), set_up.shapes)
        return Row(names=names, failure=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write the page where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="set-ups whose name holds this text")
    parser.add_argument("--steps", type=int, default=6, help="steps that are metered")
    parser.add_argument("--timed-steps", type=int, default=25)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--rows", type=Path, help="a file of rows: those that it has are not measured again")
    parser.add_argument("--known", action="store_true", help="no others than the rows of that file")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.set_verbosity_error()
    known = {} if given.rows is None or not given.rows.exists() else json.loads(given.rows.read_text())
    rows = []
    for set_up in SET_UPS:
        if given.only not in set_up.name or (given.known and set_up.name not in known):
            continue
        if set_up.name not in known:
            with one_thread():
                known[set_up.name] = asdict(_measured(set_up, given.steps, given.timed_steps))
            if given.rows is not None:
                given.rows.write_text(json.dumps(known))
        rows.append(Row(**{**known[set_up.name], "names": tuple(known[set_up.name]["names"])}))
        print(" | ".join(rows[-1].cells()), flush=True)
    ratios = [row.ours_ratio / row.own_ratio for row in rows if not row.failure]
    summary = f"Median of ours / own switch: {statistics.median(ratios):.2f}, over {len(ratios)} set-ups."
    table = format_table(_HEAD, [row.cells() for row in rows])
    if given.page is not None:
        command = "python -m benchmarks.stacks"
        head = page_head(
            "Training frameworks under a budget", command, device=device_name(torch.device("cpu")), versions=versions()
        )
        given.page.write_text("\n".join([*head, (__doc__ or "").partition("\n\n")[2], summary, "", *table, ""]))
    print(summary)
    return int(any(row.failure or not row.is_equal for row in rows))


if __name__ == "__main__":
    sys.exit(main())
