"""The micro-batch that ``plimsoll.fit`` chooses against every one measured: its rank, and the throughput that it gives away.

    python -m benchmarks.fit_brute_force --budget 24MiB --sequence 64 --most-batch 16

A small transformers Llama on this CPU, one thread, on source text of the standard library. Every micro-batch that fits is
planned by ``plimsoll.plan``, run, and timed in turns with all the others, so that what else the machine does hits all alike.
Prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import plimsoll
from benchmarks.machine import device_name, versions
from plimsoll.artifacts.fit import Fit
from plimsoll.artifacts.plan import Plan
from plimsoll.engine.apply import Handle, apply_plan
from plimsoll.errors import BudgetBelowFloor
from plimsoll.session.training_step import TrainingStep
from plimsoll.tracing.meters.timing import one_thread, time_in_turns
from plimsoll.units import format_bytes

_VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Measured:
    """One micro-batch under its plan."""

    micro_batch: int
    peak_bytes: int
    tokens_per_second: float
    is_unmanaged: bool


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fit_brute_force", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--budget", default="24MiB")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--most-batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    print(f"{device_name(torch.device('cpu'))}; {', '.join(f'{k} {v}' for k, v in versions().items())}\n")
    with one_thread():
        model = _model()
        found = plimsoll.fit(model, _batch(2, options.sequence), options.budget, most_batch=options.most_batch)
        measured = list(_measure_all(model, options))
    print(f"{found}\n")
    print("| micro-batch | predicted tokens/s | measured tokens/s | measured peak | plan |")
    print("|--:|--:|--:|--:|---|")
    for each in measured:
        plan = "keep all" if each.is_unmanaged else "recompute"
        print(
            f"| {each.micro_batch} | {_predicted(found, each.micro_batch)} | {each.tokens_per_second:,.0f} | "
            f"{format_bytes(each.peak_bytes)} | {plan} |"
        )
    print(f"\n{_judge(found, measured)}")
    return 0


def _predicted(found: Fit, micro_batch: int) -> str:
    point = next((p for p in found.points if p.micro_batch == micro_batch and p.does_fit), None)
    return "-" if point is None else f"{point.items_per_second:,.0f}"


def _judge(found: Fit, measured: list[Measured]) -> str:
    """The rank of the choice among all, and what it gives away."""
    ranked = sorted(measured, key=lambda each: -each.tokens_per_second)
    best, chosen = ranked[0], found.best_point
    if chosen is None:
        return "fit found nothing"
    rank = next(place for place, each in enumerate(ranked, 1) if each.micro_batch == chosen.micro_batch)
    loss = 1 - ranked[rank - 1].tokens_per_second / best.tokens_per_second
    return f"chosen: {chosen.micro_batch}, rank {rank} of {len(ranked)}, {loss:.1%} below the best ({best.micro_batch})"


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model: torch.nn.Module = transformers.LlamaForCausalLM(config).train()
    return model


def _batch(examples: int, sequence: int) -> dict[str, torch.Tensor]:
    """Source text of the standard library, byte by byte."""
    data = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    tokens = data[: examples * sequence].view(examples, sequence)
    return {"input_ids": tokens, "labels": tokens}


def _measure_all(model: torch.nn.Module, options: argparse.Namespace) -> Iterator[Measured]:
    plans: dict[int, Plan] = {}
    with contextlib.suppress(BudgetBelowFloor):
        for examples in range(1, options.most_batch + 1):
            plans[examples] = plimsoll.plan(model, _batch(examples, options.sequence), options.budget)
    runs: dict[str, Callable[[], object]] = {}
    peaks: dict[int, int] = {}
    with contextlib.ExitStack() as stack:
        for examples, plan in plans.items():
            step = TrainingStep(model, (), _batch(examples, options.sequence))
            handle = apply_plan(model, plan)
            stack.callback(handle.remove)
            step.run()
            peaks[examples] = step.measure_peak().peak_bytes
            step.clear_gradients()  # the next step starts without any
            handle.pause()
            runs[str(examples)] = _managed_run(step, handle)
        timings = time_in_turns(runs, rounds=options.rounds)
    for examples, plan in plans.items():
        seconds = timings[str(examples)].median_seconds
        is_unmanaged = all(region.is_untouched for region in plan.regions)
        yield Measured(examples, peaks[examples], examples * options.sequence / seconds, is_unmanaged)


def _managed_run(step: TrainingStep, handle: Handle) -> Callable[[], object]:
    def run() -> None:
        handle.resume()
        try:
            step.run()
        finally:
            handle.pause()
            step.clear_gradients()

    return run


if __name__ == "__main__":
    sys.exit(main())
