"""What each rank of a pipeline does in the tests: real schedules over stages of transformers' architectures."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from benchmarks.stages import LlamaPart
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
)
from torch.distributed.pipelining import pipeline as cut
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from launching import refused
from plimsoll.artifacts.plan import Plan
from plimsoll.distributed.pipelines.pipeline_stages import attach_schedule, received_buffers
from plimsoll.distributed.pipelines.schedules import read_schedule
from plimsoll.distributed.pipelines.stage_plans import apply_stages
from plimsoll.planning.strategies import find_extremes
from plimsoll.session.step_planner import trace_and_cost
from plimsoll.session.task import TrainingTask
from plimsoll.tracing.meters.memory import PeakMeter, storage_bytes
from steps import Block

HIDDEN, SEQUENCE, VOCABULARY, MICRO_BATCH = 32, 32, 64, 2
LAYERS = 4
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}
MULTI = {
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def llama_part(first: int, last: int, count: int) -> nn.Module:
    """Some layers of a Llama."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 64}
    return LlamaPart(LlamaConfig(num_hidden_layers=count, **sizes, **heads), first, last)


class Gpt2Part(nn.Module):
    """Some blocks of a GPT-2, with dropout."""

    def __init__(self, first: int, last: int, count: int) -> None:
        super().__init__()
        config = GPT2Config(n_embd=HIDDEN, n_head=2, n_layer=count, attn_implementation="sdpa")
        self.wte = nn.Embedding(VOCABULARY, HIDDEN) if first == 0 else None
        self.h = nn.ModuleDict({str(i): GPT2Block(config, layer_idx=i) for i in range(first, last)})
        self.head = nn.Linear(HIDDEN, VOCABULARY) if last == count else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.wte is not None:
            hidden = self.wte(hidden)
        for block in self.h.values():
            out = block(hidden)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden if self.head is None else self.head(hidden)


def split_stages(count: int) -> Any:
    """A small model that torch's ``pipeline()`` traces and cuts between its blocks: stages are graph modules."""
    torch.manual_seed(0)
    blocks = [Block(HIDDEN, dropout=0.0) for _ in range(2 * count)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), *blocks, nn.Linear(HIDDEN, VOCABULARY, bias=False))
    cuts = {str(2 * index + 1): SplitPoint.BEGINNING for index in range(1, count)}
    return cut(model, (torch.zeros(MICRO_BATCH, SEQUENCE, dtype=torch.long),), split_spec=cuts)


