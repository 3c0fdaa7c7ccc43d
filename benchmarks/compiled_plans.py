"""Plans inside of torch.compile by themselves: budgets kept and predicted, losses, seconds to decide, a second process."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import plimsoll
from benchmarks import losses
from benchmarks.compiled_peers import Subject, told_gradients
from benchmarks.measure import run_step
from benchmarks.models import Case, build
from benchmarks.page import format_mib, format_table
from benchmarks.peers import compiled
from plimsoll.errors import PlimsollError
from plimsoll.session.compiled import CompiledPlanner, planned_parts, trace_compiled
from plimsoll.session.options import PlanOptions
from plimsoll.session.task import TrainingTask

SHARES = (0.0, 0.10, 0.25, 0.50, 0.75, 0.90)
_BUDGET_HEAD = ("budget", "MiB", "peak MiB", "within", "predicted / measured", "gradients", "units that recompute")


def budgets(subject: Subject, shares: Sequence[float]) -> list[str]:
    """Plans between the floor and the unmanaged compiled peak."""
    rows, peaks, misses = [], [], []
    floor_bytes, peak_bytes = subject.floor_bytes, subject.unmanaged.steady.total_peak_bytes
    for share in shares:
        budget = round(floor_bytes + share * (peak_bytes - floor_bytes))
        head = [f"{share:.0%}" if share else "floor", format_mib(budget)]
        try:
            with contextlib.ExitStack() as inner:
                plan, variant = subject.prepared_plan(inner, f"{share:.0%}", budget)
        except PlimsollError as error:
            rows.append([*head, f"{type(error).__name__}: {error.found}", "", "", "", ""])
            subject.case.model.zero_grad(set_to_none=True)
            continue
        taken = max(variant.first.total_peak_bytes, variant.steady.total_peak_bytes)
        peaks.append(taken)
        misses.append(abs(plan.predicted_peak_bytes / taken - 1))
        rows.append(
            [
                *head, format_mib(taken), "yes" if taken <= budget else f"**{taken - budget} bytes over**",
                f"{plan.predicted_peak_bytes / taken:.4f}", told_gradients(variant),
                str(sum(bool(region.dropped) for region in plan.regions)),
            ]
        )  # fmt: skip
    falls = sum(later < earlier for earlier, later in itertools.pairwise(peaks))
    return [
        "",
        f"{subject.case.name}, {subject.how}: floor {format_mib(floor_bytes)} MiB, unmanaged {format_mib(peak_bytes)} MiB; the "
        f"peak falls while the budget rises {falls} times of {len(peaks) - 1}; predictions are off by "
        f"{max(misses, default=0.0):.2%} at most:",
        "",
        *format_table(_BUDGET_HEAD, rows),
    ]


def same_losses(name: str, *, how: str, steps: int, share: float = 0.3) -> list[str]:
    """Whether a plan trains a tiny model to the same losses as the default partition."""
    case = build(name, "tiny")
    expected = losses.train(case, compiled.apply(case.model, how), steps=steps)
    case = build(name, "tiny")
    with compiled.apply(case.model, how):
        free = plimsoll.plan(case.model, case.batch, strategy="none", loss=case.loss)
    budget = round(free.floor_bytes + share * (free.predicted_peak_bytes - free.floor_bytes))
    found = losses.train(case, _planned(case, how, budget), steps=steps)
    differ = [at for at, (mine, theirs) in enumerate(zip(found, expected, strict=True)) if mine != theirs]
    far = max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(found, expected, strict=True))
    verdict = f"differ from step {differ[0]}, by {far:.1e} at most" if differ else "identical"
    return [
        f"- {name}, {how}, dropout on, {format_mib(budget)} of {format_mib(free.predicted_peak_bytes)} MiB: losses of {steps} "
        f"steps ({expected[0]:.4f} to {expected[-1]:.4f}) **{verdict}**"
    ]


@contextlib.contextmanager
def _planned(case: Case, how: str, budget: int) -> Iterator[None]:
    """The case's model compiled, planned for a budget and under that plan."""
    with compiled.apply(case.model, how):
        plan = plimsoll.plan(case.model, case.batch, budget=budget, loss=case.loss)
        with plimsoll.apply(case.model, plan):
            yield


def deciding(depths: Sequence[int], *, how: str) -> list[str]:
    """CPU seconds of reading graphs and of solving, without torch's own tracing and compiling, by the number of blocks."""
    return [_deciding(layers, how) for layers in depths]


