"""A budget that shrinks by 30% for 50 steps and returns: whether ``attach`` follows it, and what following costs.

    PYTHONPATH=src:tests/support python -m benchmarks.pressure

One model is attached with ``room=``, which says the budget, then 70% of it for 50 steps, then the budget again. Two twins run
the plans that are best for either all the time. In every step the first one and the twin whose plan is the right one for the
step run one after the other: the ratio of their processor seconds, over all steps, is what following costs. The peaks come from
a second run, where storages are counted from outside. Writes a page.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import plimsoll
import zoo
from benchmarks.machine import device_name, page_head, page_stem, versions
from benchmarks.page import format_table
from metering import LiveStorages
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.units import MIB

_BEFORE, _DURING, _AFTER = 40, 50, 50
_SETTLING = 6
_SHARE = 0.7
_ROWS, _TOKENS = 4, 128
_WIDTHS: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 192, "n_layer": 6, "n_positions": _TOKENS},
    "llama": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "max_position_embeddings": _TOKENS},
}
_PAGE = Path(__file__).parent / "results"


class Training:
    """A small language model, attached; ``room_bytes`` may be set."""

    def __init__(self, species: str, budget: int | str) -> None:
        torch.manual_seed(0)
        self.model = zoo.build(species, **_WIDTHS[species])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = zoo.words(_ROWS, _TOKENS)
        self.room_bytes = 2**40
        self.handle: Any = plimsoll.attach(self.model, budget, optimizer=self.optimizer, room=lambda: self.room_bytes)

    def step(self) -> float:
        """One step; the processor seconds that it took."""
        begin = time.process_time()
        self.model(**self.batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - begin

    def settle(self) -> Training:
        """Run the first steps, in which plans are made and recorded."""
        for _ in range(_SETTLING):
            self.step()
        return self


def schedule(budget: int) -> Iterator[int]:
    """The room of every step."""
    yield from [budget] * _BEFORE
    yield from [int(budget * _SHARE)] * _DURING
    yield from [budget] * _AFTER


def budget_of(species: str) -> int:
    """A budget of which 70% can still be kept to: 95% of what the step takes without a plan, if the floor allows that."""
    training = Training(species, "4GiB").settle()
    peak = training.handle.plan.predicted_peak_bytes
    training.handle.remove()
    return int(0.95 * peak)


def peaks(species: str, budget: int) -> tuple[list[int], list[int]]:
    """The peak of every step, and the steps in which the plan changed."""
    with LiveStorages() as live:
        training = Training(species, budget)
        live.watch(training.model)
        training.settle()
        first, plans = len(live.peaks), []
        for room in schedule(budget):
            training.room_bytes = room
            training.step()
            plans.append(training.handle.plan)
        training.handle.remove()
    changes = [i for i in range(1, len(plans)) if plans[i] is not plans[i - 1]]
    return live.peaks[first:], changes


def seconds(species: str, budget: int) -> tuple[float, float]:
    """Processor seconds of all steps: of the training that follows the room, and of the plans that are best for each."""
    following = Training(species, budget).settle()
    fixed = {room: Training(species, room).settle() for room in set(schedule(budget))}
    mine = best = 0.0
    for number, room in enumerate(schedule(budget)):
        following.room_bytes = room
        runs: list[tuple[bool, Callable[[], float]]] = [(True, following.step), (False, fixed[room].step)]
        for is_mine, step in runs if number % 2 else reversed(runs):
            took = step()
            mine, best = (mine + took, best) if is_mine else (mine, best + took)
    for each in (following, *fixed.values()):
        each.handle.remove()
    return mine, best


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pressure", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(_WIDTHS), default=list(_WIDTHS))
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    rows, is_right = [], True
    with one_thread():
        for species in options.models:
            budget = budget_of(species)
            found, changes = peaks(species, budget)
            rooms = list(schedule(budget))
            over = [i for i, (peak, room) in enumerate(zip(found, rooms, strict=True)) if peak > room]
            back = next((i - _BEFORE - _DURING + 1 for i in changes if i >= _BEFORE + _DURING), 0)
            mine, best = seconds(species, budget)
            late = [i for i in over if i > _BEFORE]
            is_right &= not late and 0 < back <= 10 and mine <= 1.05 * best and len(changes) == 2
            row = [
                species,
                f"{budget / MIB:.1f}",
                f"{_SHARE * budget / MIB:.1f}",
                f"{len(over)}",
                f"{len(changes)}",
                f"{back}",
            ]
            rows.append([*row, f"{mine:.1f}", f"{best:.1f}", f"{mine / best - 1:+.1%}"])
            print(" ".join(rows[-1]), flush=True)
    device = torch.device("cpu")
    head = (
        "model", "budget MiB", "for 50 steps", "steps over it", "changes of plan", "back after steps", "seconds",
        "of the best plans", "lost",
    )  # fmt: skip
    command = " ".join(["python -m benchmarks.pressure", *given])
    lines = [
        *page_head("A budget that shrinks and returns", command, device=device_name(device), versions=versions()),
        (__doc__ or "").split("\n\n")[2].replace("\n", " "),
        "",
        *format_table(head, rows),
    ]
    path = _PAGE / f"{page_stem(device, 'pressure')}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(path)
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