PARTS: dict[str, Callable[[int, int, int], nn.Module]] = {"llama": llama_part, "gpt2": Gpt2Part}


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Pipeline:
    """One rank's stages under a schedule, always built alike."""

    def __init__(self, family: str, name: str, *, micro_batches: int = 0, layers: int = LAYERS) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if name in SINGLE:
            indices, count = [rank], ranks
        elif name == "zbv":
            indices, count = [rank, 2 * ranks - 1 - rank], 2 * ranks
        else:
            indices, count = [rank, rank + ranks], 2 * ranks
        layers = max(layers, count)
        per_stage = layers // count
        device = torch.device("cpu")
        self.micro_batches = micro_batches or 2 * ranks
        if family == "split":
            whole = split_stages(count)
            stages = [whole.build_stage(index, device) for index in indices]
            self.parts = [stage.submod for stage in stages]
        else:
            self.parts = []
            for index in indices:
                torch.manual_seed(index)
                self.parts.append(PARTS[family](index * per_stage, (index + 1) * per_stage, layers))
            stages = [
                PipelineStage(part, index, count, device) for part, index in zip(self.parts, indices, strict=True)
            ]
        kind: Any = SINGLE.get(name) or MULTI[name]
        of = stages[0] if name in ("gpipe", "1f1b") else stages
        self.schedule = kind(of, self.micro_batches, loss_fn=loss)
        self.is_first, self.is_last = 0 in indices, count - 1 in indices

    def step(self, seed: int) -> list[torch.Tensor]:
        """Train one step; the losses, and every gradient."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.micro_batches * MICRO_BATCH, SEQUENCE)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        target = torch.randint(VOCABULARY, shape, generator=generator)
        losses: list[torch.Tensor] = []
        torch.manual_seed(seed)
        self.schedule.step(
            *([tokens] if self.is_first else []),
            **({"target": target, "losses": losses} if self.is_last else {}),
        )
        return [*losses, *(p.grad for part in self.parts for p in part.parameters() if p.grad is not None)]

    def attributes(self) -> list[list[str]]:
        """Of the schedule and of every module."""
        return [list(vars(each)) for each in (self.schedule, *(m for part in self.parts for m in part.modules()))]

    def zero(self) -> None:
        for part in self.parts:
            part.zero_grad()


def equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def measured_peak(pipeline: Pipeline, seed: int) -> int:
    """The peak of one step by allocator events, with all that was there before it."""
    stages = read_schedule(pipeline.schedule).stages.values()
    for stage in stages:
        stage.clear_runtime_states()
    gc.collect()
    there = [tensor for stage in stages for tensor in received_buffers(stage)]
    there += [tensor for part in pipeline.parts for tensor in (*part.parameters(), *part.buffers())]
    with PeakMeter() as meter:
        pipeline.step(seed)
    return storage_bytes(there) + meter.peak_bytes


@contextlib.contextmanager
def counted_transfers() -> Iterator[list[int]]:
    """How many tensors go between ranks."""
    counts: list[int] = []
    original = dist.batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", lambda ops: counts.append(len(ops)) or original(ops)):
        yield counts


def everything(cases: list[tuple[str, str, float]]) -> dict[str, Any]:
    """All scenarios of one launch: schedules under shares of what they take without a plan, and what is refused."""
    return under_budgets(cases) | {"refused": _refused(), "saved": _saved_plans()}


def under_budgets(cases: list[tuple[str, str, float]]) -> dict[str, Any]:
    """Steps without a plan, under a share of what those take, and after ``remove``, for every case."""
    return {f"{family} {name}": _under_budget(family, name, share) for family, name, share in cases}


def _refused() -> dict[str, Any]:
    """Errors, each as its type and what it found; no rank may hang."""
    pipeline = Pipeline("split", "gpipe", micro_batches=2)
    found = {}
    with attach_schedule(pipeline.schedule, "1GiB"):
        found["twice"] = refused(lambda: attach_schedule(pipeline.schedule, "1GiB"))
    before = dict(vars(pipeline.schedule))
    budget = "4KiB" if dist.get_rank() == 1 else "1GiB"
    attach_schedule(pipeline.schedule, budget)
    found["below floor"] = refused(lambda: pipeline.step(0))
    found["untouched"] = vars(pipeline.schedule).keys() == before.keys() and not any(
        p.grad is not None for part in pipeline.parts for p in part.parameters()
    )
    pipeline.step(0)  # and trains on without a budget
    pipeline.zero()
    handle = attach_schedule(pipeline.schedule, "1GiB")
    with torch.no_grad():
        arguments = [torch.zeros(4, SEQUENCE, dtype=torch.long)] if pipeline.is_first else []
        named = {"target": torch.zeros(4, SEQUENCE, dtype=torch.long)} if pipeline.is_last else {}
        pipeline.schedule.eval(*arguments, **named)
    found["plans after eval"] = len(handle.plans)
    handle.remove()
    handle.remove()
    return found


def lowest_plan(pipeline: Pipeline) -> Plan:
    """The plan that recomputes all it can in this rank's only stage, with its other micro-batches in flight."""
    hidden = torch.zeros(MICRO_BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    tokens = torch.zeros(MICRO_BATCH, SEQUENCE, dtype=torch.long)
    stage = pipeline.parts[0]
    batch = tokens if pipeline.is_first else hidden
    trace, costs = trace_and_cost(TrainingTask(model=stage, batch=batch, loss=torch.sum))
    return msgspec.structs.replace(find_extremes(trace, costs).lowest, in_flight=dist.get_world_size())


def _saved_plans() -> dict[str, Any]:
    """A plan per stage, made alone, applied to a schedule whose stages have longer names; and refusals."""
    rank, pipeline, plain = dist.get_rank(), Pipeline("gpt2", "1f1b"), Pipeline("gpt2", "1f1b")
    full, stage = lowest_plan(pipeline), pipeline.parts[0]
    whole = msgspec.structs.replace(
        full,
        regions=tuple(msgspec.structs.replace(r, name=f"transformer.{r.name}") for r in full.regions),
    )
    expected = plain.step(0)
    with apply_stages(pipeline.schedule, {rank: whole}) as handle:
        same = equal(pipeline.step(0), expected)
        dropped = sum(o.dropped_bytes for each in handle._handles for o in each.outcomes())
    few = msgspec.structs.replace(whole, in_flight=0)
    other = msgspec.structs.replace(
        whole, regions=tuple(msgspec.structs.replace(r, name=f"decoder.{r.name}.x") for r in whole.regions)
    )
    return {
        "same": same,
        "dropped": dropped,
        "names": [region.name for region in handle.plans[rank].regions],
        "too few": refused(lambda: apply_stages(pipeline.schedule, {rank: few} if rank == 0 else {rank: whole})),
        "other": refused(lambda: apply_stages(pipeline.schedule, {rank: other})),
        "managed": any("forward" in vars(module) for module in stage.modules()),
    }


def _plainly(pipeline: Pipeline, seed: int) -> tuple[list[torch.Tensor], list[int]]:
    with counted_transfers() as transfers:
        gradients = pipeline.step(seed)
    pipeline.zero()
    return gradients, transfers


def _under_budget(family: str, name: str, share: float) -> dict[str, Any]:
    started = time.process_time()
    plain, managed = Pipeline(family, name), Pipeline(family, name)
    _, first = _plainly(plain, 0)  # torch infers shapes in its first step, or tries its connections
    unmanaged = measured_peak(plain, 0)
    plain.zero()
    expected = [_plainly(plain, seed) for seed in range(6)]  # not in between: the steps under a budget are measured
    budget = int(share * unmanaged)
    before = managed.attributes()
    handle = attach_schedule(managed.schedule, budget)
    same = []
    for seed, (gradients, transfers) in enumerate(expected):
        with counted_transfers() as under:
            same.append(equal(gradients, managed.step(seed)) and under == (transfers if seed else first))
        managed.zero()
    report = handle.report
    measured = measured_peak(managed, 7)
    managed.zero()
    handle.remove()
    return {
        "same": same,
        "same_after_removal": equal(plain.step(8), managed.step(8)),
        "restored": managed.attributes() == before,
        "budget": budget,
        "unmanaged": unmanaged,
        "predicted": report.predicted_peak_bytes,
        "measured": measured,
        "calibrating": report.is_calibrating,
        "extra": [stage.predicted_extra_seconds for stage in report.stages],
        "excess": report.excess_bytes,
        "text": str(report),
        "cpu_seconds": time.process_time() - started,
    }


def on_four() -> dict[str, bool]:
    """Whether two steps that recompute all they can, the first of them recording, have the gradients without a plan."""
    return {name: _same_at_the_lowest(family, name) for family, name in (("gpt2", "1f1b"), ("llama", "zero-bubble"))}


def _same_at_the_lowest(family: str, name: str) -> bool:
    plain, managed = Pipeline(family, name), Pipeline(family, name)
    index = dist.get_rank()
    expected = [_plainly(plain, seed)[0] for seed in range(2)]
    same = []
    with apply_stages(managed.schedule, {index: lowest_plan(managed)}):
        for seed, gradients in enumerate(expected):
            same.append(equal(gradients, managed.step(seed)))
            managed.zero()
    return all(same)
