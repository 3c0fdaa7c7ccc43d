"""Whether the floor that a refusal names is one: 40 small trainings, each refused, then run at what it was told.

    PYTHONPATH=src:tests/support python -m benchmarks.floors

Every case asks for a KiB and is refused. It then runs at the budget that the refusal says to paste, and at one percent more:
every step has to stay within that, without a warning and without another refusal. The excess is what the floor lies above
the highest step of these runs. Storages are counted from outside in every step (`metering.py`, one process). Torch's
allocator events, which hold what kernels take for themselves, are read in every step under an applied plan; under `attach`
in the steps that it measures itself, and in the last two. Writes a page.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import plimsoll
import zoo
from benchmarks.launching import launch
from benchmarks.machine import device_name, page_head, versions
from metering import LiveStorages
from plimsoll.errors import BudgetBelowFloor, PlimsollError
from plimsoll.session.measured_step import MeasuredStep, held_tensors
from plimsoll.tracing.ddp import bucket_bytes, has_rebuilt_buckets
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.units import MIB, parse_bytes

_STEPS = 8
_MICRO_BATCHES = 4
CLOSE = 0.03
"""A floor lies at most so much above the highest step that was measured."""
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.01, max_iter=2, history_size=2),
}
Batch = dict[str, Any]


class CheckpointedHead(nn.Module):
    """A decoder whose head and loss its author checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = zoo.build("llama")

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.lm.model(input_ids=input_ids).last_hidden_state
        return {"loss": checkpoint(self._loss, hidden, labels, use_reentrant=False)}

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.lm.lm_head(hidden).flatten(0, 1), labels.flatten())


@dataclass(frozen=True, slots=True)
class Case:
    """One training: which model, by which verb, with which optimizer, in which loop, on one process or on two."""

    species: str
    mode: str = "attach"
    optimizer: str = "AdamW"
    loop: str = "plain"
    layout: str = ""
    rows: int = 16

    def run(self, budget: int | str) -> tuple[int, list[str]]:
        """Train for some steps under a budget: the highest peak of a step on any rank, and what was warned of."""
        with LiveStorages() as live, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            training = Training(self)
            with training.managed(budget):
                live.watch(training.model)
                for number in range(_STEPS):
                    with (
                        training.metered() if self.mode == "plan" or number >= _STEPS - 2 else contextlib.nullcontext()
                    ):
                        training.step()
        own_bytes = max(training.peaks if self.layout else (*live.peaks, *training.peaks))
        said = [str(entry.message) for entry in caught if "plimsoll" in str(entry.message)]
        told = across((own_bytes, said))
        return max(peak for peak, _ in told), [text for _, texts in told for text in texts]

    def __str__(self) -> str:
        return " | ".join((self.species, self.mode, self.optimizer, self.loop, self.layout or "one process"))


