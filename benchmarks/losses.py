"""200 steps of training with AdamW, without and with a budget: are the losses the same numbers?

python -m benchmarks.losses --models llama gpt2 vit
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from contextlib import AbstractContextManager

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

from benchmarks.measure import run_step
from benchmarks.models import FAMILIES, SIZES, Case, build
from benchmarks.progress import say
from plimsoll.tracing.meters.timing import one_thread


def train(case: Case, context: AbstractContextManager[object], *, steps: int) -> list[float]:
    """Losses of ``steps`` steps from one seed; every step sees the batch shifted by one place more."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    losses = []
    with context:
        for step in range(steps):
            batch = {
                key: each.roll(step, -1) if isinstance(each, torch.Tensor) and each.dim() > 1 else each
                for key, each in case.batch.items()
            }
            optimizer.zero_grad(set_to_none=True)
            losses.append(run_step(dataclasses.replace(case, batch=batch), case.model))
            optimizer.step()
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES[:-1]))
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--share", type=float, default=0.3, help="budget: this far from the floor to the unmanaged peak"
    )
    options = parser.parse_args()
    with one_thread():
        return 1 if sum(not _is_same(name, options) for name in options.models) else 0


def _is_same(name: str, options: argparse.Namespace) -> bool:
    import plimsoll

    say(f"{name}: {options.steps} unmanaged steps")
    expected = train(build(name, options.size), contextlib.nullcontext(), steps=options.steps)
    case = build(name, options.size)
    whole = plimsoll.plan(case.model, case.batch, strategy="none", loss=case.loss)
    budget = int(whole.floor_bytes + options.share * (whole.baseline_peak_bytes - whole.floor_bytes))
    plan = plimsoll.plan(case.model, case.batch, budget=budget, loss=case.loss)
    say(f"{name}: {options.steps} steps in {budget / 2**20:.1f} MiB")
    found = train(case, plimsoll.apply(case.model, plan), steps=options.steps)
    same = found == expected
    verdict = "identical" if same else f"differ from step {_first_difference(found, expected)}"
    print(f"{name}: {expected[0]:.4f} to {expected[-1]:.4f} in {options.steps} steps; losses {verdict}", flush=True)
    return same


def _first_difference(found: list[float], expected: list[float]) -> int:
    return next(i for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)) if mine != theirs)


if __name__ == "__main__":
    raise SystemExit(main())
