"""Compares training whose optimizer steps in backward with training whose optimizer steps at the end: the lowest budgets, the
weights after many steps, the peaks and the times.

    PYTHONPATH=src python -m benchmarks.backward_steps > page.md
    PYTHONPATH=src python -m benchmarks.backward_steps --only GPT-2 --rounds 12 --steps 20

Steps are whole: forward, backward, the optimizer's step and ``zero_grad``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.optim import Optimizer

import plimsoll
from benchmarks.machine import device_name, page_head, versions
from benchmarks.page import format_table
from benchmarks.progress import say
from plimsoll.artifacts.plan import Plan
from plimsoll.errors import BudgetBelowFloor
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes
from plimsoll.tracing.meters.timing import one_thread
from plimsoll.tracing.recorder.calling import output_tensors
from plimsoll.units import MIB

AT_END = ("recompute",)
IN_BACKWARD = ("recompute", "step-in-backward")
_HEAD = (
    "model", "optimizer", "gradients MiB", "unmanaged MiB", "floor MiB", "floor in backward MiB", "in backward / at end",
    "equal after", "predicted / measured", "time at the floor at end", "in backward, same budget", "in backward / at end",
    "in backward, own floor", "predicted",
)  # fmt: skip
_LEGEND = (
    "*Floor*: the smallest budget, as a refusal names it; *in backward*: with `step-in-backward` allowed. *Equal after*: steps "
    "until which all weights and all optimizer state are equal bit for bit to training without Plimsoll, under the plan at the "
    "floor in backward. *Predicted / measured*: that plan's peak, over the highest counted peak of its steps. *Times*: medians "
    "of processor seconds over the unmanaged step of the same round; the budget of the first two is the floor at end. "
    "*Predicted*: the plan's own figure for the last one."
)


@dataclass(frozen=True)
class Kind:
    """A model, its batches and its optimizer."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    optimizer: Callable[[Any], Optimizer]


@dataclass
class Row:
    """The figures of one model. Times are shares of the unmanaged step's processor time."""

    kind: str
    optimizer: str
    gradients_mib: float
    unmanaged_mib: float
    floor_mib: float
    floor_in_backward_mib: float
    equal_steps: int
    predicted_share: float
    time_at_end: float
    time_in_backward: float
    time_ratio: float
    time_at_floor: float
    predicted_time: float


def _tokens(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 512, (1, 256), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def _pixels(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(4, 3, 64, 64, generator=draw),
        "labels": torch.randint(0, 2, (4,), generator=draw),
    }


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=256, n_layer=6, n_head=4, vocab_size=512, n_positions=256)
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4, vocab_size=512
    )
    return transformers.LlamaForCausalLM(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4, image_size=64, patch_size=8
    )
    return transformers.ViTForImageClassification(config)


def _adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("GPT-2", _gpt2, _tokens, _adamw),
        Kind("Llama", _llama, _tokens, _adamw),
        Kind("ViT", _vit, _pixels, _sgd),
    )
}