def _deciding(layers: int, how: str) -> str:
    from plimsoll.tracing.compiled import capture
    from plimsoll.tracing.compiled import step as woven

    model, batch = _deep_llama(layers)
    spent: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiled.apply(model, how))
        for home, name in ((capture, "JointGraph"), (woven, "with_compiled")):
            stack.enter_context(mock.patch.object(home, name, _timed(getattr(home, name), name, spent)))
        task = TrainingTask.read(model, batch)
        options = PlanOptions.read(strategies="auto", allow=("recompute",))
        start = time.process_time()
        traced = trace_compiled(task, options)
        all_traced = time.process_time() - start
        planner = CompiledPlanner(planned_parts(task, options.regions), *traced, options, None)
        free = planner.solve(None, "none")
        solves = []
        for share in (0.1, 0.5, 0.9):
            budget = round(free.floor_bytes + share * (free.baseline_peak_bytes - free.floor_bytes))
            start = time.process_time()
            planner = CompiledPlanner(planned_parts(task, options.regions), *traced, options, budget)
            planner.solve(budget)
            solves.append(time.process_time() - start)
    return (
        f"- {layers} blocks, {how}: graphs read in {spent['JointGraph']:.2f} s, made part of the step in "
        f"{spent['with_compiled']:.2f} s (kernels timed in it), solved in "
        f"{', '.join(f'{each:.2f}' for each in solves)} s at 10, 50, 90%; with the eager trace and torch's own tracing "
        f"{all_traced:.1f} s before solving"
    )


def _timed(function: Callable[..., Any], name: str, spent: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.process_time() - start  # type: ignore[assignment]

    return call


def _deep_llama(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    widths = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**widths, num_hidden_layers=layers, vocab_size=256, use_cache=False)
    ids = torch.randint(0, 256, (2, 64))
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def warm_start(name: str, *, how: str) -> list[str]:
    """What a process compiles that loads the plan which another one has made and run, beside a third one; and what is compiled
    under a plan that keeps everything.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = {}
        with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
            for process in ("plans and runs", "loads and runs", "loads and runs again"):
                context = multiprocessing.get_context("spawn")
                with context.Pool(1) as pool:
                    told[process] = pool.apply(_one_process, (name, how, str(Path(folder) / "plan.json")))
    return [
        f"- {name}, {how}: a process that {process}: "
        + ", ".join(f"{count} {each}" for each, count in sorted(counts.items()))
        for process, counts in told.items()
    ] + _untouched(name, how)


def _one_process(name: str, how: str, path: str) -> dict[str, Any]:
    """In a process of its own: plan and save, or load; then three steps."""
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    case = build(name, "tiny")
    with compiled.apply(case.model, how):
        if Path(path).exists():
            plan = plimsoll.load(path)
        else:
            free = plimsoll.plan(case.model, case.batch, strategy="none", loss=case.loss)
            budget = (free.floor_bytes + free.predicted_peak_bytes) // 2
            plan = plimsoll.plan(case.model, case.batch, budget=budget, loss=case.loss)
            plan.save(path)
        start = time.perf_counter()
        with plimsoll.apply(case.model, plan):
            for _ in range(3):
                run_step(case, case.model)
                case.model.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
    names = {
        "inductor": ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"),
        "aot_autograd": ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass"),
    }
    return {each: counters[group][each] for group, some in names.items() for each in some} | {
        "s for three steps": round(seconds, 1)
    }


def _untouched(name: str, how: str) -> list[str]:
    from torch._dynamo.utils import counters

    case = build(name, "tiny")
    with compiled.apply(case.model, how):
        run_step(case, case.model)
        parts = [part for part in case.model.modules() if part._compiled_call_impl is not None]
        before, compiled_before = [part._compiled_call_impl for part in parts], counters["stats"]["unique_graphs"]
        plan = plimsoll.plan(case.model, case.batch, budget="auto", loss=case.loss)
        planned_graphs = counters["stats"]["unique_graphs"]
        with plimsoll.apply(case.model, plan):
            run_step(case, case.model)
            is_same = before == [part._compiled_call_impl for part in parts]
    told = "the same object" if is_same else "**another**"
    return [
        f"- {name}, {how}, a plan that keeps everything: what was compiled is {told}, "
        f"{counters['stats']['unique_graphs'] - planned_graphs} graphs compiled under it ({planned_graphs - compiled_before} "
        "were read for the plan)"
    ]


@contextlib.contextmanager
def roomy_recompiles() -> Iterator[None]:
    """Let one process compile one model forty times: torch falls back to eager code at eight."""
    with torch._dynamo.config.patch(recompile_limit=512, accumulated_recompile_limit=4096):
        yield
