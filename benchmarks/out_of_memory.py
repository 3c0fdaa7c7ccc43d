"""Whether running out of memory loses anything: a step that fails at a random moment, in 40 small trainings.

    PYTHONPATH=src:tests/support python -m benchmarks.out_of_memory --cases 40

Every training has dropout where its model has some, two micro-batches per step, a gradient scaler, clipped gradients, a
scheduler and an evaluation. Its steps run in ``handle.step(...)``. In one of them an op that was drawn at random raises
``torch.OutOfMemoryError``, as an allocator does: in forward, backward, between them or in the optimizer. The training has to
come to its end under a tighter plan, and be bit for bit the one that had this plan from its first step: losses, parameters,
buffers, the optimizer's state, the scaler and random states. Writes a page.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import plimsoll
import zoo
from benchmarks.machine import device_name, page_head, page_stem, versions
from benchmarks.page import format_table
from metering import Device
from plimsoll.artifacts.plan import Plan
from plimsoll.tracing.meters.timing import one_thread

_STEPS, _FAILING, _MICRO = 5, 3, 2
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}
_SPECIES = ("gpt2", "bert", "llama", "t5", "vit", "resnet", "mixtral", "swin")
_MODES = ("attach", "apply")
_PARTS = ("forward", "backward", "optimizer", "after it")
_PAGE = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Run:
    """A training that has come to its end: what it was at the end, under which plan, and how often it failed."""

    state: list[Any]
    plan: Plan
    failures: int
    ops: dict[str, list[tuple[int, int]]]
    """Of the step that may fail: the ops of each part, from and to."""

    def is_equal(self, other: Run) -> bool:
        """Whether both are the same, bit for bit."""
        pairs = list(zip(self.state, other.state, strict=True))
        return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Case:
    """One training: which model and optimizer, by which verb."""

    species: str
    optimizer: str
    mode: str

    def run(self, *, fails_at: int = 0, plan: Plan | None = None) -> Run:
        """Train for a few steps; one of them fails at its n-th op (0: none). With a plan, under that from the start on."""
        model = zoo.build(self.species)
        optimizer = _OPTIMIZERS[self.optimizer](model.parameters())
        training = _Training(model, optimizer, zoo.batch(self.species, 4))
        if plan is None and self.mode == "attach":
            handle: Any = plimsoll.attach(model, "1GiB", optimizer=optimizer)
        else:
            handle = plimsoll.apply(model, plan or plimsoll.plan(model, training.batch, "1GiB", optimizer=optimizer))
        torch.manual_seed(1)
        losses = []
        with handle:
            for number in range(_STEPS):
                if number != _FAILING:
                    losses.append(handle.step(training.step, training.batch))
                    continue
                with Device(fails_at=fails_at).standing_in() as device:
                    losses.append(handle.step(training.step, training.batch, device))
            at_work = handle.plan
        return Run([*losses, *training.state()], at_work, device.failures, training.ops)

    def moments(self, count: int, seed: int) -> list[tuple[str, int]]:
        """So many random ops of a step that does not fail, each with the part that it belongs to."""
        ops = self.run().ops
        draw = random.Random(f"{self} {seed}")
        parts = [part for part in _PARTS if ops.get(part)]
        # The parts in turn, or nearly all would lie in backward.
        chosen = list(itertools.islice(itertools.cycle(parts), seed % len(parts), seed % len(parts) + count))
        return [(part, draw.randint(*draw.choice(ops[part]))) for part in chosen]


class _Training:
    """A training loop's body and everything that it changes."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.ops: dict[str, list[tuple[int, int]]] = {}

    def step(self, batch: dict[str, Any], device: Device | None = None) -> list[float]:
        """Two micro-batches, the optimizer's step and an evaluation."""
        if device is not None:
            self._begin, self.ops = device.ops, {}
        losses = []
        for _ in range(_MICRO):
            loss = self.model(**batch).loss / _MICRO
            self._ended("forward", device)
            self.scaler.scale(loss).backward()
            self._ended("backward", device)
            losses.append(loss.item())
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self._ended("optimizer", device)
        self.model.eval()
        with torch.no_grad():
            losses.append(self.model(**batch).loss.item())
        self.model.train()
        self._ended("after it", device)
        return losses

    def _ended(self, part: str, device: Device | None) -> None:
        if device is not None and device.ops > self._begin:
            self.ops.setdefault(part, []).append((self._begin + 1, device.ops))
            self._begin = device.ops

    def state(self) -> list[Any]:
        """All of it, copied."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *states, torch.get_rng_state()]
        flags = [module.training for module in self.model.modules()]
        copies = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in tensors]
        return [
            *copies,
            flags,
            self.scaler.state_dict(),
            self.scheduler.state_dict(),
            self.optimizer.param_groups[0]["lr"],
        ]


def cases(count: int) -> list[Case]:
    """As many trainings, all models first."""
    kinds = itertools.cycle(itertools.product(_MODES, _OPTIMIZERS))
    return [
        Case(species, optimizer, mode) for species, (mode, optimizer) in zip(_SPECIES * count, kinds, strict=False)
    ][:count]


def told(case: Case, part: str, moment: int) -> tuple[list[str], bool]:
    """A row of the table, and whether the case is as it has to be."""
    found = case.run(fails_at=moment)
    reference = case.run(plan=found.plan)
    is_equal = found.is_equal(reference)
    dropped = sum(len(region.dropped) for region in found.plan.regions)
    row = [case.species, case.optimizer, case.mode, part, str(moment), str(found.failures), str(dropped)]
    return [*row, "equal" if is_equal else "**differ**"], is_equal and found.failures > 0 and dropped > 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.out_of_memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--cases", type=int, default=40)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    rows, right = [], 0
    with one_thread():
        for seed, case in enumerate(cases(options.cases)):
            ((part, moment),) = case.moments(1, seed)
            row, is_right = told(case, part, moment)
            rows.append(row)
            right += is_right
            print(" ".join(row), flush=True)
    device = torch.device("cpu")
    head = ("model", "optimizer", "verb", "fails in", "at op", "failures", "values dropped after it", "bits")
    command = " ".join(["python -m benchmarks.out_of_memory", *given])
    lines = [
        *page_head("Out of memory", command, device=device_name(device), versions=versions()),
        (__doc__ or "").split("\n\n")[2].replace("\n", " "),
        "",
        f"{right} of {len(rows)} came to their end under a tighter plan, with the bits of a training that had it from its "
        "first step.",
        "",
        *format_table(head, rows),
    ]
    path = _PAGE / f"{page_stem(device, 'out-of-memory')}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\n{right} of {len(rows)} right; {path}")
    return 0 if right == len(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
