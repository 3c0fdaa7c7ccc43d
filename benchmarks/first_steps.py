"""How many steps' time the first two steps under ``plimsoll.attach`` take: one is traced, one solved for and tried.

    python -m benchmarks.first_steps llama gpt2 vit "T5, 8 + 8 blocks"

Processor seconds on one thread, over the median of the unmanaged step; 40% of the way from the floor to the unmanaged peak,
AdamW. Models are the families of ``benchmarks.models`` at size ``cpu``, and those of ``benchmarks.planning_speed``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import plimsoll
from benchmarks.models import FAMILIES, build
from benchmarks.planning_speed import MODELS, model_and_batch

_SHARE = 0.4
_Case = tuple[nn.Module, dict[str, Any], Callable[[Any], torch.Tensor]]


def made(name: str) -> _Case:
    """A model, its batch and its loss, the same every time."""
    if name in FAMILIES:
        case = build(name)
        return case.model, case.batch, case.loss
    return *model_and_batch(name), lambda output: output.loss


def trainer(case: _Case) -> tuple[torch.optim.Optimizer, Callable[[], float]]:
    """An optimizer, and a step of training that returns its processor seconds."""
    model, batch, loss = case
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        start = time.process_time()
        loss(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    return optimizer, step


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_steps", description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*FAMILIES, *MODELS], metavar="MODEL")
    names = parser.parse_args().names
    if len(names) > 1:  # a fresh Python for each
        for name in names:
            subprocess.run([sys.executable, "-m", "benchmarks.first_steps", name], check=False)
        return 0
    (name,) = names
    torch.set_num_threads(1)
    case = made(name)
    optimizer, step = trainer(case)
    free = plimsoll.plan(case[0], case[1], loss=case[2], strategy="none", optimizer=optimizer)
    unmanaged = statistics.median([step() for _ in range(5)][2:])
    case = made(name)
    optimizer, step = trainer(case)
    budget = int(free.floor_bytes + _SHARE * (free.baseline_peak_bytes - free.floor_bytes))
    with plimsoll.attach(case[0], budget=budget, optimizer=optimizer):
        first, second, *later = (step() / unmanaged for _ in range(6))
    print(
        f"{name}: unmanaged step {unmanaged * 1e3:.0f} ms; first step {first:.1f} steps' time, second {second:.1f}, "
        f"later ones {statistics.median(later):.2f}; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