class Training:
    """A case's model, optimizer and batch, its step, and the peaks that were measured."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = CheckpointedHead() if case.species == "checkpointed head" else zoo.build(case.species)
        self.batch = self._batch()
        if case.layout == "fsdp2":
            for block in self.model.model.layers if case.species == "llama" else self.model.transformer.h:
                fully_shard(block)
            fully_shard(self.model)
        elif case.layout == "ddp":
            self.model = DistributedDataParallel(self.model)
        self.optimizer = _OPTIMIZERS[case.optimizer](self.model.parameters())
        self.peaks: list[int] = []

    def _batch(self) -> Batch:
        if self.case.species == "checkpointed head":
            return zoo.words(self.case.rows)
        if self.case.loop == "lengths":
            return zoo.words(self.case.rows, zoo.TOKENS * (1 + dist.get_rank()))
        return zoo.batch(self.case.species, self.case.rows)

    @contextlib.contextmanager
    def managed(self, budget: int | str) -> Iterator[None]:
        """Under the budget, by the verb of the case."""
        if self.case.mode == "attach":
            with (
                mock.patch("plimsoll.session.step_watch.MeasuredStep", self._noting()),
                plimsoll.attach(self.model, budget),
            ):
                yield
            return
        if self.case.loop == "accumulates":  # as the documentation says: plan when the first micro-batch has been
            self._backward(is_last=False)
        plan = plimsoll.plan(self.model, self.batch, budget, optimizer=self.optimizer)
        with plimsoll.apply(self.model, plan):
            yield

    def step(self) -> None:
        """The loop's."""
        if self.case.loop == "closure":
            self.optimizer.step(self._closure)
        else:
            count = _MICRO_BATCHES if self.case.loop == "accumulates" else 1
            for number in range(count):
                self._backward(is_last=number == count - 1)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(**self.batch).loss
        loss.backward()
        return loss

    def _backward(self, *, is_last: bool) -> None:
        waits = contextlib.nullcontext()
        if self.case.layout == "fsdp2":
            self.model.set_requires_gradient_sync(is_last)
        elif self.case.layout == "ddp" and not is_last:
            waits = self.model.no_sync()
        with waits:
            output = self.model(**self.batch)
            output["loss"].backward()

    @contextlib.contextmanager
    def metered(self) -> Iterator[None]:
        """Measure what runs inside, when nobody else does."""
        held = held_tensors(self.model, (), self.batch)
        static_bytes = storage_bytes(held, "cpu") + bucket_bytes(self.model) + self._state_bytes()
        had_rebuilt = has_rebuilt_buckets(self.model)
        with PeakMeter() as meter:
            yield
        if has_rebuilt_buckets(self.model) and not had_rebuilt:
            static_bytes -= bucket_bytes(self.model)
        self.peaks.append(static_bytes + meter.peak_bytes)

    def _state_bytes(self) -> int:
        return storage_bytes(output_tensors(list(self.optimizer.state.values())))

    def _noting(self) -> type[MeasuredStep]:
        """The measurement of a step as `attach` makes it, and its result, optimizer and all."""
        training = self

        class Noting(MeasuredStep):
            def __init__(self, *arguments: Any) -> None:
                self.state_bytes = training._state_bytes()
                super().__init__(*arguments)

            def end(self) -> bool:
                is_whole = super().end()
                if is_whole:
                    training.peaks.append(max(self.step_peak_bytes, self.optimizer_peak_bytes) + self.state_bytes)
                return is_whole

        return Noting


@dataclass(frozen=True, slots=True)
class Floor:
    """The floor that a case was told, the highest peaks of its runs at it and at one percent more, and what was said then.

    At the very floor it may be refused again (``None``): workspaces of convolutions differ by some bytes from run to run.
    """

    case: Case
    bytes: int
    peak_bytes: int | None
    peak_above_bytes: int
    said: list[str]

    HEAD: ClassVar[tuple[str, ...]] = (
        "| model | by | optimizer | loop | on | floor MiB | highest step | at 1% more | floor above it | kept |",
        "|---|---|---|---|---|--:|--:|--:|--:|---|",
    )

    @property
    def excess(self) -> float:
        """The share by which the floor lies above what was measured."""
        return self.bytes / min(self.peak_bytes or self.peak_above_bytes, self.peak_above_bytes) - 1

    @property
    def is_kept(self) -> bool:
        """Whether a budget one percent above the floor was kept at once, without a word."""
        return self.peak_above_bytes <= above(self.bytes) and not self.said

    def __str__(self) -> str:
        measured = (self.bytes, self.peak_bytes, self.peak_above_bytes)
        mib = ("refused" if each is None else f"{each / MIB:.3f}" for each in measured)
        cells = (self.case, *mib, f"{self.excess:+.2%}", "yes" if self.is_kept else f"no: {self.said[:1]}")
        return f"| {' | '.join(map(str, cells))} |"


def above(bytes_: int) -> int:
    """One percent more."""
    return bytes_ * 101 // 100


