"""Training frameworks under a budget in one line of their user's code, beside the framework's own switch.

    PYTHONPATH=src:tests/support python -m benchmarks.stacks --page benchmarks/results/....md

Every set-up trains from the same start, in processes of its own: without anything, with the framework's own activation
checkpointing, and under a budget of that one's peak. Peaks are counted from outside (`metering.py`), in runs of their
own; losses and weights are compared bit for bit. Seconds are the processes' CPU time per optimizer step on one thread. The
three take turns, one step each, once each has made its first steps: ratios are medians over these rounds. A set-up whose
floor is above the peak of the switch is given that floor, as the refusal names it. On several ranks a peak is the highest
of any rank, a step's seconds are the sum over ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
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
from benchmarks.stack_runs import Ended, metered, timed_in_turns
from benchmarks.stack_setups import accelerate, deepspeed, hugging_face, lightning, loops, torchtitan
from benchmarks.stack_setups.set_up import Arm, SetUp
from plimsoll.units import MIB

SET_UPS: tuple[SetUp, ...] = (
    *hugging_face.SET_UPS,
    *lightning.SET_UPS,
    *accelerate.SET_UPS,
    *torchtitan.SET_UPS,
    *deepspeed.SET_UPS,
    *loops.SET_UPS,
)
"""A framework's rows come from its file in ``stack_setups``."""
_HEAD = (
    "stack", "model", "precision", "accumulation", "shapes", "without MiB", "own switch MiB", "budget MiB", "highest step MiB",
    "steps over", "bits equal", "own switch ×", "ours ×", "ours / own switch", "quartiles", "load",
)  # fmt: skip


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
    beside_own: tuple[float, ...] = ()
    """Ours beside the own switch: the lower quartile, the median and the upper quartile of the rounds."""
    load: float = 0.0
    """Of the machine while it was timed: a mean over five minutes."""
    failure: str = ""

    @property
    def ratio(self) -> float:
        return self.beside_own[1] if self.beside_own else self.ours_ratio / self.own_ratio

    def cells(self) -> list[str]:
        if self.failure:
            return [*self.names, self.failure, *[""] * (len(_HEAD) - len(self.names) - 1)]
        over = sum(peak > self.budget_bytes for peak in self.peaks)
        sizes = (self.without_bytes, self.own_bytes, self.budget_bytes, max(self.peaks))
        quartiles = f"{self.beside_own[0]:.2f} to {self.beside_own[2]:.2f}" if self.beside_own else ""
        return [
            *self.names,
            *(f"{size / MIB:.2f}" for size in sizes),
            f"{over} of {len(self.peaks)}",
            "yes" if self.is_equal else "NO",
            f"{self.own_ratio:.2f}",
            f"{self.ours_ratio:.2f}",
            f"{self.ratio:.2f}",
            quartiles,
            f"{self.load:.1f}" if self.load else "",
        ]


def measure(set_up: SetUp, *, metered_steps: int, rounds: int) -> Row:
    """Run one set-up."""
    without, own = (_sound(metered(set_up, Arm(own_switch=switch), metered_steps)) for switch in (False, True))
    ours, budget_bytes = _kept(set_up, _peak(own), metered_steps)
    arms = (Arm(), Arm(own_switch=True), Arm(budget=budget_bytes))
    seconds = timed_in_turns(set_up, arms, taught=set_up.taught, rounds=rounds)
    return Row(
        names=_names(set_up),
        without_bytes=_peak(without),
        own_bytes=_peak(own),
        budget_bytes=budget_bytes,
        peaks=tuple(peak for each in ours for peak in each.peaks),
        is_equal=all(a.losses == b.losses and a.digest == b.digest for a, b in zip(ours, without, strict=True)),
        own_ratio=statistics.median(own / plain for plain, own, _ in seconds),
        ours_ratio=statistics.median(ours / plain for plain, _, ours in seconds),
        beside_own=tuple(statistics.quantiles((ours / own for _, own, ours in seconds), n=4)),
        load=os.getloadavg()[1],
    )


def _kept(set_up: SetUp, budget_bytes: int, steps: int) -> tuple[list[Ended], int]:
    """A metered run under a budget; where that is below the floor of some step, under that floor."""
    found = metered(set_up, Arm(budget=budget_bytes), steps)
    floor_bytes = max(each.floor_bytes for each in found)
    if floor_bytes:
        return _kept(set_up, max(floor_bytes, int(1.001 * budget_bytes)), steps)
    return _sound(found), budget_bytes


def _sound(ended: list[Ended]) -> list[Ended]:
    failure = next((each.failure for each in ended if each.failure), "")
    if failure:
        raise RuntimeError(failure)
    return ended


def _peak(ended: list[Ended]) -> int:
    return max(peak for each in ended for peak in each.peaks)


def _names(set_up: SetUp) -> tuple[str, ...]:
    stack = set_up.stack if set_up.ranks == 1 else f"{set_up.stack}, {set_up.ranks} ranks"
    return stack, set_up.model, set_up.precision, str(set_up.accumulation), set_up.shapes


def _measured(set_up: SetUp, metered_steps: int, rounds: int) -> Row:
    try:
        return measure(set_up, metered_steps=metered_steps, rounds=rounds)
    except Exception as error:  # noqa: BLE001 - one row that cannot run leaves the others
        return Row(names=_names(set_up), failure=str(error).partition("\n")[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write the page where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="set-ups whose name holds this text")
    parser.add_argument("--steps", type=int, default=6, help="steps that are metered")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each arm that are timed")
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
            if set_up.requires and importlib.util.find_spec(set_up.requires) is None:
                print(f"{set_up.name}: skipped, as {set_up.requires} is not installed")
                continue
            known[set_up.name] = asdict(_measured(set_up, given.steps, given.rounds))
            if given.rows is not None:
                given.rows.write_text(json.dumps(known))
        tuples = {name: tuple(value) for name, value in known[set_up.name].items() if isinstance(value, list | tuple)}
        rows.append(Row(**{**known[set_up.name], **tuples}))
        print(" | ".join(rows[-1].cells()), flush=True)
    ratios = [row.ratio for row in rows if not row.failure]
    median = f"{statistics.median(ratios):.2f}" if ratios else "not measured"
    summary = f"Median of ours / own switch: {median}, over {len(ratios)} set-ups."
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