@dataclass
class Training:
    """A model with its optimizer and batches. Each call of `step` draws the random numbers of its own step."""

    kind: Kind
    model: nn.Module
    optimizer: Optimizer

    @classmethod
    def of(cls, kind: Kind, model: nn.Module) -> Training:
        own = copy.deepcopy(model)
        return cls(kind, own, kind.optimizer(own.parameters()))

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        output = self.model(**self.kind.batch(number))
        output.loss.backward()
        del output
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self, number: int) -> int:
        """Run one step, and return its peak: parameters, buffers and state from before, and what the step allocates."""
        state = output_tensors([list(self.optimizer.state.values())])
        held = [*self.model.parameters(), *self.model.buffers(), *state]
        with PeakMeter(torch.device("cpu"), held=held) as meter:
            self.step(number)
        return storage_bytes(held, "cpu") + meter.peak_bytes

    def is_equal(self, other: Training) -> bool:
        """Return True if all weights and all optimizer state are equal bit for bit to another training's."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return all(
            torch.equal(mine, theirs)
            and self.optimizer.state[mine].keys() == other.optimizer.state[theirs].keys()
            and all(
                torch.equal(torch.as_tensor(value), torch.as_tensor(other.optimizer.state[theirs][key]))
                for key, value in self.optimizer.state[mine].items()
            )
            for mine, theirs in pairs
        )


def _planned(kind: Kind, model: nn.Module, budget: int | str, allow: tuple[str, ...]) -> Plan:
    own = copy.deepcopy(model)
    return plimsoll.plan(own, kind.batch(0), budget, optimizer=kind.optimizer(own.parameters()), allow=allow)


def _floor(kind: Kind, model: nn.Module, allow: tuple[str, ...]) -> int:
    try:
        _planned(kind, model, "1KiB", allow)
    except BudgetBelowFloor as refusal:
        return int(refusal.next.partition("(")[2].partition(" bytes")[0])
    raise AssertionError("a budget of one KiB is kept")


def measure(kind: Kind, rounds: int, steps: int) -> Row:
    """Return the figures of one model."""
    torch.manual_seed(0)
    model = kind.make().train()
    floor, floor_in_backward = _floor(kind, model, AT_END), _floor(kind, model, IN_BACKWARD)
    at_end = _planned(kind, model, floor, AT_END)
    same = _planned(kind, model, floor, IN_BACKWARD)
    lowest = _planned(kind, model, floor_in_backward, IN_BACKWARD)
    assert lowest.backward_steps is not None
    plain, managed = Training.of(kind, model), Training.of(kind, model)
    equal = 0
    peak = 0
    with plimsoll.apply(managed.model, lowest):
        for number in range(steps):
            measured = managed.peak_bytes(number)
            peak = max(peak, measured if number > 1 else 0)  # the first step is watched, the second records
            plain.step(number)
            equal += managed.is_equal(plain) and equal == number
    sides = {
        "plain": Training.of(kind, model),
        "at end": Training.of(kind, model),
        "in backward": Training.of(kind, model),
        "lowest": Training.of(kind, model),
    }
    plans = {"at end": at_end, "in backward": same, "lowest": lowest}
    handles = [plimsoll.apply(sides[name].model, plan) for name, plan in plans.items()]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 4):
        for name, side in sides.items():
            begin = time.process_time()
            side.step(number)
            if number >= 4:  # plans record and are watched before
                seconds[name].append(time.process_time() - begin)
    for handle in handles:
        handle.remove()

    def ratio(one: str, other: str) -> float:
        return statistics.median(mine / theirs for mine, theirs in zip(seconds[one], seconds[other], strict=True))

    return Row(
        kind.name,
        lowest.backward_steps.optimizer,
        lowest.backward_steps.gradient_bytes / MIB,
        at_end.baseline_peak_bytes / MIB,
        floor / MIB,
        floor_in_backward / MIB,
        equal,
        lowest.predicted_peak_bytes / peak,
        ratio("at end", "plain"),
        ratio("in backward", "plain"),
        ratio("in backward", "at end"),
        ratio("lowest", "plain"),
        1 + lowest.predicted_overhead,
    )


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the page's table."""
    return (
        row.kind, row.optimizer, f"{row.gradients_mib:.1f}", f"{row.unmanaged_mib:.1f}", f"{row.floor_mib:.1f}",
        f"{row.floor_in_backward_mib:.1f}", f"{row.floor_in_backward_mib / row.floor_mib:.2f}", str(row.equal_steps),
        f"{row.predicted_share:.4f}", f"{row.time_at_end:.2f}", f"{row.time_in_backward:.2f}", f"{row.time_ratio:.2f}",
        f"{row.time_at_floor:.2f}", f"{row.predicted_time:.2f}",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backward_steps", description=__doc__)
    parser.add_argument("--only", choices=tuple(KINDS), nargs="+", metavar="KIND", help="some models alone")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="timed steps of each side, in turns (30)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps to compare weights after (100)")
    options = parser.parse_args()
    rows = []
    with one_thread():
        for name in options.only or KINDS:
            row = measure(KINDS[name], options.rounds, options.steps)
            rows.append(row)
            say(" | ".join(cells(row)))
    command = f"PYTHONPATH=src python -m benchmarks.backward_steps --rounds {options.rounds} --steps {options.steps}"
    title = "Steps in backward"
    print("\n".join(page_head(title, command, device=device_name(torch.device("cpu")), versions=versions())))
    print("\n".join([_LEGEND, "", *format_table(_HEAD, map(cells, rows))]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