def across(value: Any) -> list[Any]:
    """The value of every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def told_by(refusal: PlimsollError, loop: str) -> int:
    """The budget that a refusal says to paste, for a loop like this."""
    budgets = re.findall(r'budget[= ]"([^"]+)"', refusal.next)
    return parse_bytes(budgets[-1 if loop == "accumulates" else 0])


def measured(case: Case) -> Floor:
    """What a case is told, and what it takes then. On several ranks all call this.

    Raises:
        BudgetBelowFloor: one percent more than it was told is refused as well; ``RankFailed`` where another rank is told so.
    """
    try:
        case.run("1KiB")
    except PlimsollError as refusal:
        floor_bytes = told_by(refusal, case.loop)
    peak_bytes: int | None = None
    with contextlib.suppress(PlimsollError):
        peak_bytes, _ = case.run(floor_bytes)
    return Floor(case, floor_bytes, peak_bytes, *case.run(above(floor_bytes)))


def cases() -> list[Case]:
    """All trainings, those on one process first."""
    kinds = list(_OPTIMIZERS)[:-1]
    plain = [
        Case(species, ("attach", "plan")[(place + turn) % 2], kinds[(place + 2 * turn) % len(kinds)])
        for turn in range(2)
        for place, species in enumerate(zoo.SPECIES)
    ]
    loops = [
        *(Case("checkpointed head", mode) for mode in ("attach", "plan")),
        *(Case("llama", mode, loop="accumulates") for mode in ("attach", "plan")),
        *(Case("resnet", mode, "SGD", loop="accumulates") for mode in ("attach", "plan")),
        Case("vit", "attach", loop="closure"),
        *(Case(species, "attach", "LBFGS", loop="closure", rows=96) for species in ("vit", "bert")),
        Case("gpt2", "plan", loop="closure"),
    ]
    ranks = [
        Case("gpt2" if (loop, mode) == ("plain", "plan") else "llama", mode, "SGD", loop, layout)
        for layout in ("ddp", "fsdp2")
        for loop in ("plain", "lengths", "accumulates")
        for mode in ("attach", "plan")
        if (loop, mode) != ("lengths", "plan")  # a plan is for ranks with batches of the same shape
    ]
    return [*plain, *loops, *ranks]


def found(case: Case) -> Floor | str:
    """What was measured of a case, or how it failed."""
    try:
        return launch(2, "benchmarks.floors:measured", case)[0] if case.layout else measured(case)
    except Exception as failure:  # noqa: BLE001 - a case that fails is a result
        is_ours = isinstance(failure, BudgetBelowFloor)
        return f"| {case} | failed: {failure.found if is_ours else str(failure)[-600:]} |"


def _head() -> list[str]:
    cpu = torch.device("cpu")
    command = "PYTHONPATH=src:tests/support python -m benchmarks.floors --page PAGE"
    head = page_head("Floors that refusals name", command, device=device_name(cpu), versions=versions())
    text = (__doc__ or "").split("\n\n")[2].replace("\n", " ").strip()
    return [*head, text, ""]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floors", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", type=re.compile, default="", help="only cases whose row matches this")
    parser.add_argument("--page", type=Path, help="the file of a page of results")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    chosen = [case for case in cases() if re.search(options.only, str(case))]
    rows: list[Floor | str] = []
    print(*Floor.HEAD, sep="\n")
    with one_thread():
        for case in chosen:
            rows.append(found(case))
            print(rows[-1], flush=True)
    floors = [row for row in rows if isinstance(row, Floor)]
    kept, close = sum(floor.is_kept for floor in floors), sum(floor.excess <= CLOSE for floor in floors)
    verdict = f"{kept} of {len(chosen)} kept, {close} within 3% of what was measured"
    verdict = f"{verdict}, the furthest {max((floor.excess for floor in floors), default=0.0):+.2%}."
    print(f"\n{verdict}")
    if options.page is not None:
        options.page.write_text("\n".join([*_head(), verdict, "", *Floor.HEAD, *map(str, rows), ""]))
    return 0 if kept == close == len(chosen) else 1


if __name__ == "__main__":
    from benchmarks import floors  # by the name under which the ranks know it

    raise SystemExit(floors.main())
